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
from tests import models, more_models

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "guide" / "architectures.md"
NAMES = (*models.ARCHITECTURES, *more_models.CONFIGS)
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
(`--quantize`) are compared with off only: [quantized weights](quantization.md).

"""
_TAIL = """
## Models that take images, too

Of a checkpoint of `…ForConditionalGeneration` the language model is compiled, and the command says
that images and sound are not taken. Where transformers has a causal language model of its
`text_config` (Gemma 3, Llama 4, Mistral 3), it is that; where it has none (Qwen2-VL, Qwen2.5-VL,
Qwen3-VL, with and without experts), the whole model is traced with text alone, and what the trace
reads is its language model. Text has one position where an image has three, which a graph shows by
itself. Compared with `generate` of the whole model: `tests/runtime/test_text_part.py`.

## Chunks

In layers of Llama 4 with rotary, a token sees the keys of its own chunk of 8,192 positions alone
(`attention_chunk_size`), up to itself; the layers between them have no rotary, and see all. Masks
of quotients of positions are evaluated as others are, and accepted where they are that. With
`--max-seq-len` up to the chunk no sequence leaves it, and such a layer counts as causal, on every
backend; beyond it `specc::tree_attention` gets the chunk. Of a tree that crosses into the next
chunk, nodes of a path before it are not seen after it, as in plain decoding; blocks of the cache
before it are kept, and not read.

For `onnx` and `tensorrt`, layers with chunks have a mask of their own, `mask_chunk_C`, which the
runtime computes as it does those of windows: a node of a tree is as far from a token as the token
sees nodes after it. TensorRT-RTX builds the tiny model in float16 and bfloat16, every attention one
kernel (`tests/passes/lower/tensorrt/test_builds.py`); its tokens are those of transformers where
onnxruntime runs the same file at the addresses that TensorRT is given
(`tests/runtime/backends/tensorrt/test_chunks.py`); no GPU has run it. On `cuda` a call with a chunk
takes the general kernel whatever its shapes, compiled for that chunk
(`kernels/cuda/attend_chunks.py`); key blocks before the chunk of a tile's first row are not
visited. Calls without chunks are compiled to the PTX that they had. Triton's interpreter has
compared it with the oracle. Compiled for sm_80, 90, 100 and 120, as many key blocks are in flight
as without chunks, and a multiprocessor holds as many programs as tiles are split for: two, or one
with wide heads and in float32. With heads of 128 columns, Llama 4's, nothing spills; of the others
two tiles of trees do, in half precision: 64 rows with 256 columns on sm_90 68 bytes, or 28 with
pages of 16 rows, and 128 rows with 64 columns on sm_80 64
(`tests/kernels/cuda/test_compiled_chunks.py`). On an H200 the tests of chunks passed in the form
before this one; of this one some did before time was over, and none failed.

Layers without rotary embedding scale queries by the logarithm of their place, which transformers
counts over the tokens of a pass. specc makes such counters (0, 1, 2, … converted to float) read
positions instead; for a sequence that begins in the pass, both are the same
(`passes/rewrite/read_places.py`). In programs of [batch, nodes] tokens each sequence reads its own
positions; arithmetic with places that does not become a row of each sequence is refused there
(`passes/rewrite/read_padded_places.py`).

Its mixtures multiply rows by their weights before the experts, and send all rows to all experts,
most of them as zeros. The compiler verifies that an expert gives zero for zeros, so each token goes
only to its own experts (`passes/rewrite/route_experts.py`), with grouped products that `--quantize`
rounds, too. A token with several experts adds them in the order of its choice. In ONNX all rows go
to all experts, as transformers sends them.

ONNX has no complex numbers, by which Llama 4 and DeepSeek V2 rotate. For `onnx` and `tensorrt` a
product of two of them becomes four products of real numbers, a difference and a sum
(`passes/rewrite/split_complex.py`); what else a model does with complex numbers is refused by name.

## Latent attention

DeepSeek V2 and V3, MiniCPM 3 and GLM-4.7-Flash expand keys and values of H heads from one latent c
of R columns, and add to each key a rotary part that all heads share (MLA, arXiv:2405.04434). On
`cpu`, `cuda`, `eager` and `onnx` the cache holds c and the shared part, once for all heads. Since
q · (c Wkᵀ) = (q Wk) · c, the compiler multiplies queries by Wk and what attention returns by Wv
(`passes/rewrite/absorb_latent.py`), and attention runs over one head of keys [c, shared], whose
first R columns are the values. It finds this by what a graph computes, not by names.

