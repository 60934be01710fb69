"""The sweep of tiles without a GPU: every path of it, and what is left of a process that dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import sweep_tiles
from tests.gpu.results import Device, Results
from tests.gpu.sweep import Sweep
from tests.gpu.tile_candidates import (
    SHAPES,
    SHARED_BYTES,
    candidates,
    current,
    name_of,
    shared_bytes,
)


class Still(Device):
    """Where nothing is launched; nothing of the process changes for it."""

    def prepare(self) -> None: ...


DEVICE = Still("simulated")


def values(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert not [line for line in lines if line.get("state") == "failed"]
    return {line["name"]: line["value"] for line in lines if "name" in line}


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAYERS", "LEAST_BYTES", "LEAST_CALLS", "MOST"):
        monkeypatch.setattr(sweep_tiles, name, 1)


def test_every_path(tmp_path: Path) -> None:
    path = tmp_path / "events"
    sweep_tiles.measure(Results(path), DEVICE, 60.0)
    found = [*values(path).values()]
    layers = [item for item in found if item["shape"].startswith("layer")]
    products = [item for item in found if item not in layers]
    assert not [item for item in found if "error" in item]
    is_library = {item["candidate"] in ("library", "product") for item in products}
    assert is_library == {True, False}
    assert {item["is_dependent"] for item in products} == {True, False}
    assert {item["shape"] for item in products} == {shape.name for shape in SHAPES}
    # the library's, those of the tables, and the best, each both ways, of two models and two rows
    assert len(layers) == 4 * 2 * 2 * 2
    assert all(min(item["us"], item["of_floor"]) > 0 for item in found)
    notes = [json.loads(line).get("note", {}) for line in path.read_text().splitlines()]
    (best,) = [note["best"] for note in notes if "best" in note]
    assert best.keys() == {f"{item['shape']}, rows {item['rows']}" for item in found}


def test_candidates_fit_and_are_told_apart() -> None:
    for shape in SHAPES:
        for rows in sweep_tiles.ROWS:
            items = candidates(shape, rows)
            assert items[: len(current(shape, rows))] == list(current(shape, rows))
            assert len({name_of(item) for item in items}) == len(items) > 10
            for item in items:
                assert item.takes(rows, shape.k)
                assert item.form != "vector" or item.copies(torch.bfloat16) == 1
                assert shared_bytes(item, shape.operator != "skinny_linear") <= SHARED_BYTES


def test_what_a_process_has_found_is_not_measured_again(tmp_path: Path) -> None:
    """Nor what ended it; and the best are those of both."""

    def fail() -> dict[str, Any]:
        raise AssertionError("measured twice")

    known = {
        "s, rows 1, a": {
            "shape": "s", "rows": 1, "candidate": "a", "is_dependent": False, "us": 3.0
        },
        "s, rows 1, b": "crashed: SIGABRT",
    }  # fmt: skip
    sweep = Sweep(Results(tmp_path / "events", known), DEVICE, 60.0)
    sweep.measure("s", 1, "a", False, fail)
    sweep.measure("s", 1, "b", False, fail)
    sweep.measure("s", 1, "c", False, lambda: {"us": 2.0})
    sweep.measure("s", 1, "d", False, lambda: {}["absent"])
    assert [*sweep.times("s", 1).items()] == [("c", 2.0), ("a", 3.0)]
    found = values(tmp_path / "events")
    assert list(found) == ["s, rows 1, c", "s, rows 1, d"]
    assert found["s, rows 1, d"]["error"].startswith("KeyError")


def test_nothing_is_begun_when_time_is_over(tmp_path: Path) -> None:
    sweep = Sweep(Results(tmp_path / "events"), DEVICE, -1.0)
    sweep.measure("s", 1, "a", False, lambda: {"us": 1.0})
    assert sweep.found == []
