"""Which architectures equal `transformers.generate` on which backends: run, kept, and drawn.

    python -m tests.architecture_results --run --backend eager      all of them, kept as they pass
    python -m tests.architecture_results --run --backend cpu gemma2 gpt_oss
    python -m tests.architecture_results                            docs/guide/architectures.md anew

A run compares 32 tokens of five prompts of unequal lengths in one batch, and of one alone, with
off, a chain of 4 and tree 2,2,1, in float32, and adds what came of it to the file of results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.backends import LATENT_ROWS, VALUE_WIDTH, backend_names, facts_of
from tests import hybrids, models, more_models, real_configurations
from tests.passes.frontend.gguf_recordings import recordings

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "guide" / "architectures.md"
NAMES = (*models.ARCHITECTURES, *more_models.CONFIGS, *hybrids.CONFIGS)
NUM_TOKENS = 32
_HEAD = """# Architectures and backends

This page is written by `python -m tests.architecture_results` from
`docs/results/architectures.json`, which the same command extends with `--run`. Each number is how
many tokens of a tiny random model were compared with `transformers.generate`, all of them equal:
with off, a chain of 4 and tree 2,2,1, five prompts in one batch and one alone, float32. Steps of
`cuda` were captured and replayed on a simulated device, with the oracles of its operators in place
of the kernels, which are compared with them one by one ([the CUDA backend](../design/cuda.md)). For
`tensorrt` onnxruntime ran the files that TensorRT builds, at the addresses that it is given ([what
was executed](onnx-tensorrt.md)). `refused`: compiling such a model is refused before anything slow
starts. An empty field was not run by this command (`tests/runtime/test_lossless.py`,
`tests/runtime/backends/`: what the first twelve do on which backend). Weights in int8 and int4
(`--quantize`) are compared with off only: [quantized weights](quantization.md). `GGUF` is the
architecture (`general.architecture`) whose files are read: of each, what llama.cpp's converter
writes was recorded, and such a file alone makes the same model, number by number
(`tests/passes/frontend/test_gguf_architectures.py`). llama.cpp's own tokens on these files are
those of transformers for 59 of 64 models, 80 of 80 each; the others are models that llama.cpp
computes in another way, or does not load, see `docs/results/gguf_llama_cpp.json`. Models with
convolutions or recurrences have a draft of attention layers (`tests/hybrids.py`); prompts of 1 to
200 tokens and trees of a dynamic shape are compared by
`tests/runtime/test_hybrid_architectures.py`.

"""
_TAIL = """
## Models that take images, too

Of a checkpoint of `…ForConditionalGeneration` the language model is compiled, and the command says
that images and sound are not taken. Where transformers has a causal language model of its
`text_config` (Gemma 3, Llama 4, Mistral 3, Qwen3.5, SmolVLM), it is that; where it has none
(Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Muse Glimmer), the complete model is traced with text alone
(`tests/runtime/test_text_part.py`).

## Latent attention

Caches of DeepSeek V2 and V3, MiniCPM 3 and GLM-4.7-Flash hold [latents](../design/attention.md).
`--mla-cache` chooses: `latent`, `expanded`, or `auto`, the default: latents if they take fewer
bytes a token on each rank, or if keys and values have different widths and the backend (`cuda`,
`onnx`) supports only one. `expanded` is for long prompts and short outputs if memory is not a
concern. `specc inspect` shows which one an engine has.

| | with latents |
|---|---|
| trees, prefixes, self-drafts, segments, stages | as with other caches |
| ranks | heads of queries, Wk and Wv are cut; every rank has the complete latent |
| `--kv-cache-dtype` | rows of R + r and R, a scale each, absorbed prompts; `cuda`: expanded |
| `--quantize`, quantized checkpoints | Wk and Wv stay in `--dtype` |
| `cuda` | latents of 512 columns and 64 that heads share at most; prompts stay absorbed |
| chosen blocks of a self-draft on `cuda` | layers with rows of at most 256 columns stay expanded |
| `tensorrt` | expanded; `latent` is refused |
| Wk or Wv with a bias, or heads that share keys | expanded; the reason: `specc inspect --why` |
"""


def read_results() -> list[dict[str, Any]]:
    """Rows of the file, in the order of the table."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """`docs/guide/architectures.md`."""
    backends = backend_names()
    lines = ["| model type | attention | " + " | ".join(backends) + " | GGUF |"]
    lines.append("|---" * (3 + len(backends)) + "|")
    files = _gguf_architectures()
    for name in NAMES:
        own = {row["backend"]: row for row in rows if row["name"] == name}
        if not own:
            continue
        first = next(iter(own.values()))
        cells = [_cell(backend, own.get(backend), first) for backend in backends]
        cells.append(files.get(name, ""))
        lines.append(f"| {name} | {first['attention']} | " + " | ".join(cells) + " |")
    published = real_configurations.table(real_configurations.read_results())
    return _HEAD + "\n".join(lines) + "\n" + published + _TAIL


def _gguf_architectures() -> dict[str, str]:
    """Name of a model → the architecture that llama.cpp's converter makes of it, if it is read."""
    found = {}
    for item in recordings().values():
        found.setdefault(item["config"][0], item["fields"]["general.architecture"])
    return found


