"""A kernel that only the measurement of products runs costs that measurement alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specc.runtime.backends.cuda import choose_launches, choose_products
from tests.gpu import check, importable, products, rehearsal
from tests.gpu.results import Results
from tests.gpu.tasks import Stage, Task


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is watched is replaced for good, in a process of its own."""
    for name in ("choose_launches", "can_launch_dependent"):
        monkeypatch.setattr(choose_launches, name, getattr(choose_launches, name))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_candidate_is_a_sign_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(
        choose_products, "graph_timer", lambda graphs, watch: lambda run, best: run()
    )
    results = Results(tmp_path / "events")
    products.watch(results)
    seen = []

    def run() -> float:
        seen.append(lines(tmp_path / "events")[-1])
        return 3.0

    timer = choose_products.graph_timer(None, None)
    assert (timer(run, 1.0), timer(run, 1.0)) == (3.0, 3.0)
    assert seen == [{"begin": "choose products"}] * 2
    assert len(lines(tmp_path / "events")) == 2


def test_what_ended_a_process_is_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(choose_products, "OPERATORS", choose_products.OPERATORS)
    timer = choose_products.graph_timer
    products.watch(Results(tmp_path / "events", {"choose products": None}))
    assert choose_products.OPERATORS == ()
    assert choose_products.graph_timer is timer


def test_launches_are_watched_and_left_out_where_they_ended_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(choose_launches, "choose_launches", lambda *args: ["found"])
    monkeypatch.setattr(choose_launches, "can_launch_dependent", lambda device: True)
    products.watch(Results(tmp_path / "events"))
    assert choose_launches.choose_launches({}, None, None) == ["found"]
    assert lines(tmp_path / "events") == [{"begin": "choose launches"}]
    assert choose_launches.can_launch_dependent(None)
    products.watch(Results(tmp_path / "again", {"choose launches": None}))
    assert not choose_launches.can_launch_dependent(None)


ENTRY = """
import os

def figures(results, device):
    if "choose products" not in results.known:
        results.begin("choose products")
        os.abort()
    results.begin("steps")
    results.end("steps", "passed", 7)

def never(results, device):
    results.begin("capture")
    os.abort()
"""


@pytest.mark.parametrize(
    ("entry", "attempts", "states"),
    [
        ("figures", 2, {"choose products": "failed", "steps": "passed"}),
        # twice at one place is enough
        ("never", 2, {"capture": "failed"}),
    ],
)
def test_another_process_has_the_figures(entry, attempts, states, tmp_path, monkeypatch):
    (tmp_path / "an_entry.py").write_text(ENTRY)
    paths = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    task = Task("steps", "x", f"an_entry:{entry}", least_s=1.0, is_resumed=True)
    output = tmp_path / "report.json"
    options = check.parse(["B", "--output", str(output)])
    with importable.importable() as site:
        environment = importable.environment(site)
        status = check.run(
            options, rehearsal.FACTS, environment, "simulated",
            {"B": [Stage(300.0, (task,))]},
            0.1,
        )  # fmt: skip
    found = json.loads(output.read_text())["parts"]["steps"]["x"]
    assert (status, found["state"], found["attempts"]) == (1, "failed", attempts)
    assert {name: result["state"] for name, result in found["results"].items()} == states
