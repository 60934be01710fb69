"""`specc bench` with compiled code: real and synthetic acceptance, one prompt and several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specc.bench import step_bytes as bench_bytes
from specc.bench.engine import EngineContender, add_margins, tokenize
from specc.bench.rounds import Difference
from specc.cli.main import app
from specc.config import CompileConfig
from specc.runtime.backends.cpu.step import CpuStep
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from tests import engines

# the default tier measures engines of the backend eager, and runs compiled ones elsewhere
pytestmark = pytest.mark.slow

PLANS = (SpecPlan.from_widths((2, 1)), SpecPlan.from_widths((1, 1, 1)))
TEXTS = ("ab", "hello", "xyz")
NUM_TOKENS = 12
QUICK = ("--tokens", NUM_TOKENS, "--rounds", 2, "--warmup", 0, "--no-verify")


@pytest.fixture(scope="module")
def path(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bench") / "engine"
    config = CompileConfig(
        plans=PLANS, max_seq_len=96, max_batch_size=4, backend="cpu", probe=False
    )
    return engines.build(tiny_models.target, tiny_models.draft, output, config)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    engine = Engine.load(path)
    assert engine.backend == "cpu"
    assert {type(step) for step in engine.steps.values()} == {CpuStep}
    return engine


@pytest.fixture(scope="module")
def eager(path: Path) -> Engine:
    return Engine.load(path, backend="eager")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def report_of(monkeypatch: pytest.MonkeyPatch, *args: object) -> dict[str, Any]:
    measure = bench_bytes.measure_read_bandwidth
    monkeypatch.setattr(bench_bytes, "measure_read_bandwidth", lambda: measure(1_000_000))
    result = CliRunner().invoke(app, ["bench", *map(str, args), "--json", "-"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_real_acceptance(path, prompts, monkeypatch, batch_size) -> None:
    plans = ("--plan", "chain-3", "--plan", "tree-2-1", "--batch-size", batch_size)
    report = report_of(monkeypatch, path, *QUICK, "--prompts", prompts, *plans)
    assert report["engine"]["backend"] == "cpu"
    # the library is loaded: its sum is one of the two
    assert report["read_bandwidth"]["method"] in ("native sum", "torch sum")
    assert [run["plan"] for run in report["runs"]] == ["off", "chain-3", "tree-2-1"]
    for run in report["runs"]:
        assert run["identical"] is True, run["differences"]
        assert run["num_output_tokens"] == len(TEXTS) * NUM_TOKENS
        assert run["excluded_s"] == 0
        stages = run["stage_ms_per_step"]
        assert all(stages[name] > 0 for name in ("verify", "accept_commit"))
        assert (stages["draft"] > 0) == (run["plan"] != "off")
        assert sum(stages.values()) == pytest.approx(run["ms_per_step"], rel=0.5)
        assert run["bytes_per_step"] > 0
    off = report["runs"][0]
    # batch 2: two sequences take 11 steps together, the third alone
    assert (off["num_steps"], off["sequences_per_step"]) == ((33, 1.0), (22, 1.5))[batch_size - 1]


@pytest.mark.parametrize(("probability", "length"), [(1, 4), (0, 1)])
def test_synthetic_acceptance(path, prompts, monkeypatch, probability, length) -> None:
    """13 tokens: one of the prompt's pass, and 12 in steps of 4 or of 1."""
    dice = ("--plan", "chain-3", "--synthetic-acceptance", probability, "--tokens", 13)
    report = report_of(monkeypatch, path, *QUICK, "--prompts", prompts, *dice)
    off, speculative = report["runs"]
    assert (off["identical"], off["excluded_s"]) == (True, 0)
    assert speculative["identical"] is None
    assert speculative["synthetic_acceptance"]["expected_acceptance_length"] == length
    assert speculative["mean_acceptance_length"] == length
    assert speculative["num_steps"] == len(TEXTS) * 12 / length
    assert speculative["num_output_tokens"] == len(TEXTS) * 13
    assert speculative["excluded_s"] > 0
    assert all(speculative["stage_ms_per_step"][name] > 0 for name in ("draft", "verify"))


def contender(engine: Engine, plan: str, synthetic: tuple[float, ...] | None) -> EngineContender:
    """All prompts together, and two of them once more."""
    token_ids = tokenize(engine, TEXTS, 40)
    return EngineContender(engine, plan, plan, [token_ids, token_ids[:2]], 40, synthetic)


@pytest.mark.parametrize(
    "synthetic",
    [
        None,
        (0.5, 0.3),
        *(pytest.param(rates, marks=pytest.mark.slow) for rates in ((0.5,), (0.0, 1.0))),
    ],
    ids=str,
)
@pytest.mark.parametrize("plan", ["chain-3", "tree-2-1"])
def test_the_same_tokens_as_the_eager_engine(engine, eager, plan, synthetic) -> None:
    """The dice fall alike, and what they accept reaches the outputs, the counters, the caches."""
    found, wanted = (contender(one, plan, synthetic).run() for one in (engine, eager))
    assert found.outputs == wanted.outputs
    assert found.accepted_per_depth == wanted.accepted_per_depth
    for name in ("num_steps", "num_request_steps", "num_decode_tokens", "mean_acceptance_length"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert engine.steps[plan].before_accept is None
    if synthetic == (0.5, 0.3):
        # some are accepted and some are not, else much could be wrong unseen
        assert 1.2 < found.mean_acceptance_length < 3
        assert found.excluded_s > 0


def test_real_acceptance_after_dice(engine) -> None:
    """A run with dice leaves nothing behind that the next run would see."""
    real = contender(engine, "chain-3", None)
    before = real.run()
    contender(engine, "chain-3", (0.6,)).run()
    after = real.run()
    assert (after.outputs, after.num_steps) == (before.outputs, before.num_steps)


def test_the_margin_of_a_mismatch(engine, eager) -> None:
    """The target's two best logits in a plain step, which a hook reads."""
    prompts = tokenize(engine, TEXTS, 40)
    off = EngineContender(engine, "off", "off", [prompts], 12).run()
    differences = [
        Difference(prompt, position, off.outputs[prompt][position], 0)
        for prompt, position in ((0, 3), (1, 4), (2, 11))
    ]
    found = add_margins(engine, prompts, off.outputs, differences)
    wanted = add_margins(eager, prompts, off.outputs, differences)
    assert len({item.margin for item in found}) == 3
    for mine, other in zip(found, wanted, strict=True):
        assert mine.margin == pytest.approx(other.margin, rel=1e-3)
        assert mine.is_near_tie is other.is_near_tie is False
    assert engine.steps["off"].before_accept is None
