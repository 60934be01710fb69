"""What plain decoding would do, beside the figures of a run."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from specc.bench import plain_speed
from specc.bench.plain_speed import PlainSpeed, decode_tokens_per_s, measure_plain
from specc.cli.main import app
from specc.cli.render import stats_rows
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan
from tests import engines, models

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 1, 4, 3], [7] * 20, [9, 8, 7]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is its own draft: everything is accepted, and every step is slower for it."""
    folder = tmp_path_factory.mktemp("slow")
    target = models.save_tiny("llama", folder / "target", num_hidden_layers=2)
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1,) * 4), OFF), max_seq_len=96, max_batch_size=4,
        block_size=4, backend="eager", probe=False,
    )  # fmt: skip
    return engines.build(target, [target], folder / "engine", config)


def run(engine: Engine, plan: str | None = None) -> tuple[list[list[int]], SpecStats]:
    llm = LLM(engine, plan=plan)
    outputs = llm.generate([list(p) for p in PROMPTS], PARAMS)
    return [[*x.prompt_token_ids, *x.outputs[0].token_ids] for x in outputs], llm.get_metrics()


def test_a_plan_that_saves_passes_and_time_is_lost_is_told(path: Path) -> None:
    engine = Engine.load(path)
    sequences, stats = run(engine)
    found = measure_plain(engine, sequences, stats)
    assert found is not None
    assert found.batch_size == 3
    assert found.num_steps == 16
    ratio = found.ratio(stats)
    assert ratio is not None
    # four passes of the draft, each as slow as the target's, and one of that: five tokens
    assert ratio > 0
    rows = dict(stats_rows(stats, found))
    assert rows["target passes saved"].endswith("(78%)")
    assert rows["plain decoding"].endswith("(16 steps after the run, 3 sequences)")
    assert rows["speed-up"].startswith(f"{ratio:.2f} times plain decoding")
    # nothing is left in the engine, and the run's own figures are as they were
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_blocks
    again, _ = run(engine)
    assert again == sequences


@pytest.mark.slow
def test_the_ratio_is_that_of_whole_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of off that take 30 ms, in whatever batch, and a run of 100 tokens a second."""
    engine = Engine.load(path)
    sequences, stats = run(engine)
    advance, now_s = plain_speed.EngineCore.advance, [0.0]

    def counted(core: plain_speed.EngineCore) -> bool:
        now_s[0] += 0.03
        return advance(core)

    monkeypatch.setattr(plain_speed.EngineCore, "advance", counted)
    clock = SimpleNamespace(perf_counter=lambda: now_s[0])
    monkeypatch.setattr(plain_speed, "time", clock)
    found = measure_plain(engine, sequences, stats)
    assert found is not None
    assert found.tokens_per_s == pytest.approx(3 / 0.03)
    own = SpecStats(num_output_tokens=104, num_first_tokens=4, elapsed_s=3.0, prefill_s=2.0)
    assert decode_tokens_per_s(own) == 100
    assert PlainSpeed(50.0, 16, 1, 9).ratio(own) == 2
    assert dict(stats_rows(own, PlainSpeed(50.0, 16, 1, 9)))["speed-up"] == (
        "2.00 times plain decoding"
    )
    slow = dict(stats_rows(own, PlainSpeed(200.0, 16, 1, 9)))["speed-up"]
    assert slow.startswith("0.50 times plain decoding: this is slower, --plan off")


def test_it_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps by time, and in prompts by what those of the run took."""
    engine = Engine.load(path)
    sequences, stats = run(engine)
    monkeypatch.setattr(plain_speed, "_ENOUGH_S", 0.0)
    found = measure_plain(engine, sequences, stats)
    assert found is not None
    assert found.num_steps == plain_speed._LEAST_STEPS
    whole = found.context
    stats.prefill_s = 1000.0
    short = measure_plain(engine, sequences, stats)
    assert short is not None
    assert 1 <= short.context < whole


@pytest.mark.slow
def test_there_is_nothing_to_compare_with(path: Path) -> None:
    engine = Engine.load(path)
    sequences, stats = run(engine, "off")
    assert measure_plain(engine, sequences, stats) is None
    assert "plain decoding" not in dict(stats_rows(stats))
    _, stats = run(engine)
    assert measure_plain(engine, [], stats) is None
    assert measure_plain(engine, [[]], stats) is None
    # sequences as long as the engine allows: their beginnings are continued
    found = measure_plain(engine, [[5] * 96], stats)
    assert found is not None
    assert found.context <= 96 - found.num_steps


@pytest.mark.slow
def test_run_and_its_stats(path: Path, tmp_path: Path) -> None:
    for number, prompts in enumerate((PROMPTS[:1], PROMPTS)):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(f'{{"prompt_token_ids": {ids}}}\n' for ids in prompts))
        options = ["--prompts", str(file), "--max-tokens", "20", "--temperature", "0", "--stats"]
        result = CliRunner().invoke(app, ["run", str(path), *options])
        assert result.exit_code == 0, result.output
        assert re.search(r"plain decoding +[\d.]+ tokens/s on this machine", result.stderr)
        assert re.search(r"speed-up +[\d.]+ times plain decoding", result.stderr)
