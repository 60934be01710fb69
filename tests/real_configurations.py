"""Configurations of published models, their sizes shrunk and their odd fields kept.

    python -m tests.real_configurations [NAME …]     run them, and keep what came of each

`real_configurations.json` has for each model what its config.json says: fields that transformers
does not know, old and new forms of rotary scalings, names of code beside the checkpoint, brands of
quantization. Each is compiled as its publisher wrote it, and compared with transformers' own model
of the class that it names; or it is refused, by name and at once.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import tempfile
import textwrap
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specc.compiler import build as compiler
from specc.config import CompileConfig
from specc.errors import SpeccError
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from tests import branded_checkpoints, models, more_models, quantized_checkpoints
from tests.lossless import generate, run_case
from tests.mxfp4_experts import write_experts
from tests.near_ties import Reference
from tests.traces import shared_traces

FILE = Path(__file__).with_suffix(".json")
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "real_configurations.json"
NUM_TOKENS = 20
PLANS = (SpecPlan.from_widths(()), SpecPlan.from_widths((2, 2, 1)))
# of models whose layers keep states, which are no drafts
LOOKUPS = (SpecPlan.from_widths(()), SpecPlan.from_widths((1, 1, 1), drafts=("lookup-3",)))
# what is refused is refused before anything slow starts
MOST_SECONDS = 10.0
# longer than the windows; with the output, shorter than what every rotary scaling began with
PROMPT_LENS = (1, 19, 36)
MAX_SEQ_LEN = 64
# layers that keep a state
HYBRIDS = ("nvidia/Nemotron-H-56B-Base-8K", "Qwen/Qwen3.5-27B", "LiquidAI/LFM2-1.2B")


@functools.cache
def configurations() -> dict[str, dict[str, Any]]:
    """Name of a published model → its config.json, shrunk."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def read_results() -> list[dict[str, Any]]:
    """What came of each, in the order of the configurations."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return rows


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(0, models.VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENS]


# model types whose layers have to be louder, so that outputs are not one token: a norm, or a
# projection, follows an embedding that is the head
_LOUD = ("bloom", "opt")


def _class_named(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


# wrappers whose language model is compared alone: the first needs a library that reads images, and
# transformers writes the other's layers under other names than it reads
_TEXT_ALONE = {
    "Gemma3nForConditionalGeneration": functools.partial(_class_named, "Gemma3nForCausalLM"),
    "Kimi_K25ForConditionalGeneration": functools.partial(_class_named, "DeepseekV3ForCausalLM"),
}


class Published:
    """A checkpoint of a configuration, and transformers' model of the same numbers.

    Args:
        name: of `configurations`.
        root: gets `model`, the checkpoint.
    """

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.directory = name, root / "model"
        self._raw = copy.deepcopy(configurations()[name])
        # of a wrapper, its text may say it
        places = self._raw, self._raw.get("text_config", {})
        brands = [place.pop("quantization_config", None) for place in places]
        self._brand = next(filter(None, brands), None)
        # a name of longrope that transformers has dropped
        self._raw = json.loads(json.dumps(self._raw).replace('"type": "su"', '"type": "longrope"'))
        kind = _class_of(self._raw)
        self._model = None if kind is None else self._write(kind, root)
        if self._model is None:
            self.directory.mkdir()
        elif hasattr(self._model, "generation_config"):
            # fields that transformers takes for options of its own generation
            self._model.generation_config.use_mtp = False
        models.byte_tokenizer().save(str(self.directory / "tokenizer.json"))
        text = json.dumps(configurations()[name])
        (self.directory / "config.json").write_text(text, encoding="utf-8")

    def _write(self, kind: Any, root: Path) -> Any:
        """Write the checkpoint; returns the model that its numbers stand for."""
        raw, prefix = self._raw, ""
        if kind.__name__ in _TEXT_ALONE:
            raw, prefix = self._raw["text_config"], "language_model."
            kind = _TEXT_ALONE[kind.__name__]()
        made, config = drawn(kind, raw)
        made.save_pretrained(root / "plain")
        written = self._quantize(root)
        (root / "plain" if written is None else written.quantized).rename(self.directory)
        if prefix:
            _begin_with(prefix, self.directory / quantized_checkpoints.FILE)
        if written is None:
            return made
        return kind.from_pretrained(written.exact, config=config, dtype=torch.float32).eval()

    def _quantize(self, root: Path) -> quantized_checkpoints.Written | None:
        """Of `plain`, what the configuration says; None where it says nothing that is read."""
        if not self._brand:
            return None
        if self._brand.get("quant_method") == "mxfp4":
            return write_experts(root / "plain", root)
        if (form := _form(self._brand)) is None:
            return None
        # experts alone, where the file leaves out what is beside them
        part = "mlp.experts." if "re:.*self_attn.*" in self._brand.get("ignore", ()) else ""
        written = quantized_checkpoints.write_checkpoint(
            root / "plain", root, form.config, form.writer,
            lambda name: part in name and quantized_checkpoints.is_projection(name),
        )  # fmt: skip
        return written if written.weights else None

    def reference(self, name: str, prompt: Sequence[int], num_tokens: int) -> Reference:
        """Greedy continuation by transformers, as `tests.lossless.Zoo` has it."""
        return generate(self._model, prompt, num_tokens, eos_token_id=None)


def _begin_with(prefix: str, file: Path) -> None:
    """Give tensors of a language model the names that they have in a wrapper."""
    tensors = load_file(file)
    save_file({prefix + key: value for key, value in tensors.items()}, file, {"format": "pt"})


def drawn(kind: Any, raw: Mapping[str, Any]) -> tuple[Any, Any]:
    """Transformers' model of a configuration, every parameter drawn anew; its configuration."""
    config = kind.config_class.from_dict(copy.deepcopy(dict(raw)))
    made = kind._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    heads = made.get_output_embeddings(), made.get_input_embeddings()
    is_tied = heads[0] is not None and heads[0].weight is heads[1].weight
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            spread, center = more_models.spread("", key, parameter)
            if parameter is heads[1].weight and is_tied:
                # a head that is the embedding repeats the last token, if that is what is largest
                spread = 0.02 / raw.get("embedding_multiplier", raw.get("scale_emb", 1.0))
            elif parameter.dim() > 1 and raw["model_type"] in _LOUD:
                spread *= 3
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(center + spread * noise)
        more_models.draw_buffers(made, generator)
    return made.eval(), config


