"""What an iteration takes besides its passes, and what votes add to them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.config import CompileConfig
from specc.errors import RequestError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.kept_latency import KeptLatency, is_of_here
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from specc.tune import latency, overheads, timed_pass
from specc.tune.latency import IdleLatency
from specc.tune.overheads import Overheads
from tests import engines, models
from tests.heads import VOCAB, WIDTH
from tests.medusa_heads import MEDUSA_CASES, write_medusa

SLEEP_S = 0.02


def _overheads(engine: Engine) -> tuple[float, float]:
    """Seconds of an iteration, and of a group that drafts, outside of their passes."""
    found = Overheads(engine, budget_s=30.0)
    while found.advance():
        done, total = found.progress
        assert done < total or not found.advance()
    return found.seconds()


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

    monkeypatch.setattr(overheads, "EngineCore", Slow)
    iteration_s, step_s = _overheads(engine)
    assert SLEEP_S <= iteration_s < 2 * SLEEP_S
    assert 0.8 * SLEEP_S <= step_s < 2 * SLEEP_S
    # passes that take nothing: the drafts' own are left
    monkeypatch.setattr(overheads, "_passes_s", lambda *args, **options: 0.0)
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
        timed = timed_pass.time_pass

        def slowly(*args: Any, timed: Any = timed, asked: list[Any] = asked) -> float:
            seconds, mass = timed(*args), args[5] if len(args) > 5 else None
            if mass is not None:
                asked.append(mass)
                # every query gives 1 for each head and layer
                assert float(mass.sum()) == pytest.approx(4 * args[4] * len(mass), rel=1e-4)
            return seconds + (1.0 if mass is not None else 0.0)

        monkeypatch.setattr(latency, "time_pass", slowly)
        monkeypatch.setattr(timed_pass, "time_pass", slowly)
        found[name] = latency.measure_latency(Engine.load(path), budget_s=0.0)
        monkeypatch.setattr(latency, "time_pass", timed)
        monkeypatch.setattr(timed_pass, "time_pass", timed)
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

    monkeypatch.setattr(latency, "time_pass", at_once)
    monkeypatch.setattr(Overheads, "advance", lambda self: False)
    found = latency.measure_latency(engine, budget_s=0.0)
    assert widths["draft_0"] == {1}
    assert len(widths["target"]) > 4
    assert found.drafts["draft_0"].tokens_s(1) == pytest.approx(1e-3)


@pytest.fixture
def kept_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine of two plans, and a cache without anything that was measured."""
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    target = models.save_tiny("llama", tmp_path / "target", num_hidden_layers=1)
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1, 1)), OFF), max_seq_len=64, max_batch_size=2, block_size=4,
        backend="eager", probe=False,
    )  # fmt: skip
    return engines.build(target, [target], tmp_path / "engine", config)


PARAMS = SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)
PROMPTS = [[5, 1, 4, 3], [7] * 20]


def outputs(core: EngineCore) -> list[list[int]]:
    requests = [core.requests.make(list(prompt), PARAMS) for prompt in PROMPTS]
    for request in requests:
        core.scheduler.add(request)
    while core.scheduler.has_work:
        core.advance()
    return [request.token_ids for request in requests]


@pytest.mark.parametrize("every", [1, 40])
def test_requests_between_slices_get_their_own_outputs(kept_engine: Path, every: int) -> None:
    """Whatever is half done when they come; afterwards nothing is held, and the table is used."""
    engine = Engine.load(kept_engine)
    core = EngineCore(engine, policy="goodput")
    want = outputs(EngineCore(engine, "off"))
    work, count = IdleLatency(core, budget_s=0.0), 0
    before = core.scheduler.policy._seconds.table.about  # type: ignore[attr-defined]
    assert before["source"] == "neutral guess"
    while work.advance():
        done, total = work.progress
        assert 0 < done <= total
        if (count := count + 1) % every == 0:
            work.pause()
            pool = engine.cache.allocator
            assert pool.num_free == pool.num_blocks
            assert outputs(core) == want
    assert pool_is_free(engine)
    about = core.scheduler.policy._seconds.table.about  # type: ignore[attr-defined]
    assert about["source"] == "measured"
    assert outputs(core) == want


def pool_is_free(engine: Engine) -> bool:
    return engine.cache.allocator.num_free == engine.cache.allocator.num_blocks


def test_what_was_measured_once_is_known_to_the_next_load(
    kept_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine, with as many threads and sequences; other loads measure their own."""
    engine = Engine.load(kept_engine)
    assert "latency" not in engine.profile
    work = IdleLatency(EngineCore(engine, policy="goodput"), budget_s=0.0)
    while work.advance():
        pass
    before = sorted(path.name for path in kept_engine.rglob("*"))
    again = Engine.load(kept_engine)
    assert again.profile["latency"]["about"]["source"] == "measured"
    assert again.profile["latency"]["about"]["threads"] == torch.get_num_threads()
    # the directory may be read-only, or belong to several machines
    assert sorted(path.name for path in kept_engine.rglob("*")) == before
    assert "latency" not in Engine.load(kept_engine, max_num_seqs=1).profile
    with monkeypatch.context() as other:
        other.setattr(torch, "get_num_threads", lambda: 99)
        assert "latency" not in Engine.load(kept_engine).profile
    # profiles of specc tune are about plans
    with pytest.raises(RequestError, match="profile"):
        EngineCore(again, policy="profile")


def test_a_table_of_another_machine_gives_way(kept_engine: Path) -> None:
    engine = Engine.load(kept_engine)
    work = IdleLatency(EngineCore(engine, policy="goodput"), budget_s=0.0)
    while work.advance():
        pass
    here = KeptLatency(engine).find()
    assert here is not None
    assert is_of_here(here, engine)
    for key, value in (("cpu", "another"), ("usable_cores", 1024)):
        machine = {**here["about"]["machine"], key: value}
        other = {**here, "about": {**here["about"], "machine": machine}}
        assert not is_of_here(other, engine)
        engine.profile = {"latency": other}
        assert KeptLatency(engine).find() == here
    mine = {**here, "iteration_s": 0.5}
    engine.profile = {"latency": mine}
    assert KeptLatency(engine).find() == mine
    for about in (
        {**here["about"], "device": "NVIDIA H200"},
        {**here["about"], "threads": 99},
        {**here["about"], "backend": "cpu"},
        {},
        None,
    ):
        assert not is_of_here({**here, "about": about}, engine)


def test_a_kept_table_that_is_damaged_is_measured_again(
    kept_engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.load(kept_engine)
    kept = KeptLatency(engine)
    kept._file.write({"schema_version": 0})  # type: ignore[union-attr]
    assert kept.find() is None
    assert "is not read" in caplog.text
    Path(kept.place).write_text("{")
    assert kept.find() is None
    assert "latency" not in Engine.load(kept_engine).profile
