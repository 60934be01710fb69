"""Padded programs of models with chunks compute what the flat ones compute (Llama 4).

So do those of models that rotate by complex numbers (DeepSeek V2, with latents, and Llama 4).
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from specc.artifact.backends import facts_of
from specc.artifact.cache_rows import CacheRows, Reach
from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.program import bind_args
from specc.passes.rewrite.require_supported import RequireAttention
from tests.flat_passes import PADDING, causal_pass, first_level, random_tree, tree_pass
from tests.more_models import CHUNK
from tests.onnx_models import BothPrograms, lowered, write_onnx

ROWS = CacheRows(front=2, slots=100, scratch=74)
CHOOSER = random.Random(6)
# of chunks of 16: within one, up to its end, from its beginning, and across several
PASSES = (
    causal_pass([0, 30], [21, 21], [0, 1]),
    causal_pass([21, 51, 5], [1, 1, 1], [0, 1, 2]),
    causal_pass([31, 32], [1, 1], [0, 1]),
    first_level([0, 1, 40], 3, [0, 1, 2]),
    tree_pass([21, 51], [random_tree(CHOOSER, 9) for _ in range(2)], [0, 1]),
    tree_pass([30, 32], [random_tree(CHOOSER, 9) for _ in range(2)], [0, 1]),
    tree_pass([3, PADDING], [random_tree(CHOOSER, 66) for _ in range(2)], [2, 3]),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_written"), [("llama4_text", True), ("deepseek_v2", False), ("deepseek_v2", True)]
)
def test_passes_equal_those_of_the_flat_program(
    name: str, is_written: bool, tmp_path: Path
) -> None:
    """By the graph itself, and by onnxruntime."""
    pair = lowered(name, ROWS, has_latents=name == "deepseek_v2")
    directory = tmp_path / "onnx" if is_written else None
    if directory is not None:
        write_onnx(pair, directory)
    for place in {None, directory}:
        both = BothPrograms(pair, place, 4)
        for inputs in PASSES:
            both.compare(inputs, 1e-5)


@pytest.mark.slow
def test_layers_with_chunks_have_a_mask_of_their_own() -> None:
    pair = lowered("llama4_text", ROWS)
    assert pair.reaches == [Reach(), Reach(chunk=CHUNK)]
    calls = pair.padded.calls(ops.masked_attention)
    masks = [bind_args(node)["mask"].target for node in calls]
    wanted = ["mask_chunk_16" if layer.chunk else "mask" for layer in pair.flat.layers]
    assert masks == wanted
    assert {*masks} == {"mask", "mask_chunk_16"}


def test_who_takes_chunks() -> None:
    program = lowered("llama4_text", ROWS).flat
    for name in ("cpu", "cuda", "eager", "onnx", "tensorrt"):
        RequireAttention(facts_of(name)).run(program)
    other = dataclasses.replace(facts_of("tensorrt"), attention_extras=())
    with pytest.raises(UnsupportedAttentionError, match="chunks of 16 positions") as caught:
        RequireAttention(other).run(program)
    assert caught.value.needed.endswith("cpu, cuda, eager, onnx, tensorrt")