def _class_of(raw: Mapping[str, Any]) -> Any:
    """The class that a configuration names, or that of its model type; None: transformers has none.

    Found by the words of the file alone, and by nothing that specc reads them with.
    """
    import transformers
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    if (found := getattr(transformers, raw["architectures"][0], None)) is not None:
        return found
    if raw["model_type"] not in CONFIG_MAPPING:
        return None
    kind = CONFIG_MAPPING[raw["model_type"]]
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    return found or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(kind, None)


def _form(brand: Mapping[str, Any]) -> quantized_checkpoints.Format | None:
    """How the weights of a brand are written; None: it is refused."""
    method = brand.get("quant_method")
    if method == "fp8":
        return quantized_checkpoints.float8_blocks(brand["weight_block_size"][0])
    if method == "compressed-tensors":
        weights = brand["config_groups"]["group_0"]["weights"]
        return quantized_checkpoints.packed(weights["num_bits"], weights["group_size"])
    if method == "awq":
        return quantized_checkpoints.awq(brand["group_size"])
    if method is None and brand.get("producer", {}).get("name") == "modelopt":
        return branded_checkpoints.modelopt_fp8()
    return None


def outcome(name: str, root: Path) -> dict[str, Any]:
    """Compile a configuration, and compare it: a row of the results.

    Raises:
        AssertionError: a token differs, or all outputs are one token.
    """
    published = Published(name, root)
    raw = configurations()[name]
    is_hybrid = name in HYBRIDS
    config = CompileConfig(
        plans=LOOKUPS if is_hybrid else PLANS, max_seq_len=MAX_SEQ_LEN,
        max_batch_size=len(PROMPT_LENS), block_size=16,
        backend="eager", probe=False, weight_only="quantization_config" in json.dumps(raw),
    )  # fmt: skip
    row: dict[str, Any] = {"name": name, "model_type": raw["model_type"]}
    begin = time.perf_counter()
    try:
        # the draft is the model itself
        drafts = [] if is_hybrid else [published.directory]
        with shared_traces():
            compiler.build(published.directory, drafts, root / "engine", config)
    except SpeccError as error:
        took, refused = time.perf_counter() - begin, error
    else:
        return row | compared(published, Engine.load(root / "engine"))
    assert took < MOST_SECONDS, f"{name}: refused after {took:.1f} s: {refused}"
    place = str(published.directory)
    said = refused.found.replace(f"{place}: ", "").replace(place, "the checkpoint")
    return row | {"outcome": "refused", "error": type(refused).__name__, "said": said}


def compared(published: Published, engine: Engine) -> dict[str, Any]:
    """What came of a configuration that is compiled.

    Raises:
        AssertionError: see `outcome`.
    """
    name, num_compared = published.name, 0
    for plan in engine.plans.values():
        found = run_case(published, name, engine, plan.name, prompts(), NUM_TOKENS)
        num_compared += found.num_compared
    lines = [published.reference(name, prompt, NUM_TOKENS).tokens for prompt in prompts()]
    distinct = sum(len(set(line)) for line in lines) / len(lines)
    assert distinct > 3, f"{name}: outputs of {distinct:.1f} different tokens hide mistakes"
    return {"outcome": "equal", "num_compared": num_compared}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The part of `docs/guide/architectures.md` that says what came of them."""
    equal = [row for row in rows if row["outcome"] == "equal"]
    refused = [row for row in rows if row["outcome"] == "refused"]
    by_type: dict[str, list[str]] = {}
    for row in equal:
        by_type.setdefault(row["model_type"], []).append(row["name"])
    about = (
        f"What {len(rows)} published models say in `config.json`, with smaller sizes and all of"
        " their odd fields (`tests/real_configurations.json`), was compiled with random weights, in"
        f" the quantization that the file names. {len(equal)} equal transformers' own model of it,"
        f" {equal[0]['num_compared']} tokens each, with off and tree 2,2,1 (of hybrids, a chain of"
        " lookups) on `eager`;"
        f" {len(refused)} are refused, each within {MOST_SECONDS:.0f} seconds"
        " (`tests/runtime/test_real_configurations.py`)."
    )
    lines = ["", "## Configurations of published models", "", *textwrap.wrap(about, 100)]
    lines += ["", "| equal | model type |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {kind} |" for kind, names in by_type.items()]
    lines += ["", "| refused | what was found |", "|---|---|"]
    lines += [f"| {row['name']} | {_cell(row['said'])} |" for row in refused]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.removeprefix("config.json: ").replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[])
    options = parser.parse_args()
    order = list(configurations())
    for name in options.names or order:
        rows = read_results() if RESULTS.exists() else []
        try:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = outcome(name, Path(folder))
        except Exception as error:  # the others go on
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            continue
        rows = [own for own in rows if own["name"] != name] + [row]
        rows.sort(key=lambda own: order.index(own["name"]))
        lines = ",\n".join(json.dumps(own, ensure_ascii=False) for own in rows)
        RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(name, row["outcome"], row.get("said", ""), flush=True)


if __name__ == "__main__":
    main()