| numbers a token and layer, of the published configurations | expanded | latent |
|---|---|---|
| DeepSeek V3 (128 heads, keys of 128 + 64, values of 128, R 512) | 40,960 | 576 |
| DeepSeek V2 Lite (16 heads, otherwise alike) | 5,120 | 576 |
| MiniCPM 3 (40 heads, keys of 64 + 32, values of 64, R 256) | 6,400 | 288 |
| GLM-4.7-Flash (20 heads, keys of 192 + 64, values of 256, R 512) | 10,240 | 576 |

`--mla-cache` chooses what caches hold: `latent`, `expanded`, or `auto`, the default: latents if
they take fewer bytes a token on each rank, or if keys and values have different widths and the
backend (`cuda`, `onnx`) supports only one. Where a [self-draft](drafts.md#self-drafts) chooses
blocks, the target's queries vote on them, on `cuda` over rows of at most 256 columns (128 in
float32): layers of one width that can, as those of GLM-4.7-Flash with keys and values of 256 in
half precision, stay expanded, since latents of 576 could not. vLLM also caches latents unless
`VLLM_MLA_DISABLE` is set. `specc inspect` shows which one an engine has.

The price is arithmetic: with keys of n + r columns and values of v, a score takes R + r products
instead of n + r and an output R instead of v, together 3.4 times as many for DeepSeek. A pass of
one token is bound by reading its cache, and gains more with longer contexts; a prompt is bound by
arithmetic. So if a sequence has many tokens in a pass, their keys and values, and those of the rows
before them, are expanded from the cache for this pass, some heads at a time
(`passes/rewrite/expand_prompts.py`), as vLLM does in prefill. Expanding a row takes R · (n + v)
products and saves 2R - n - v for each token of the pass, so rows are expanded if a pass has more
tokens than R · (n + v) / (2R - n - v), which is 171 for DeepSeek. (A prompt that begins in the pass
sees half of its rows on average, so there it pays from twice as many.) How many tokens of a prompt
are in one pass depends on the other requests, and so does which of the two roundings its rows have:
they differ by 1e-6 of an output in float32, and by up to 0.5 % of the largest one in bfloat16,
where near ties may then fall differently. `expanded` caches have no such choice. Layers with a
window and int8 caches stay absorbed. `--mla-cache expanded` is for long prompts and short outputs
if memory is not a concern.

