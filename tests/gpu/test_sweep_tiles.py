"""The sweep of tiles without a GPU: every path of it, and what is left of a process that dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import sweep_lines, sweep_tiles
from tests.gpu.tile_candidates import (
    SHAPES,
    SHARED_BYTES,
    candidates,
    current,
    name_of,
    shared_bytes,
)


def options_of(output: Path, *more: str):
    return sweep_tiles.parse(["--dry-run", "--output", str(output), *more])


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAYERS", "LEAST_BYTES", "LEAST_CALLS"):
        monkeypatch.setattr(sweep_tiles, name, 1)


@pytest.fixture
def swept(tmp_path: Path) -> dict:
    output = tmp_path / "swept.json"
    sweep_tiles.work(options_of(output, "--most", "1"))
    sweep_lines.assemble(Path(f"{output}.lines"), output)
    return json.loads(output.read_text())


def test_every_path(swept: dict) -> None:
    found, layers = swept["found"], swept["layers"]
    assert not [item for item in (*found, *layers) if "error" in item]
    kinds = {(item["candidate"] in ("library", "product"), item["is_dependent"]) for item in found}
    assert kinds == {(True, False), (False, False), (False, True)}
    assert {item["shape"] for item in found} == {shape.name for shape in SHAPES}
    # the library's, those of the tables, and the best, each both ways, of two models and two rows
    assert len(layers) == 4 * 2 * 2 * 2
    assert len(list(sweep_lines.summary(swept))) == 1 + 3 * len(SHAPES) * 2 + len(layers)
    assert all(min(item["us"], item["of_floor"]) > 0 for item in (*found, *layers))


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


def test_what_a_process_had_begun_when_it_died_is_not_begun_again(tmp_path: Path) -> None:
    output = tmp_path / "swept.json"
    lines = Path(f"{output}.lines")
    key = {"shape": SHAPES[0].name, "rows": 1, "candidate": "library", "is_dependent": False}
    lines.write_text(json.dumps({"event": "begin", **key}) + "\n")
    sweep_lines.append(lines, {"event": "lost", "status": -9})
    lines.write_text(lines.read_text() + '{"event": "beg')
    lines.write_text(lines.read_text() + "\n")
    sweep_tiles.work(options_of(output, "--most", "1"))
    sweep_lines.assemble(lines, output)
    found = json.loads(output.read_text())["found"]
    of_key = [item for item in found if {name: item[name] for name in key} == key]
    assert of_key == [{**key, "error": "process lost: -9"}]


def test_a_silent_process_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_lines, "START_S", 0.2)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert sweep_lines.watch(child, tmp_path / "lines", float("inf")) == -1
    finally:
        child.kill()
        child.wait()


# dies at its first measurement, and at no other
DYING = """
import os, pathlib, sys
lines = pathlib.Path(sys.argv[sys.argv.index("--output") + 1] + ".lines")
text = lines.read_text() if lines.exists() else ""
name = "second" if "first" in text else "first"
item = '"shape": "s", "rows": 1, "candidate": "%s", "is_dependent": false' % name
with lines.open("a") as file:
    file.write('{"event": "begin", ' + item + '}\\n')
    if name == "first":
        file.flush()
        os.abort()
    file.write('{"event": "found", ' + item + ', "us": 2.0}\\n')
"""


def test_another_process_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, output = tmp_path / "dying.py", tmp_path / "found.json"
    script.write_text(DYING)
    arguments = ["--seconds", "60", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    assert sweep_lines.supervise(str(script), sweep_tiles.parse(arguments), {}) == 0
    found = json.loads(output.read_text())
    assert [(item["candidate"], "error" in item) for item in found["found"]] == [
        ("first", True), ("second", False)
    ]  # fmt: skip
    assert found["best"] == {"s rows 1": {"ordinary": [[2.0, "second"]]}}


def test_a_process_that_gets_nowhere_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "failing.py"
    script.write_text("raise SystemExit(1)")
    arguments = ["--seconds", "600", "--output", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    assert sweep_lines.supervise(str(script), sweep_tiles.parse(arguments), {}) == 1
