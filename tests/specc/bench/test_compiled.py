"""`specc bench` with compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specc.bench.engine import EngineContender, tokenize
from specc.config import CompileConfig
from specc.runtime.backends.cpu.step import CpuStep
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from tests import engines

# the default tier measures engines of the backend eager, and runs compiled ones elsewhere
pytestmark = pytest.mark.slow

PLANS = (SpecPlan.from_widths((2, 1)), SpecPlan.from_widths((1, 1, 1)))
TEXTS = ("ab", "hello", "xyz")


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
