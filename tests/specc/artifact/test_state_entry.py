"""What a manifest says of layers that keep states: read as written, or refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from specc.artifact.directory import open_engine
from specc.artifact.manifest_entries import LimitsEntry, MemoryEntry
from specc.artifact.state_entry import StateGeometry, StateLayerEntry, StateSlabEntry
from specc.errors import EngineError
from tests.specc.artifact.engine_folders import make_manifest, make_model, write_engine

CONV = StateGeometry("conv", (3, 40), 40, "bfloat16")
DELTA = StateGeometry("recurrence", (4, 8, 16), 2 * 8 + 4 * 16 + 4 + 4, "float32", 2, True)
KDA = StateGeometry("recurrence", (4, 8, 16), 4 * 8 + 4 * 16 + 4 * 8 + 4, "float32", 4, True)
MAMBA = StateGeometry("recurrence", (4, 8, 16), 8 + 4 * 16 + 4, "float32", 1)


def layer(geometry, slab, index):
    place = {"name": f"model.layers.{slab}.{index}", "slab": slab, "index": index}
    return StateLayerEntry(**vars(geometry), **place)


def hybrid(**changes):
    layers = (layer(CONV, 0, 0), layer(DELTA, 1, 0), layer(CONV, 0, 1))
    slabs = (
        StateSlabEntry(**vars(CONV), num_layers=2),
        StateSlabEntry(**vars(DELTA), num_layers=1),
    )
    model = dataclasses.replace(
        make_model("target", "target"), **{"state_layers": layers, "state_slabs": slabs} | changes
    )
    limits = LimitsEntry(8, 64, 16, 32, 5, 512, state_checkpoints=6, state_grid=32)
    memory = {
        "target": MemoryEntry(1000, 200, 30, 4, 800, 60),
        "draft_0": MemoryEntry(100, 20, 3, 4),
    }
    models = (model, make_model("draft_0", "draft-0"))
    return make_manifest(models=models, limits=limits, memory_plan=memory)


def test_read_as_written(tmp_path):
    manifest = hybrid()
    write_engine(tmp_path / "engine", manifest)
    found = open_engine(tmp_path / "engine")
    assert (found.models, found.limits) == (manifest.models, manifest.limits)
    assert found.memory_plan == manifest.memory_plan
    # bytes of a sequence and of a node, by hand
    target = found.models[0]
    assert target.state_bytes == 2 * 3 * 40 * 2 + 4 * 8 * 16 * 4
    assert target.replay_bytes == 2 * 40 * 2 + (2 * 8 + 4 * 16 + 8) * 4


def test_engines_without_states_are_as_before():
    text = json.dumps(make_manifest().to_json())
    assert "state" not in text
    assert "checkpoints" not in text


def test_memory_of_fewer_sequences():
    """States go with sequences, those that are kept do not."""
    manifest = hybrid()
    whole, half = (manifest.memory_of((0,), count) for count in (None, 4))
    assert whole == manifest.total_memory == 1000 + 200 + 30 + 4 + 860 + 127
    assert whole - half == (200 + 20) // 2 + 800 // 2


@pytest.mark.parametrize("geometry", [CONV, DELTA, KDA, MAMBA], ids=str)
def test_geometries_of_kernels(geometry):
    assert geometry.can_be


@pytest.mark.parametrize(
    ("geometry", "changes"),
    [
        (CONV, {"columns": 41}),
        (CONV, {"shape": (3, 40, 1)}),
        (CONV, {"kind": "attention"}),
        (CONV, {"dtype": "int8"}),
        (CONV, {"key_heads": 1}),
        (DELTA, {"dtype": "bfloat16"}),
        (DELTA, {"key_heads": 3}),
        (DELTA, {"key_heads": 0}),
        (DELTA, {"columns": DELTA.columns - 1}),
        (DELTA, {"has_beta": False}),
        (DELTA, {"shape": (4, 8)}),
        (DELTA, {"shape": (0, 8, 16)}),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(geometry, changes):
    wrong = dataclasses.replace(geometry, **changes)
    assert not wrong.can_be
    layers, slabs = (layer(wrong, 0, 0),), (StateSlabEntry(**vars(wrong), num_layers=1),)
    with pytest.raises(EngineError, match="target has states"):
        hybrid(state_layers=layers, state_slabs=slabs).validate()


@pytest.mark.parametrize(
    ("place", "changes", "found"),
    [
        (0, {"slab": 2}, "has row 0 of slab 2"),
        (0, {"slab": 1}, "has row 0 of slab 1"),
        (2, {"index": 2}, "has row 2 of slab 0"),
        (2, {"index": 0}, "slab 0 of states of target has 2 layers"),
    ],
)
def test_layers_have_rows_of_their_own(place, changes, found):
    layers = list(hybrid().models[0].state_layers)
    layers[place] = dataclasses.replace(layers[place], **changes)
    with pytest.raises(EngineError, match=found):
        hybrid(state_layers=tuple(layers)).validate()


@pytest.mark.parametrize(("count", "grid"), [(6, 0), (0, 32), (6, 24)])
def test_checkpoints_end_with_blocks(count, grid):
    manifest = hybrid()
    limits = dataclasses.replace(manifest.limits, state_checkpoints=count, state_grid=grid)
    with pytest.raises(EngineError, match=f"{count} state checkpoints, every {grid} tokens"):
        dataclasses.replace(manifest, limits=limits).validate()
