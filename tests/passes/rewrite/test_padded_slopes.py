"""Padded programs of models with slopes (ALiBi) compute what the flat ones compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specc.artifact.backends import facts_of
from specc.artifact.cache_rows import Reach
from specc.errors import UnsupportedAttentionError
from specc.kernels import ops
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import bind_args
from specc.passes.rewrite.padded import padded_program
from specc.passes.rewrite.require_supported import RequireAttention
from specc.passes.shard.shard import Shard
from tests import models
from tests.onnx_models import BothPrograms, lowered, write_onnx
from tests.passes.rewrite.test_padded_latent import PASSES, ROWS
from tests.traces import trace_once


# heads joined with the batch, and a bias that is rounded
@pytest.mark.parametrize(
    ("name", "is_written"),
    [
        ("falcon_rw", True),
        pytest.param("bloom", False, marks=pytest.mark.slow),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("bloom", "mpt")),
    ],
)
def test_passes_equal_those_of_the_flat_program(
    name: str, is_written: bool, tmp_path: Path
) -> None:
    """By the graph itself, and by onnxruntime."""
    pair = lowered(name, ROWS)
    directory = tmp_path / "onnx" if is_written else None
    if directory is not None:
        assert write_onnx(pair, directory).operators["CumSum"] == 1, "for both layers"
    for place in {None, directory}:
        both = BothPrograms(pair, place, 4)
        for inputs in PASSES:
            both.compare(inputs, 1e-5)
    layers = pair.padded.calls(ops.masked_attention)
    (bias,) = pair.padded.calls(ops.distance_bias)
    assert len(layers) == 2
    assert bind_args(bias)["mask"].target == Reach().mask_input
    assert bool(bind_args(bias)["rounded_scale"]) == (name == "falcon_rw")


def test_a_bias_counts_keys_in_rows_and_not_rows() -> None:
    """A token at position 4, after rows in front, that sees its prefix of 3 and a node before."""
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 1, 0]).bool().view(1, 1, 1, -1)
    slopes = torch.tensor([0.5, 2.0])
    found = ops.distance_bias(mask, torch.tensor([[4]]), slopes, hidden=-1e30)
    wanted = torch.tensor([-1e30, -1e30, -4, -3, -2, -1e30, -1, -1e30, 0, -1e30])
    for head, slope in enumerate(slopes):
        expected = torch.where(mask[0, 0, 0], slope * wanted, wanted)
        assert torch.equal(found[0, head, 0], expected)


@pytest.mark.slow
def test_who_refuses_slopes() -> None:
    program = trace_once(models.build_model("mpt"), "target")
    Pipeline(PHASES).run(program)
    RequireAttention(facts_of("onnx")).run(program)
    with pytest.raises(UnsupportedAttentionError, match="distance of keys"):
        RequireAttention(facts_of("tensorrt")).run(program)


def test_networks_of_ranks_are_refused_by_name() -> None:
    model = models.build_model("mpt")
    program = trace_once(model, "target")
    Pipeline(PHASES).run(program)
    layers = list(program.layers)
    Shard(2).run(program)
    with pytest.raises(UnsupportedAttentionError, match="cut for 2 ranks, and adds a bias"):
        padded_program(model, program, ROWS.total, whole_layers=layers)
