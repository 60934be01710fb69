"""Steps in two halves, one of which drafts while the other is verified: nothing else changes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.captured import step_binder
from specc.runtime.backends.captured.bound_step import BoundStep
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.overlapped_step import OverlappedStep, halves_of, whole_reason
from specc.runtime.backends.captured.step_binder import StepBinder
from specc.runtime.backends.captured.step_buffers import StepBuffers
from specc.runtime.backends.captured.step_scores import UNFILTERED, StepKind
from specc.runtime.backends.step_io import StepInputs
from specc.runtime.engine import Engine
from specc.runtime.execution.batch_rows import last_tokens_of
from specc.speculation.plans import MERGE, OFF, VOTE, DynamicTree, SpecPlan
from tests.mixed_sampling import mixed_sampling
from tests.runtime.backends.captured.branched_device import (
    BETWEEN,
    EARLY,
    MAIN,
    ORDERS,
    SIDE,
    BranchedDevice,
    BranchedTape,
    conflicts,
)
from tests.runtime.backends.captured.test_captured_drafts import BLOCK, extra_of, following
from tests.tiers import every

OVERLAPPED = (
    SpecPlan.from_widths((1, 1)),
    SpecPlan.from_widths((2, 1)),
    SpecPlan.from_dynamic(DynamicTree(6, 2, 3)),
    SpecPlan.from_widths((1, 1), ("draft_1", "lookup-2", "suffix"), MERGE),
    SpecPlan.from_widths((1, 1, 1), ("draft_0", "draft_1"), VOTE),
    replace(SpecPlan.from_widths((3, 2)), tile=2),
)
WHOLE = (
    OFF,
    SpecPlan.from_widths((1, 1, 1), ("lookup-2",)),
    SpecPlan.from_widths((2, 1), ("self_w4_s2",)),
    SpecPlan.from_widths((1, 1), ("self_w8_s0", "draft_0"), MERGE),
)
PLANS = (*OVERLAPPED, *WHOLE)
BY_NAME = {plan.name: plan for plan in PLANS}
NAMES = [plan.name for plan in OVERLAPPED]
# of the last one the second half is the larger one
BUCKETS = (2, 8, 11)
LENGTHS = [9, 4, 17, 12, 30, 1, 8, 23, 16, 5, 40]


@dataclass
class Rig:
    """One engine twice: eager steps, and captured ones on slabs of their own."""

    eager: Engine
    other: Engine
    device: BranchedDevice
    steps: dict[str, CapturedStep]

    def state(self, plan: SpecPlan, batch: int, *, is_greedy: bool = False) -> StepInputs:
        """Inputs of sequences of different lengths, and caches to match."""
        shape = self.eager.cache.shape
        table = torch.arange(shape.num_blocks, dtype=torch.int32).view(shape.max_num_seqs, -1)
        table = table.flip(0, 1)[:batch].contiguous()
        # the first and the last sequence, of which each half has one, begin with the same block
        if batch > BUCKETS[0]:
            table[batch - 1, 0] = table[0, 0]
        generator = torch.Generator().manual_seed(7)
        for name, slab in self.eager.cache.environment.items():
            if name == "history":
                slab.random_(0, 3, generator=generator)
            else:
                slab.normal_(generator=generator)
            self.other.cache.environment[name].copy_(slab)
        count = last_tokens_of(PLANS)
        rows = [
            (*((b + i) % 61 for i in range(count - 1)), 2, length)
            for b, length in enumerate(LENGTHS[:batch])
        ]
        sampling = mixed_sampling(batch, first=1, is_greedy=is_greedy, rules=plan.rules)
        return StepInputs(rows, table, *sampling)

    def assert_same_caches(self) -> None:
        for name, slab in self.eager.cache.environment.items():
            # padding and halves make matrices of other sizes, which round otherwise
            torch.testing.assert_close(self.other.cache.environment[name], slab)


@pytest.fixture(scope="module")
def engines(make_engine) -> list[Engine]:
    return [make_engine(plans=PLANS, max_num_seqs=BUCKETS[-1]) for _ in range(2)]


def make_rig(engines: list[Engine]) -> Rig:
    eager, other = engines
    device = BranchedDevice(EARLY)
    models = {"target": other.target}
    models |= {f"draft_{i}": draft for i, draft in enumerate(other.drafts)}
    buffers = StepBuffers(
        device,
        BUCKETS[-1],
        other.cache.shape.blocks_per_sequence,
        2 + 4 + len(other.drafts),
        num_last=last_tokens_of(PLANS),
        num_votes=2,
        num_proposals=2,
    )
    size, side, steps = other.cache.shape.block_size, device.side_stream(), {}
    for plan in PLANS:
        program = fuse_step(plan, dict.fromkeys(models, 1), block_size=size).to_json()
        steps[plan.name] = CapturedStep(
            StepBinder(
                json.loads(json.dumps(program)),
                models,
                other.cache.environment,
                buffers,
                device,
                side=side,
            ),
            BUCKETS,
        )
    return Rig(eager, other, device, steps)


@pytest.fixture(scope="module")
def kept_rig(engines: list[Engine]) -> Rig:
    return make_rig(engines)


@pytest.fixture
def rig(kept_rig: Rig) -> Rig:
    """Graphs that another test has captured serve here, too."""
    kept_rig.device.watch({})
    return kept_rig


def tape_of(step: CapturedStep, bucket: int) -> BranchedTape:
    tapes = step._captured[bucket, False]
    assert tapes is not None
    (tape,) = tapes
    assert isinstance(tape, BranchedTape)
    return tape


def test_halves() -> None:
    """Rows that begin at multiples of 4, as equal as that allows; few sequences stay together."""
    assert [halves_of(n) for n in (1, 7)] == [None, None]
    found = {bucket: halves_of(bucket) for bucket in range(8, 200)}
    for bucket, halves in found.items():
        assert halves is not None
        (begin, middle), (second, end) = halves
        assert (begin, second, end) == (0, middle, bucket)
        assert middle % 4 == 0
        assert abs(bucket / 2 - middle) <= 2
    assert found[8] == ((0, 4), (4, 8))
    assert found[11] == ((0, 4), (4, 11))
    assert found[12] == ((0, 8), (8, 12))


def test_which_plans_overlap() -> None:
    assert [whole_reason(plan) for plan in OVERLAPPED] == [""] * len(OVERLAPPED)
    assert [whole_reason(plan) for plan in WHOLE] == [
        "drafts nothing",
        "drafts by lookups alone, which take no time",
        "drafts with the target itself (self:window=4,sink=2)",
        "drafts with the target itself (self:window=8,sink=0)",
    ]


# every plan with padding in the second half, or with none and halves that are not equal
CASES = [
    # a chain, a tree, and a tree that follows from data
    pytest.param(plan, batch, marks=[] if i < 3 and batch == (5, 11)[i % 2] else [pytest.mark.slow])
    for i, plan in enumerate(NAMES)
    for batch in (5, 11)
]


@pytest.mark.default("tree-2-1-11", "dynamic-6-2-3-5")
@pytest.mark.parametrize(("plan", "batch"), CASES)
def test_replays_equal_the_eager_step(rig, plan, batch) -> None:
    """Tokens, lengths and all rows, with each way of drawing tokens, whatever order branches have.

    Of five sequences, the second half has one, and padding.
    """
    inputs = rig.state(BY_NAME[plan], batch)
    for seed, order in enumerate(ORDERS):
        rig.device.order = order
        inputs = inputs._replace(extra=extra_of(BY_NAME[plan], batch, seed))
        wanted = rig.eager.steps[plan].advance(inputs, rig.eager.cache.environment)
        found = rig.steps[plan].advance(inputs, rig.other.cache.environment)
        assert found[:4] == wanted[:4]
        rig.assert_same_caches()
        inputs = following(inputs, wanted)
    (branch,) = tape_of(rig.steps[plan], rig.steps[plan].bucket_of(batch)).branches
    assert branch.calls


@pytest.mark.default("chain-2")
@pytest.mark.parametrize("plan", every(2, NAMES))
def test_branches_share_nothing_that_one_writes(rig, plan) -> None:
    """Neither rows of a cache or of the history, nor bytes of anything else.

    And all three orders end with the same bits, so that neither reads what the other one writes.
    The drafts of the last sequence catch up with a row of a block that it shares with the first.
    """
    step, slabs = rig.steps[plan], rig.other.cache.environment
    inputs = rig.state(BY_NAME[plan], 8)._replace(extra=extra_of(BY_NAME[plan], 8, 1))
    *last_tokens, _ = inputs.rows[7]
    inputs = inputs._replace(rows=[*inputs.rows[:7], (*last_tokens, BLOCK)])
    before = {name: slab.clone() for name, slab in slabs.items()}
    ends = []
    for order in ORDERS:
        rig.device.order = order
        for name, slab in slabs.items():
            slab.copy_(before[name])
        rig.device.watch(slabs)
        result = step.advance(inputs, slabs)
        ends.append((result[:4], {name: slab.clone() for name, slab in slabs.items()}))
        assert rig.device.written_by_both() == []
        # drafts of the second half; rows and tokens of the first, which a chain leaves in place
        drafts = {f"{model}_slab_0" for model in BY_NAME[plan].model_names}
        assert rig.device.written_by(SIDE) == drafts
        assert rig.device.written_by(MAIN) >= {"target_slab_0", "history"}
    for result, rows in ends[1:]:
        assert result == ends[0][0]
        assert all(torch.equal(rows[name], slab) for name, slab in ends[0][1].items())
    assert conflicts(tape_of(step, 8), slabs.values()) == []


@pytest.mark.default("last")
@pytest.mark.parametrize(
    "rows", [((0, 5), (4, 8)), ((0, 4), (3, 8)), ((0, 8), (0, 8))], ids=["last", "first", "all"]
)
def test_halves_that_share_a_sequence_race(engines, monkeypatch, rows) -> None:
    """The planted race: both halves have one sequence, or all of them."""
    monkeypatch.setattr(step_binder, "halves_of", lambda bucket: rows)
    rig = make_rig(engines)
    step, slabs = rig.steps["tree-2-1"], rig.other.cache.environment
    inputs = rig.state(BY_NAME["tree-2-1"], 8)
    rig.device.watch(slabs)
    step.advance(inputs, slabs)
    if rows[0] == rows[1]:
        # of one sequence, the accepted path may have been in place
        assert rig.device.written_by_both() == ["draft_0_slab_0"]
    found = conflicts(tape_of(step, 8), slabs.values())
    assert any("specc.leave_step" in line and "specc.tree_rows" in line for line in found), found


def test_both_halves_draft_one_after_the_other(rig) -> None:
    """And both are verified so; a draft and a verification run beside each other, and no more.

    Kernels have counters beside a cache, and beside a weight: for one launch at a time.
    """
    step = rig.steps["tree-2-1"]
    step.capture(8)
    tape = tape_of(step, 8)
    (branch,) = tape.branches
    beside = tape.calls[branch.after : branch.until]
    parts = [tape.calls[: branch.after], branch.calls, beside, tape.calls[branch.until :]]
    held = tape.hold()
    live = [[tape.live(call, held) for call in calls] for calls in parts]
    assert [passes_of(rig, calls) for calls in live] == [
        ["draft_0"], ["draft_0"], ["target"], ["target"],
    ]  # fmt: skip


def passes_of(rig: Rig, calls: list[Any]) -> list[str]:
    """Models of which operators are given the last weight."""
    given = {
        value.untyped_storage().data_ptr()
        for _, args, kwargs, _ in calls
        for value in tree_leaves((args, kwargs))
        if isinstance(value, torch.Tensor)
    }
    models = {"target": rig.other.target, "draft_0": rig.other.drafts[0]}
    return [
        name
        for name, model in models.items()
        if model.head.untyped_storage().data_ptr() in given  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("plan", WHOLE, ids=lambda plan: plan.name)
def test_other_plans_stay_whole(rig, plan) -> None:
    assert isinstance(rig.steps[plan.name]._bind(8), BoundStep)


def test_few_sequences_hooks_and_masks_stay_whole(rig) -> None:
    step = rig.steps["chain-2"]
    assert isinstance(step._bind(8), OverlappedStep)
    assert isinstance(step._bind(8, UNFILTERED), OverlappedStep)
    assert isinstance(step._bind(2), BoundStep)
    for kind in (StepKind(is_scored=True), StepKind(is_masked=True)):
        assert isinstance(step._bind(8, kind), BoundStep)
    with step._as_stages():
        assert isinstance(step._bind(8), BoundStep)


def test_both_halves_know_that_nobody_has_filters(rig) -> None:
    """A graph without the launches that would find out; each half is bound so."""
    for kind, is_filtered in ((None, True), (UNFILTERED, False)):
        bound = rig.steps["chain-2"]._bind(8, kind)
        assert isinstance(bound, OverlappedStep)
        assert [bound._first._is_filtered, bound._second._is_filtered] == [is_filtered] * 2


@pytest.mark.slow
def test_the_device_goes_on_before_the_host_has_read(rig) -> None:
    """Two steps are in flight; both halves go on from what they have left."""
    rig.device.order, step = BETWEEN, rig.steps["tree-2-1"]
    inputs = rig.state(BY_NAME["tree-2-1"], 7)
    pending = step.submit(inputs)
    for _ in range(4):
        ahead = step.submit_next(7)
        wanted = rig.eager.steps["tree-2-1"].advance(inputs, rig.eager.cache.environment)
        assert pending.result()[:4] == wanted[:4]
        inputs, pending = following(inputs, wanted), ahead
    pending.result()


def test_what_a_step_leaves_in_its_environments_goes(rig) -> None:
    """Captured memory would stay taken for it, in each half."""
    bound = rig.steps["tree-2-1"]._bind(8)
    assert isinstance(bound, OverlappedStep)
    with rig.steps["tree-2-1"].buffers.kept_inputs(8):
        bound.run()
    for half in (bound._first, bound._second):
        assert half.environment.keys() == half._lasting_names