def _cell(backend: str, row: dict[str, Any] | None, any_row: dict[str, Any]) -> str:
    able = facts_of(backend).attention_extras
    if any_row.get("keeps_states") and not facts_of(backend).keeps_states:
        return "refused"
    # keys and values of one latent, which is cached in their place
    given = {LATENT_ROWS: (VALUE_WIDTH,)}
    able = (*able, *(x for what in able for x in given.get(what, ())))
    if any(extra not in able for extra in any_row["extras"]):
        return "refused"
    if row is None:
        return ""
    ties = f", {row['forgiven_ties']} near ties" if row["forgiven_ties"] else ""
    return f"{row['num_compared']}{ties}"


def run(zoo: Any, name: str, backend: str) -> dict[str, Any]:
    """Compare one architecture; raises AssertionError where a token differs."""
    from tests.lossless import PLANS, run_case
    from tests.runtime.backends.captured.simulated_device import stand_in

    prompts = models.prompts()
    compared = ties = 0
    plans = PLANS[0], PLANS[2], PLANS[3]
    with contextlib.ExitStack() as stack:
        if facts_of(backend).captures_live:
            stand_in(stack.enter_context(pytest.MonkeyPatch.context()))
        if facts_of(backend).has_plan_files:
            engine = stack.enter_context(_recorded(zoo, name, plans))
        else:
            engine = zoo.engine(name, prefill_chunk=7, backend=backend)
        for number, plan in enumerate(plans):
            for batch in (prompts, [prompts[number + 1]]):
                outcome = run_case(zoo, name, engine, plan.name, batch, NUM_TOKENS)
                compared += outcome.num_compared
                ties += len(outcome.ties)
        program = json.loads((engine.directory / "target" / "program.json").read_text("utf-8"))
    layers = engine.manifest.models[0].layers
    windows = sorted({layer.window for layer in layers})
    extras = _extras(program["graph"])
    if any(layer.value_dim for layer in layers):
        extras.append("value width")
    kinds = ["window" if window else "causal" for window in windows]
    states = {"conv": "convolutions", "recurrence": "recurrences"}
    kept = dict.fromkeys(states[layer.kind] for layer in engine.manifest.models[0].state_layers)
    said = [*dict.fromkeys(kinds), *extras, *kept]
    return {
        "name": name,
        "backend": backend,
        "attention": ", ".join(said),
        "extras": extras,
        **({"keeps_states": True} if kept else {}),
        "num_compared": compared,
        "forgiven_ties": ties,
        "transformers": version("transformers"),
        "torch": version("torch"),
    }


@contextlib.contextmanager
def _recorded(zoo: Any, name: str, plans: Any) -> Iterator[Any]:
    """An engine for TensorRT whose ONNX files onnxruntime runs, at the addresses that it gives."""
    from tests.runtime.backends.tensorrt.recorded_engines import (
        compile_recorded,
        load_poisoned,
        on_recorder,
    )

    files = zoo.checkpoint(name), [zoo.checkpoint(name, draft="noisy")]
    with tempfile.TemporaryDirectory() as folder:
        path = compile_recorded(
            *files, Path(folder) / "engine", plans=plans, max_batch_size=len(models.prompts()),
            max_seq_len=models.MAX_SEQ_LEN, prefill_chunk=7,
        )  # fmt: skip
        with on_recorder() as recorder:
            yield load_poisoned(path)
        assert (recorder.mistakes, recorder.refusals) == ([], [])


def _extras(graph: Any) -> list[str]:
    """What the attention of a stored graph computes besides masked products."""
    from specc.artifact.graph_io import graph_from_json
    from specc.kernels import ops
    from specc.passes.program import bind_args

    stored = graph_from_json(graph).graph
    # backends that write keys and values by themselves have the second one
    operators = ops.tree_attention, ops.attend
    nodes = [x for op in operators for x in stored.find_nodes(op="call_function", target=op)]
    bound = [bind_args(node) for node in nodes]
    arguments = {
        "sinks": "sink_logits", "softcap": "softcap", "chunks": "chunk", "slopes": "slopes",
    }  # fmt: skip
    return [
        name
        for name, argument in arguments.items()
        if any(found.get(argument) not in (None, 0) for found in bound)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--backend", default="eager")
    options = parser.parse_args()
    if options.run:
        from tests.lossless import Zoo

        with tempfile.TemporaryDirectory() as folder:
            zoo = Zoo(Path(folder))
            for name in options.names or NAMES:
                row = run(zoo, name, options.backend)
                rows = read_results() if RESULTS.exists() else []
                key = (name, options.backend)
                rows = [r for r in rows if (r["name"], r["backend"]) != key] + [row]
                rows.sort(key=lambda r: (NAMES.index(r["name"]), r["backend"]))
                lines = ",\n".join(json.dumps(r) for r in rows)
                RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
                print(name, row["num_compared"], row["attention"], flush=True)
    PAGE.write_text(page(read_results()), encoding="utf-8")


if __name__ == "__main__":
    main()
