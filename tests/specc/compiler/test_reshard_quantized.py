"""Quantized engines of another number of ranks: what compiling for so many would write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import read_manifest
from specc.artifact.manifest import MANIFEST_FILE
from specc.compiler.build import build
from specc.compiler.reshard import reshard_engine
from specc.compiler.stored_models import integers_of
from specc.errors import ConfigError, EngineError
from specc.speculation.plans import SpecPlan
from tests import branded_checkpoints as branded
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
        (
            "llama",
            WIDE,
            INT4 | {"activation_bits": 8},
            [((1, 1), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (1, 1))],
        ),
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
    ("form", "ways"),
    [
        pytest.param(made.gptq(4, 32, False), BOTH, marks=SLOW),
        pytest.param(made.packed(8, None), BOTH, marks=SLOW),
        # columns in the order of their groups
        (made.in_order(made.gptq(4, 32, False)), BOTH),
        pytest.param(
            made.in_order(made.packed(4, 32, False)),
            [((1, 1), (2, 1)), ((2, 1), (2, 2)), ((2, 2), (1, 1))],
            marks=SLOW,
        ),
        pytest.param(branded.packed_nvfp4(), BOTH, marks=SLOW),
    ],
)
def test_integers_of_checkpoints(tmp_path, form, ways) -> None:
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", **WIDE)
    written = made.write_checkpoint(checkpoint, tmp_path, form.config, form.writer)
    check_ways(tmp_path, written.quantized, ways)


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


@pytest.mark.parametrize(
    ("name", "options", "drafts", "ways"),
    [
        ("llama", {}, ("self_int8",), BOTH),
        # of a target whose own weights are integers of another layout, and of some of its layers
        pytest.param("llama", INT4, ("self_int8", "self_int8_l0"), BOTH, marks=SLOW),
        pytest.param("mixtral", {"dtype": "bfloat16"}, ("self_int8", "self_fp8"), BOTH, marks=SLOW),
    ],
)
def test_rounded_drafts(tmp_path, name, options, drafts, ways) -> None:
    """Copies of weights that are rounded for a draft are cut as the target's own are."""
    checkpoint = models.save_tiny(name, tmp_path / "checkpoint", **WIDE)
    plans = tuple(SpecPlan.from_widths((1, 1), (draft,)) for draft in drafts)
    check_ways(tmp_path, checkpoint, ways, plans=plans, **options)


def test_an_older_rounded_draft(tmp_path) -> None:
    """Of a draft without its graph before rounding nothing can be made."""
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", **WIDE)
    plans = (SpecPlan.from_widths((1, 1), ("self_int8",)),)
    engine = compiled(tmp_path, checkpoint, (1, 1), plans=plans)
    manifest = read_manifest(engine)
    (entry,) = manifest.self_drafts
    (engine / entry.whole_file).unlink()
    files = {name: item for name, item in manifest.files.items() if name != entry.whole_file}
    manifest_file = engine / MANIFEST_FILE
    written = json.loads(manifest_file.read_text())
    written["files"] = {name: written["files"][name] for name in files}
    manifest_file.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"weights in int8 without .*self-int8.*, its graph"):
        reshard_engine(engine, tmp_path / "cut", 2)
    assert not (tmp_path / "cut").exists()


def test_an_older_order_of_columns() -> None:
    """Without a word of whose it is, integers would meet rows in another order."""
    weight = {"name": "w", "kind": "weight", "key": "a:int4-g32", "quantized_of": [64, 64]}
    order = {"name": "column_order_0", "kind": "constant", "key": "constants.column_order_0"}
    program = {"inputs": [weight | {"layout": "blocks-int4-g32"}, order]}
    with pytest.raises(EngineError, match=r"column_order_0, .*\n.*this version"):
        integers_of(program, None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_cannot_be_cut_anew(tmp_path) -> None:
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint", **WIDE)
    engine = compiled(tmp_path, checkpoint, (1, 1), **INT4)
    # groups of columns
    with pytest.raises(ConfigError, match=r"o_proj.weight:int4-g32-zeros, .* and 4 ranks"):
        reshard_engine(engine, tmp_path / "cut", 4)
    assert not (tmp_path / "cut").exists()
