"""What an iteration takes besides its passes, and what votes add to them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.speculation.plans import OFF, SpecPlan
from specc.tune import latency
from specc.tune.latency import _overheads
from tests import engines, models
from tests.heads import VOCAB, WIDTH
from tests.medusa_heads import MEDUSA_CASES, write_medusa

SLEEP_S = 0.02


@pytest.mark.slow
def test_the_hosts_part_counts_whatever_passes_take(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What drafts take beyond their passes counts, too, and never less than nothing."""
    engine = Engine.load(tiny_engine)
    before_s, none_s = _overheads(engine)
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
    iteration_s, step_s = _overheads(engine)
    assert SLEEP_S <= iteration_s < 2 * SLEEP_S
    assert 0.8 * SLEEP_S <= step_s < 2 * SLEEP_S
    # passes that take nothing: the drafts' own are left
    monkeypatch.setattr(latency, "_passes_s", lambda *args, **options: 0.0)
    _, all_s = _overheads(engine)
    assert all_s > step_s


def test_votes_are_timed_where_drafts_choose_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the same pass without votes; of an engine that chooses none there are no seconds."""
    target = models.save_tiny("llama", tmp_path / "target", num_hidden_layers=1)
    found = {}
    for name, draft in (("window", "self_w16_s4"), ("blocks", "self_w16_s4_b16")):
        plans = (SpecPlan.from_widths((1, 1), (draft,)),)
        config = CompileConfig(
            plans=plans, max_seq_len=96, max_batch_size=2, block_size=4, backend="eager",
            probe=False,
        )  # fmt: skip
        path = engines.build(target, [], tmp_path / name, config)
        asked: list[Any] = []
        timed = latency._time_pass

        def slowly(*args: Any, timed: Any = timed, asked: list[Any] = asked) -> float:
            seconds, mass = timed(*args), args[5] if len(args) > 5 else None
            if mass is not None:
                asked.append(mass)
                # every query gives 1 for each head and layer
                assert float(mass.sum()) == pytest.approx(4 * args[4] * len(mass), rel=1e-4)
            return seconds + (1.0 if mass is not None else 0.0)

        monkeypatch.setattr(latency, "_time_pass", slowly)
        found[name] = latency.measure_latency(Engine.load(path), budget_s=0.0)
        monkeypatch.setattr(latency, "_time_pass", timed)
        assert bool(asked) == (name == "blocks")
    assert found["window"].votes is None
    votes = found["blocks"].votes
    assert votes is not None
    assert votes.tokens_s(3) == pytest.approx(1.0, abs=0.2)


def test_medusa_heads_are_timed_over_one_row_of_each_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine of off alone, as `specc tune` measures it: no plan says what the draft is."""
    sizes = {"hidden_size": WIDTH, "vocab_size": VOCAB, "num_hidden_layers": 1}
    target = models.save_tiny("llama", tmp_path / "target", **sizes)
    write_medusa(tmp_path / "heads", MEDUSA_CASES["faster-file"])
    config = CompileConfig(
        plans=(OFF,), max_seq_len=96, max_batch_size=2, block_size=4, backend="eager", probe=False
    )
    path = engines.build(target, [tmp_path / "heads"], tmp_path / "engine", config)
    engine = Engine.load(path)
    assert list(engine.plans) == [OFF.name]
    assert len(engine.drafts) == 1
    widths: dict[str, set[int]] = {"target": set(), "draft_0": set()}

    def at_once(engine: Engine, model: Any, table: Any, context: int, width: int) -> float:
        widths["target" if model is engine.target else "draft_0"].add(width)
        return 1e-3

    monkeypatch.setattr(latency, "_time_pass", at_once)
    monkeypatch.setattr(latency, "_overheads", lambda engine: (0.0, 0.0))
    found = latency.measure_latency(engine, budget_s=0.0)
    assert widths["draft_0"] == {1}
    assert len(widths["target"]) > 4
    assert found.drafts["draft_0"].tokens_s(1) == pytest.approx(1e-3)
