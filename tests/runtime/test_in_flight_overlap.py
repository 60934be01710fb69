"""Whole engines whose steps draft for one half of their sequences while they verify the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.engine import Engine
from specc.speculation.plans import DynamicTree, SpecPlan
from tests.interleavings import Figures, Moody, NearTies, Solo, run_interleaving
from tests.runtime.backends.captured.branched_device import BETWEEN, EARLY, LATE, LateBranchedDevice
from tests.runtime.late_engine import Rig, late_rig
from tests.runtime.test_in_flight_mixed import PROMPTS, fixed, goodput

PLANS = (
    SpecPlan.from_widths((1,)),
    SpecPlan.from_widths((1, 1, 1)),
    SpecPlan.from_widths((2, 1)),
    SpecPlan.from_dynamic(DynamicTree(6, 2, 3)),
)


@pytest.fixture(scope="module")
def rig(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Eight sequences of 128 tokens, one graph for all batches; blocks for half of the worst."""
    path = tmp_path_factory.mktemp("overlap") / "engine"
    config = CompileConfig(
        plans=PLANS,
        max_seq_len=128,
        max_batch_size=8,
        block_size=4,
        prefill_chunk=8,
        backend="cuda",
    )
    with late_rig(
        tiny_models,
        path,
        config,
        LateBranchedDevice(BETWEEN),
        kv_cache_tokens=440,
        capture=CaptureLimits(sizes=(8,), max_seconds=-1.0),
        overlaps=True,
    ) as made:
        yield made


@pytest.fixture(scope="module")
def alone(rig: Rig) -> tuple[Solo, NearTies]:
    """The same engine, operator by operator."""
    engine = Engine.load(rig.path, backend="eager")
    return Solo(engine), NearTies(Engine.load(rig.path, backend="eager"))


pytestmark = pytest.mark.slow

CASES = [
    pytest.param(fixed("chain-3"), LATE, id="chain"),
    pytest.param(fixed("tree-2-1"), BETWEEN, id="tree"),
    pytest.param(fixed("dynamic-6-2-3"), EARLY, id="dynamic"),
    pytest.param(goodput, BETWEEN, id="goodput"),
    pytest.param(Moody, LATE, id="moody"),
]


@pytest.mark.parametrize(("policy", "order"), CASES)
def test_interleavings(rig, alone, policy, order) -> None:
    """Requests come, go and give way at any time; each has the tokens that it has alone."""
    solo, ties = alone
    rig.device.order = order  # type: ignore[attr-defined]
    figures = Figures()
    for seed in range(2):
        run_interleaving(
            rig.engine, solo, seed, PROMPTS, figures, ties, policy=policy,
            num_requests=14,
        )  # fmt: skip
        assert rig.device.num_waiting == 0
    assert figures.num_ties == 0
    assert figures.num_ahead > figures.num_iterations / 2, figures
    assert figures.num_greedy > 0, figures
    assert figures.num_seeded > 0, figures
    tapes = [tape for tape in rig.device.tapes if tape.branches]  # type: ignore[attr-defined]
    assert tapes
