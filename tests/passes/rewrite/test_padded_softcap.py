"""Models whose scores have a softcap, as programs with padded sequences: Gemma 2."""

from __future__ import annotations

from pathlib import Path

from specc.kernels import ops
from specc.passes.program import bind_args
from tests.onnx_models import BothPrograms, lowered, write_onnx
from tests.passes.rewrite.test_padded_latent import PASSES, ROWS


def test_passes_equal_those_of_the_flat_program(tmp_path: Path) -> None:
    """By the graph itself, and by onnxruntime."""
    pair = lowered("gemma2", ROWS)
    write_onnx(pair, tmp_path / "onnx")
    for place in (None, tmp_path / "onnx"):
        both = BothPrograms(pair, place, 4)
        for inputs in PASSES:
            both.compare(inputs, 1e-5)
    layers = pair.padded.calls(ops.masked_attention)
    assert [bind_args(layer)["softcap"] for layer in layers] == [3.0, 3.0]
