"""Whether llama.cpp says what transformers says, of the GGUF files that tests write.

    python -m tests.measure.gguf_llama_cpp [--json docs/results/gguf_llama_cpp.json] [NAME …]

Files of `gguf_recordings.json` with drawn numbers in float32 are loaded by llama.cpp (package
llama-cpp-python), whose greedy tokens are compared with those of transformers on the model that the
file was written of. That these files alone make the same model here is what
`tests/passes/frontend/test_gguf_architectures.py` says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests import models
from tests.passes.frontend.gguf_recordings import recordings, write_recorded

NUM_TOKENS = 16
_F32 = 0
# of models in which llama.cpp computes something else than transformers: what, and what of the
# model makes transformers do the same; None where nothing does
DIFFERENT: dict[str, tuple[str, dict[str, Any] | None]] = {
    "gpt_oss": (
        "borders of yarn are rounded",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "truncate": True,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "phi3-longrope": ("all positions have the factors of long texts", {}),
    "phimoe": ("norms are RMS norms, and experts are weighted by a softmax", None),
    "exaone4": ("windows are those of the model of 64 layers alone", None),
    "deepseek_v2": ("groups are chosen by the sum of their two best experts", None),
    "bamba": ("rows of a head are paired as if all of them were rotated, which half is", None),
    "cohere-norms": ("norms of heads are those of the model of 64 layers alone", None),
    "deepseek_v2-lite": (
        "queries without a latent are those of models of 26, 27 or 48 layers",
        None,
    ),
}


def tokens_of_llama_cpp(file: Path, prompts: list[list[int]]) -> list[list[int]]:
    from llama_cpp import Llama

    model = Llama(
        str(file), n_ctx=128, n_batch=128, n_threads=1, type_k=_F32, type_v=_F32,
        flash_attn=False, verbose=False,
    )  # fmt: skip
    found = []
    for prompt in prompts:
        model.reset()
        tokens = model.generate(prompt, temp=0.0)
        found.append([next(tokens) for _ in range(NUM_TOKENS)])
    return found


def tokens_of_transformers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    found = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        found.append(output[0, len(prompt) :].tolist())
    return found


def compare(name: str) -> dict[str, Any]:
    """Tokens that are equal until one differs, of all."""
    base, changes = recordings()[name]["config"]
    why, more = DIFFERENT.get(name, ("", {}))
    if name == "phi3-longrope":
        rope = changes["rope_parameters"]
        more = {"rope_parameters": rope | {"short_factor": rope["long_factor"]}}
    model = models.build_model(base, **{**changes, **(more or {})})
    prompts = models.prompts()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_recorded(file, name, model.state_dict())
        try:
            found = tokens_of_llama_cpp(file, prompts)
        except ValueError as error:  # it does not load
            found, why = [[] for _ in prompts], why or str(error)
    equal = 0
    for own, theirs in zip(tokens_of_transformers(model, prompts), found, strict=True):
        pairs = zip(own, theirs, strict=False)
        equal += next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(own), len(theirs)))
    architecture = recordings()[name]["fields"]["general.architecture"]
    row = {"name": name, "architecture": architecture, "equal": equal}
    return row | {"of": NUM_TOKENS * len(prompts), **({"difference": why} if why else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    rows = []
    for name in options.names or recordings():
        rows.append(compare(name))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        import llama_cpp

        used = {name: version(name) for name in ("transformers", "torch")}
        used["llama-cpp-python"] = llama_cpp.__version__
        lines = ",\n".join(json.dumps(row) for row in rows)
        text = f'{{"versions": {json.dumps(used)},\n"models": [\n{lines}\n]}}\n'
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
