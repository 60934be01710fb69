"""The plan that an engine runs where nobody says which: none that its probe has seen losing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specc import api
from specc.bench import plain_speed
from specc.bench.plain_speed import PlainSpeed
from specc.compiler.build import build, default_plan
from specc.config import CompileConfig
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan

CHAIN, TREE = SpecPlan.from_widths((1, 1)), SpecPlan.from_widths((2, 1))


@pytest.mark.parametrize(
    ("speed_ups", "default"),
    [
        ({}, "chain-2"),
        ({"chain-2": 0.95}, "chain-2"),
        ({"chain-2": 0.39, "tree-2-1": 1.2}, "tree-2-1"),
        # one that was not compared
        ({"chain-2": 0.39}, "tree-2-1"),
        ({"chain-2": 0.39, "tree-2-1": 0.5}, "off"),
    ],
)
def test_a_plan_that_loses_is_not_the_default(speed_ups: dict[str, float], default: str) -> None:
    manifest: Any = SimpleNamespace(default_plan=CHAIN.name, plans=(CHAIN, TREE, OFF))
    found, told = default_plan(manifest, speed_ups)
    assert found == default
    assert len(told) == (default != CHAIN.name)
    assert all("chain-2 at 0.39 times" in text and f"is {default}. Pass" in text for text in told)


def test_the_engine_says_so(tiny_models: Any, tmp_path: Path) -> None:
    config = CompileConfig(plans=(CHAIN,), max_seq_len=64, backend="eager")
    found = build(
        tiny_models.target, tiny_models.draft, tmp_path / "engine", config,
        probe=lambda path: {"speed_ups": {CHAIN.name: 0.5}},
    )  # fmt: skip
    stored = json.loads((tmp_path / "engine" / "manifest.json").read_text())
    assert stored["default_plan"] == found.manifest.default_plan == "off"
    assert "chain-2 at 0.50 times; the default plan is off" in " ".join(found.warnings)


@pytest.mark.parametrize(
    ("plan", "runs_all", "step_s", "wanted"),
    [
        (CHAIN, False, 0.02, 0.5),
        # what is looked up, engines that are for looking at, and steps of the host
        (SpecPlan.from_widths((1, 1), ("suffix",)), False, 0.02, None),
        (CHAIN, True, 0.02, None),
        (CHAIN, False, 0.002, None),
    ],
)
def test_what_is_compared(
    plan: SpecPlan, runs_all: bool, step_s: float, wanted: float | None, monkeypatch: Any
) -> None:
    engine: Any = SimpleNamespace(plans={plan.name: plan}, facts=SimpleNamespace(runs_all=runs_all))
    # 4 sequences, 11 tokens each after the first, in steps that take twice their time
    stats = SpecStats(num_output_tokens=48, num_first_tokens=4, elapsed_s=11 * step_s * 2)
    speed = PlainSpeed(4 / step_s, 16, 4, 10)
    monkeypatch.setattr(plain_speed, "measure_plain", lambda *given: speed)
    found = api._speed_up(engine, plan.name, [[1]], stats)
    assert found == (None if wanted is None else pytest.approx(wanted))