On `cuda` attention over latents is a kernel of its own (`kernels/cuda/attend_latent.py`): the rows
of its tiles are the tokens of a sequence × all heads, 16 or 32 of them, a latent is read once as
key and value, and values of more than 256 columns are summed in two halves. Chunks of prompts are
absorbed as well, 3.4 times the products of expanded ones for DeepSeek; they are not expanded there
yet. Tiles of 64 rows, which the matrix units of sm_90 take at their full rate, are not built: they
need more registers than a thread has. An H200 has run it: on a tiny model, with the oracles'
tokens, and a step of DeepSeek V2 Lite's shapes takes 3.92 ms, in which attention takes 0.74
([measured](../notebook/gpu.md#drafts-that-read-hidden-states-quantized-weights-mixtures-latent-attention)).
Expanded keys and values need models in which both have the same width; if the widths differ, `auto`
takes latents of any size.

In ONNX a layer has one cache [B, 1, L, R + r], which its Attention reads as keys and as values;
the last r columns of what it returns are dropped, so that no row is copied
(`passes/rewrite/cached_latent.py`). Prompts stay absorbed there. Expanded keys and values are for
models that have them of one width.

Milliseconds for the parts that differ in one layer of DeepSeek V2 Lite's sizes: the projection to
keys and values, and attention ("expanded"); products with Wk and Wv, and attention ("absorbed"); or
latents as engines compute them (one thread, 2026-11-26, torch 2.13.0, a shared machine with load 12
on two cores, so compare ratios within a row; alternating, medians of 5;
`docs/results/cpu.json#latent_attention`):

| rows, a pass | float32: expanded | absorbed | latent | bfloat16: expanded | absorbed | latent |
|---|---|---|---|---|---|---|
| 1,024 rows, one token | 17.4 | as latent | 7.4 | 16.2 | as latent | 7.2 |
| 8,192, one token | 113 | as latent | 35.9 | 79.0 | as latent | 32.3 |
| 8,192, a tree of 4 | 131 | as latent | 108 | 87.8 | as latent | 66.5 |
| none, a prompt's first 512 | 359 | 613 | 516 | 204 | 404 | 333 |
| 4,096, its next 512 | 2,079 | 6,083 | 4,052 | 1,490 | 4,633 | 2,371 |

| | with latents |
|---|---|
| trees, prefixes, self-drafts, segments, stages | as with other caches |
| ranks | heads of queries, Wk and Wv are cut; the latent is whole on each rank |
| `--kv-cache-dtype int8` | rows of R + r and of R, a scale each; prompts stay absorbed |
| `--quantize` | Wk and Wv stay in `--dtype`: they are multiplied head by head |
| quantized checkpoints | Wk and Wv become `--dtype`, and the command says so |
| `cuda` | latents of 512 columns and 64 that heads share at most; prompts stay absorbed |
| `tensorrt` | expanded; `latent` is refused |
| Wk or Wv with a bias, or heads that share keys | expanded; the reason: `specc inspect --why` |

Sums have another order than those of expanded keys: logits of the tiny models differ by less than
1e-4 of their largest, and tokens are those of `transformers.generate`, as above. On `cpu` these two
products are torch's, whose last bits depend on the number of rows; those of other projections do
not.

## Slopes

BLOOM, MPT and Falcon-RW add slope · position of the key to their scores (ALiBi, arXiv:2108.12409),
each in code of its own. The compiler evaluates what a mask adds, derives a slope for each head, and
accepts the mask if nothing else is added anywhere. `specc::tree_attention` adds slope · (position
of the key - position of the token): that shifts a row of scores as a whole, which does not change
its softmax. A node of a tree has the position of its depth, not of its slot; it follows from the
path that the token sees, so levels of a draft need no further input. In ONNX a key is as far from a
token as the token sees keys after it, which the network counts in the mask that it is given
(`CumSum`), once for all layers with the same slopes; its Attention adds what comes of it.

The distance is an integer and exact, so what is added has one rounding, 2^-24 of itself (2^-11 in
networks of float16), and is exact next to the token. Where models add slope · position, sums round
to 2^-24 of that product: with slope 0.5 at position 2,000 up to 6e-5 of a score, in float32, which
are transformers', and in
near ties may decide. Falcon-RW rounds positions and products to bfloat16 (8 bits: 257 counts as
256), which its weights were trained with: attention does the same there, and in no other model.

A view of a self-draft (`--draft self:window=W`) is a window over the whole table with such a model,
and chosen blocks are refused. Ranks have the slopes of their heads. Refused by name are a mask that
has both a bias and numbers of tokens beyond 2,048, a bias that is not a multiple of the distance, a
table of biases that is a buffer, `tensorrt`, and networks of several ranks.

On `cuda` a call with slopes always uses the general kernel, since those for few and for wide rows
do not support slopes (`kernels/cuda/attend_slopes.py`); calls without slopes are compiled to what
they were. Triton's interpreter has compared it with the oracle, and in captured steps, prompts in
pieces and trees, with the tokens of transformers (`tests/runtime/backends/cuda/test_slopes.py`);
ptxas of sm_80 and sm_90 keeps its registers, and on an H200 it agrees with the oracle.
"""


def read_results() -> list[dict[str, Any]]:
    """Rows of the file, in the order of the table."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """`docs/guide/architectures.md`."""
    backends = backend_names()
    lines = ["| model type | attention | " + " | ".join(backends) + " |"]
    lines.append("|---" * (2 + len(backends)) + "|")
    for name in NAMES:
        own = {row["backend"]: row for row in rows if row["name"] == name}
        if not own:
            continue
        first = next(iter(own.values()))
        cells = [_cell(backend, own.get(backend), first["extras"]) for backend in backends]
        lines.append(f"| {name} | {first['attention']} | " + " | ".join(cells) + " |")
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


def _cell(backend: str, row: dict[str, Any] | None, extras: list[str]) -> str:
    able = facts_of(backend).attention_extras
    # keys and values of one latent, which is cached in their place
    given = {LATENT_ROWS: (VALUE_WIDTH,)}
    able = (*able, *(x for what in able for x in given.get(what, ())))
    if any(extra not in able for extra in extras):
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
    said = [*dict.fromkeys(kinds), *extras]
    return {
        "name": name,
        "backend": backend,
        "attention": ", ".join(said),
        "extras": extras,
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
