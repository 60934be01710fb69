"""Quantized engines of another number of ranks: what compiling for so many would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specc.compiler.build import build
from specc.compiler.reshard import reshard_engine
from specc.errors import ConfigError
from specc.speculation.plans import SpecPlan
from tests import models
from tests import quantized_checkpoints as made
from tests.mxfp4_experts import write_experts
from tests.specc.compiler.test_reshard import compare, config_for
from tests.traces import shared_traces

SLOW = pytest.mark.slow
WIDE = {"intermediate_size": 128}
INT4 = {"quantize": "int4", "quantize_group": 32}
# ranks of a stage, and stages
Shape = tuple[int, int]


def compiled(root: Path, checkpoint: Path, shape: Shape, **options: Any) -> Path:
    path = root / f"fresh-{shape[0]}-{shape[1]}"
    config = config_for(shape[0], pipeline_parallel_size=shape[1], **options)
    with shared_traces():
        build(checkpoint, None, path, config)
    return path


def check_ways(root: Path, checkpoint: Path, ways: list[tuple[Shape, Shape]], **options: Any):
    engines = {
        shape: compiled(root, checkpoint, shape, **options)
        for shape in dict.fromkeys(shape for way in ways for shape in way)
    }
    for number, (before, after) in enumerate(ways):
        output = root / f"made-{number}"
        with shared_traces():
            reshard_engine(engines[before], output, after[0], num_stages=after[1])
        compare(output, engines[after])


BOTH = [((1, 1), (2, 1)), ((2, 1), (1, 1))]


@pytest.mark.parametrize(
    ("name", "changes", "options", "ways"),
    [
        # into ranks, from ranks into stages, and out of them
        ("llama", WIDE, INT4, [((1, 1), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (1, 1))]),
        pytest.param(
            "llama",
            WIDE | {"head_dim": 32},
            INT4,
            [((4, 1), (2, 1)), ((2, 1), (4, 1)), ((4, 1), (1, 1))],
            marks=SLOW,
        ),
        # padded columns of logits
        pytest.param("phi3", {"vocab_size": 126}, {"quantize": "int8"}, BOTH, marks=SLOW),
        pytest.param("gpt_oss", {}, {"quantize": "int8"}, BOTH, marks=SLOW),
        pytest.param("mixtral", WIDE, INT4, [*BOTH, ((1, 2), (2, 1))], marks=SLOW),
        pytest.param("gemma3-tied", {}, {"quantize": "fp8"}, BOTH, marks=SLOW),
        pytest.param(
            "llama",
            WIDE,
            INT4,
            [((2, 1), (1, 1)), ((1, 2), (2, 2)), ((2, 2), (1, 1))],
            marks=SLOW,
        ),
    ],
)
def test_rounded_weights(tmp_path, name, changes, options, ways) -> None:
    checkpoint = models.save_tiny(name, tmp_path / "checkpoint", **changes)
    check_ways(tmp_path, checkpoint, ways, **options)


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=SLOW) for form in (made.gptq(4, 32, False), made.packed(8, None))],
)
def test_integers_of_checkpoints(tmp_path, form) -> None:
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", **WIDE)
    written = made.write_checkpoint(checkpoint, tmp_path, form.config, form.writer)
    check_ways(tmp_path, written.quantized, BOTH)


@pytest.mark.slow
def test_experts_in_mxfp4(tmp_path) -> None:
    checkpoint = models.save_tiny("gpt_oss", tmp_path / "checkpoint", **WIDE)
    check_ways(tmp_path, write_experts(checkpoint, tmp_path).quantized, BOTH)


@pytest.mark.slow
def test_second_programs(tmp_path) -> None:
    """A draft of fewer layers reads the target's integers."""
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", num_hidden_layers=3, **WIDE)
    plans = (SpecPlan.from_widths((1, 1), ("self_l0to1",)),)
    check_ways(tmp_path, checkpoint, BOTH, plans=plans, **INT4)


def test_what_cannot_be_cut_anew(tmp_path) -> None:
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", **WIDE)
    engine = compiled(tmp_path, checkpoint, (1, 1), **INT4)
    # groups of columns
    with pytest.raises(ConfigError, match=r"o_proj.weight:int4-g32, .* and 4 ranks"):
        reshard_engine(engine, tmp_path / "cut", 4)
    assert not (tmp_path / "cut").exists()
    form = made.in_order(made.gptq(4, 32, False))
    written = made.write_checkpoint(checkpoint, tmp_path, form.config, form.writer)
    (tmp_path / "other").mkdir()
    ordered = compiled(tmp_path / "other", written.quantized, (1, 1))
    with pytest.raises(ConfigError, match="in the order of their groups"):
        reshard_engine(ordered, tmp_path / "cut", 2)
