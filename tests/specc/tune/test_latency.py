"""What an iteration takes besides its passes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from specc.cost.latency_table import LatencyTable
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.tune import latency
from specc.tune.latency import _overheads

SLEEP_S = 0.02


def test_the_hosts_part_counts_whatever_passes_take(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where passes of a table take longer than whole iterations, as they do with cold caches.

    What drafts take beyond their passes counts, too, and never less than nothing.
    """
    engine = Engine.load(tiny_engine)
    slow = LatencyTable.neutral(["draft_0"]).scaled(1000.0, 1000.0)
    before_s, none_s = _overheads(engine, slow)
    assert 0 < before_s < SLEEP_S
    assert 0 <= none_s < SLEEP_S

    class Slow(EngineCore):
        """Of off, an iteration sleeps once, and twice where something drafts."""

        def __init__(self, engine: Engine, plan: str, **options: Any) -> None:
            super().__init__(engine, plan, **options)
            self._sleep_s = SLEEP_S * (1 if plan == "off" else 2)

        def advance(self) -> bool:
            time.sleep(self._sleep_s)
            return super().advance()

    monkeypatch.setattr(latency, "EngineCore", Slow)
    iteration_s, step_s = _overheads(engine, slow)
    assert SLEEP_S <= iteration_s < 2 * SLEEP_S
    assert 0.8 * SLEEP_S <= step_s < 2 * SLEEP_S
    # passes that are said to take nothing: the drafts' own are left
    _, all_s = _overheads(engine, LatencyTable.neutral(["draft_0"]).scaled(1e-9, 1e-9))
    assert all_s > step_s
