"""Files that llama.cpp's own quantizer writes: tokens of their engines beside transformers'.

    python -m tests.measure.gguf_quantizer [--json out/gguf_quantizer.json] [MODEL …]

A model of random numbers, 256 columns wide so that no type falls back to another, is written in
float32, quantized by `llama_model_quantize` (package llama-cpp-python) to every mix, and compiled
from the file. Greedy tokens of two plans are compared with those of transformers on the numbers
that gguf-py makes of the blocks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

import specc
from specc.artifact.directory import read_manifest
from specc.bench.peers.gguf_export import export
from specc.bench.peers.peer import Form
from tests import models

NUM_TOKENS = 24
WIDE = {"hidden_size": 256, "intermediate_size": 512}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {}, "qwen3": {}}
# those that need no importance matrix
MIXES = (
    "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L",
    "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_M", "TQ1_0",
    "TQ2_0",
)  # fmt: skip


def quantize(source: Path, mix: str, output: Path) -> None:
    """By llama.cpp.

    Raises:
        RuntimeError: it refuses.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread = 1
    # from a file of blocks, too
    options.allow_requantize = True
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{mix}")
    paths = (str(source).encode(), str(output).encode())
    if llama_cpp.llama_model_quantize(*paths, options):
        raise RuntimeError(f"llama.cpp does not quantize {source} to {mix}")


def load_numbers(model: Any, name: str, file: Path) -> None:
    """Give a model the numbers of a file, by gguf-py alone."""
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = getattr(gguf.MODEL_ARCH, name.upper())
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    held = {}
    for key, old in model.state_dict().items():
        tensor = tensors[names.get_name(key, try_suffixes=(".weight", ".bias"))]
        numbers = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        numbers = numbers.reshape(old.shape)
        if name == "llama" and ("q_proj" in key or "k_proj" in key):
            query = "q_proj" in key
            config = model.config
            numbers = halves(
                numbers, config.num_attention_heads if query else config.num_key_value_heads
            )
        held[key] = numbers
    model.load_state_dict(held)


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rotary pairs of rows as two halves of a head again."""
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def tokens_of_transformers(model: Any) -> list[list[int]]:
    found = []
    for prompt in models.prompts():
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        found.append(output[0, len(prompt) :].tolist())
    return found


def tokens_of_specc(engine: Path, plan: str) -> list[list[int]]:
    params = specc.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = specc.LLM(engine, plan=plan).generate(models.prompts(), params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare(name: str, mix: str, root: Path) -> dict[str, Any]:
    """One model in one mix."""
    checkpoint, source = root / name, root / f"{name}.gguf"
    if not source.exists():
        models.save_tiny(name, checkpoint, **WIDE, **MODELS[name])
        export(checkpoint, Form("float32"), source)
    folder = root / f"{name}-{mix}"
    folder.mkdir()
    quantize(source, mix, folder / "model.gguf")
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_bytes((checkpoint / file).read_bytes())
    model = models.build_model(name, **WIDE, **MODELS[name]).eval()
    load_numbers(model, name, folder / "model.gguf")
    specc.compile(folder, "suffix", folder / "engine", num_speculative_tokens=4, dtype="float32")
    expected = tokens_of_transformers(model)
    plans = [plan.name for plan in read_manifest(folder / "engine").plans]
    same = {plan: tokens_of_specc(folder / "engine", plan) == expected for plan in plans}
    return {
        "model": name,
        "mix": mix,
        "equal": all(same.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name in options.models:
            for mix in MIXES:
                try:
                    rows.append(compare(name, mix, Path(root)))
                except (RuntimeError, specc.SpeccError) as error:
                    rows.append({"model": name, "mix": mix, "refused": str(error).split("\n")[0]})
                print(json.dumps(rows[-1]), flush=True)
    if options.json:
        used = {name: version(name) for name in ("transformers", "torch", "gguf")}
        lines = ",\n".join(json.dumps(row) for row in rows)
        text = f'{{"versions": {json.dumps(used)},\n"files": [\n{lines}\n]}}\n'
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
