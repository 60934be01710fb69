"""Captured steps that verify live nodes alone: one graph for all choices, and what eager makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.errors import EngineError
from specc.runtime.backends.captured.live_pass import live_rows
from specc.runtime.backends.captured.step_scores import StepExtras
from specc.runtime.backends.step_io import StepInputs, StepResult
from specc.runtime.engine import Engine
from specc.runtime.execution.shared_pass import accepted_values, run_together, tree_tokens
from specc.speculation.live_nodes import captured_rows
from specc.speculation.plans import SpecPlan
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.runtime.backends.captured.test_captured_drafts import (
    BY_NAME,
    PLANS,
    Rig,
    Steps,
    extra_of,
    following,
)

# a chain, trees, and trees of self-drafts that see a window, and blocks that nodes vote on
CHAIN = "chain-2"
NAMES = (CHAIN, "selfw4s2-tree-2-1", "selfw4s2b4-tree-2-1")
CUT = [plan for plan in PLANS if plan.name in NAMES]


@pytest.fixture(scope="module")
def engines(make_engine: Any) -> list[Engine]:
    return [make_engine(plans=PLANS, max_num_seqs=4) for _ in range(2)]


@pytest.fixture
def rig(engines: list[Engine]) -> Rig:
    eager, other = engines
    device = SimulatedDevice()
    return Rig(eager, other, device, Steps(other, device))


@pytest.mark.parametrize("num_nodes", [1, 3, 7])
@pytest.mark.parametrize("live", [(1,), (2, 0, 3), (0, 1, 1, 0), (3, 3, 3), (0, 0)])
def test_rows_are_those_of_one_sequence_after_the_other(
    live: tuple[int, ...], num_nodes: int
) -> None:
    live = tuple(min(count, num_nodes) for count in live)
    wanted = [(b, node) for b, count in enumerate(live) for node in range(count)]
    nodes = torch.arange(num_nodes, dtype=torch.int32)
    for num_rows in {len(wanted), len(wanted) + 1, num_nodes * len(live)} - {0}:
        rows = torch.arange(num_rows, dtype=torch.int32)
        at = live_rows(torch.tensor(live, dtype=torch.int32), nodes, rows)
        assert at.q_start.dtype == torch.int32
        assert at.q_start.tolist() == [sum(live[:b]) for b in range(len(live) + 1)]
        assert at.is_owned.tolist() == [row < len(wanted) for row in range(num_rows)]
        own = at.place[: len(wanted)].tolist()
        assert [divmod(place, num_nodes) for place in own] == wanted
        # those that nobody owns are nodes all the same
        assert 0 <= int(at.place.min()) <= int(at.place.max()) < num_nodes * len(live)
        is_live = [[node < count for node in range(num_nodes)] for count in live]
        assert at.is_live.tolist() == is_live
        row = {pair: place for place, pair in enumerate(wanted)}
        pairs = [(b, node) for b in range(len(live)) for node in range(num_nodes)]
        assert at.row.tolist() == [row.get(pair, 0) for pair in pairs]


def test_passes_have_quarters_of_the_nodes() -> None:
    assert [captured_rows(7, 4, count) for count in (1, 8, 9, 16, 17, 24, 25, 28)] == [
        8, 8, 16, 16, 24, 24, 28, 28,
    ]  # fmt: skip
    # of few nodes, as many as there are
    assert [captured_rows(2, 3, count) for count in (1, 3, 4, 6)] == [3, 3, 6, 6]
    assert captured_rows(1, 1, 1) == 1


def eager_cut(rig: Rig, plan: SpecPlan, inputs: StepInputs, live: Sequence[int]) -> StepResult:
    """The step of the backend eager for these live nodes."""
    step: Any = rig.eager.steps[plan.name]
    drafted = step.draft(inputs, rig.eager.cache.environment)
    mass = rig.eager.cache.environment.get("block_mass")
    own = None if mass is None or not plan.chooses_blocks else mass
    rows = tree_tokens(plan, inputs, drafted, live)
    (logits,) = run_together(rig.eager.target, [rows], mass=own)
    return drafted.accept(accepted_values(plan, logits, inputs, drafted, live), ())


def captured_cut(rig: Rig, plan: SpecPlan, inputs: StepInputs, live: Sequence[int]) -> StepResult:
    step = rig.steps[plan.name]
    extra = {**inputs.extra, "live": torch.tensor(live, dtype=torch.int32)}
    extras = StepExtras(num_rows=step.pass_rows(len(live), sum(live)))
    return step.submit(inputs._replace(extra=extra), extras=extras).result()


@pytest.mark.default("3-chain-2", "3-selfw4s2b4-tree-2-1")
@pytest.mark.parametrize("plan", CUT, ids=lambda plan: plan.name)
@pytest.mark.parametrize("batch", [1, 3])
def test_replays_equal_the_eager_pass_over_live_nodes(rig: Rig, plan: SpecPlan, batch: int) -> None:
    """Results, and all caches: of dead nodes no row is written, whatever they would have been."""
    count = plan.num_nodes
    choices = [[1 + (b + shift) % count for b in range(batch)] for shift in range(count)]
    inputs, num_accepted = rig.state(plan, batch), 0
    for seed, live in enumerate(choices * 2):
        inputs = inputs._replace(extra=extra_of(plan, batch, seed))
        wanted = eager_cut(rig, plan, inputs, live)
        found = captured_cut(rig, plan, inputs, live)
        assert found[:4] == wanted[:4], live
        rig.assert_same_caches()
        num_accepted += sum(found.num_accepted)
        inputs = following(inputs, wanted)
    assert num_accepted
    # a graph for each number of rows, not for each choice
    step = rig.steps[plan.name]
    rows = {step.pass_rows(batch, sum(live)) for live in choices}
    assert len(rig.device.tapes) == len(rows)


def test_one_graph_serves_every_choice_and_steps_ahead(rig: Rig) -> None:
    plan = BY_NAME["selfw4s2-tree-2-1"]
    inputs = rig.state(plan, 4)
    seen = set()
    # all with as many rows
    for live in ([5, 5, 5, 5], [5, 5, 5, 4], [4, 5, 5, 5], [5, 5, 4, 5]):
        live = [min(count, plan.num_nodes) for count in live]
        wanted = eager_cut(rig, plan, inputs, live)
        assert captured_cut(rig, plan, inputs, live)[:4] == wanted[:4]
        rig.assert_same_caches()
        inputs = following(inputs, wanted)
        seen.add(tuple(live))
    assert len(seen) > 1
    assert len(rig.device.tapes) == 1
    # live nodes stay those of the step before where the device goes on by itself
    live = [2, plan.num_nodes, plan.num_nodes, plan.num_nodes]
    step = rig.steps[plan.name]
    extras = StepExtras(num_rows=step.pass_rows(4, sum(live)))
    extra = {"live": torch.tensor(live, dtype=torch.int32)}
    pending = step.submit(inputs._replace(extra=extra), extras=extras)
    for _ in range(3):
        ahead = step.submit_next(4, extras=extras)
        wanted = eager_cut(rig, plan, inputs, live)
        assert pending.result()[:4] == wanted[:4]
        inputs, pending = following(inputs, wanted), ahead


def test_whole_trees_have_the_graph_that_they_had(rig: Rig) -> None:
    """Cut steps leave nothing behind, and are other graphs."""
    plan = BY_NAME[CHAIN]
    inputs = rig.state(plan, 3)
    rig.steps[plan.name].capture(4)
    whole = [call.function for call in rig.device.tapes[0].calls]
    wanted = eager_cut(rig, plan, inputs, [1, 3, 2])
    assert captured_cut(rig, plan, inputs, [1, 3, 2])[:4] == wanted[:4]
    inputs = following(inputs, wanted)
    wanted = rig.eager.steps[plan.name].advance(inputs, rig.eager.cache.environment)
    found = rig.steps[plan.name].advance(inputs, rig.other.cache.environment)
    assert found[:4] == wanted[:4]
    rig.assert_same_caches()
    whole_tape, cut_tape = rig.device.tapes
    assert [call.function for call in whole_tape.calls] == whole
    assert torch.ops.aten.searchsorted.Tensor not in whole
    assert torch.ops.aten.searchsorted.Tensor in {call.function for call in cut_tape.calls}


def test_rows_without_a_sequence_have_no_node(rig: Rig) -> None:
    plan = BY_NAME[CHAIN]
    captured_cut(rig, plan, rig.state(plan, 3), [3, 2, 3])
    assert rig.steps[plan.name].buffers.inputs["live"].tolist() == [3, 2, 3, 0]


def test_the_target_reads_as_many_rows_as_its_pass_has(rig: Rig, monkeypatch: Any) -> None:
    plan, counts = BY_NAME["selfw4s2-tree-2-1"], []
    forward = rig.other.target.forward

    def counted(*inputs: Tensor) -> Tensor:
        if inputs[7] is not None and len(inputs[7]) == 4 * plan.num_nodes:
            counts.append(len(inputs[0]))
        return forward(*inputs)

    monkeypatch.setattr(rig.other.target, "forward", counted)
    step = rig.steps[plan.name]
    for num_live in (4, 9, 20):
        num_rows = step.pass_rows(4, num_live)
        before = len(counts)
        step.capture(4, StepExtras(num_rows=num_rows).kind)
        assert set(counts[before:]) == {num_rows}
    assert len(set(counts)) == 3


def test_a_pass_that_fails_says_so(rig: Rig, monkeypatch: Any) -> None:
    plan = BY_NAME[CHAIN]

    def broken(*inputs: Tensor) -> Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rig.other.target, "forward", broken)
    with pytest.raises(EngineError, match="target"):
        captured_cut(rig, plan, rig.state(plan, 1), [2])
