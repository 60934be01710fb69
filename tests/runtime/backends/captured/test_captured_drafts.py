"""Captured steps of plans whose trees are data: replays equal the eager step."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.step_binder import StepBinder
from specc.runtime.backends.captured.step_buffers import StepBuffers
from specc.runtime.backends.step_io import StepInputs, StepResult
from specc.runtime.engine import Engine
from specc.runtime.execution.batch_rows import last_tokens_of
from specc.runtime.scheduling.kv_cache import NOBODY
from specc.speculation.plans import MERGE, OFF, VOTE, DynamicTree, SpecPlan
from tests.mixed_sampling import mixed_sampling
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.tiers import every

MIXED = ("draft_0", "lookup-2", "draft_1")
PLANS = (
    OFF,
    SpecPlan.from_widths((1, 1)),
    SpecPlan.from_dynamic(DynamicTree(6, 2, 3)),
    SpecPlan.from_widths((1, 1, 1, 1), ("lookup-2",)),
    SpecPlan.from_widths((1, 1, 1), ("suffix",)),
    SpecPlan.from_widths((2, 1), MIXED, MERGE),
    SpecPlan.from_widths((1, 1), ("draft_1", "suffix"), MERGE),
    SpecPlan.from_widths((1, 1, 1, 1, 1), ("draft_0", "draft_1"), VOTE),
    SpecPlan.from_widths((1, 1), (*MIXED, "suffix"), VOTE),
    SpecPlan.from_widths((2, 1), ("self_w4_s2",)),
    SpecPlan.from_dynamic(DynamicTree(6, 2, 3), "self_w4_s2"),
    SpecPlan.from_widths((1, 1), ("self_w8_s0", "draft_0", "lookup-2"), MERGE),
    SpecPlan.from_widths((2, 1), ("self_w4_s2_b4",)),
    SpecPlan.from_widths((1, 1), ("self_w4_s0_b4", "self_w4_s2_b4"), MERGE),
    replace(SpecPlan.from_widths((3, 2)), tile=2),
    replace(SpecPlan.from_dynamic(DynamicTree(7, 3, 3)), tile=2),
    replace(SpecPlan.from_widths((2, 2), ("draft_0", "draft_1"), MERGE), tile=5),
)
TILED = [plan for plan in PLANS if plan.tile]
IDS = [plan.name for plan in PLANS]
BY_NAME = {plan.name: plan for plan in PLANS}
BUCKETS = (1, 2, 4)
# rows of a block
BLOCK = 4
# every plan with padding, and with one request or as many as a bucket has
# every plan with one number of sequences; with all of them in the slow tier
BATCHES = [
    pytest.param(
        plan, batch,
        id=f"{batch}-{plan.name}",
        marks=[] if batch == (1, 3, 4)[i % 3] else [pytest.mark.slow],
    )
    for i, plan in enumerate(PLANS)
    for batch in (1, 3, 4)
]  # fmt: skip


@dataclass
class Rig:
    """One engine twice: eager steps, and captured ones on slabs of their own."""

    eager: Engine
    other: Engine
    device: SimulatedDevice
    steps: Steps

    def state(self, plan: SpecPlan, batch: int) -> StepInputs:
        """Inputs of sequences of different lengths, and caches to match."""
        shape = self.eager.cache.shape
        table = torch.arange(shape.num_blocks, dtype=torch.int32).view(shape.max_num_seqs, -1)
        generator = torch.Generator().manual_seed(7)
        for name, slab in self.eager.cache.environment.items():
            if name == "block_mass":
                # the second sequence votes
                slab.fill_(NOBODY)
                slab[1] = 0.0
            elif name == "history":
                # few different tokens, so that lookups find something
                slab.random_(0, 3, generator=generator)
            else:
                slab.normal_(generator=generator)
            self.other.cache.environment[name].copy_(slab)
        count = last_tokens_of(PLANS)
        rows = [
            (*(b + i for i in range(count - 1)), 2, length)
            for b, length in enumerate([9, 4, 17, 12][:batch])
        ]
        sampling = mixed_sampling(batch, first=1, rules=plan.rules)
        return StepInputs(rows, table.flip(0, 1)[:batch].contiguous(), *sampling)

    def assert_same_caches(self) -> None:
        for name, slab in self.eager.cache.environment.items():
            # padding makes matrices wider, which rounds otherwise
            torch.testing.assert_close(self.other.cache.environment[name], slab)


class Steps(dict[str, CapturedStep]):
    """Captured steps of all plans over the same buffers, each made when it is asked for."""

    def __init__(self, engine: Engine, device: SimulatedDevice) -> None:
        super().__init__()
        self._models = {"target": engine.target}
        self._models |= {f"draft_{i}": draft for i, draft in enumerate(engine.drafts)}
        self._engine, self._device = engine, device
        self._buffers = StepBuffers(
            device,
            4,
            engine.cache.shape.blocks_per_sequence,
            2 + 6 + len(engine.drafts),
            num_last=last_tokens_of(PLANS),
            num_votes=4,
            num_proposals=3,
            num_chosen=2,
        )

    def __missing__(self, plan: str) -> CapturedStep:
        size = self._engine.cache.shape.block_size
        slabs = dict.fromkeys(self._models, 1)
        program = fuse_step(BY_NAME[plan], slabs, block_size=size).to_json()
        self[plan] = CapturedStep(
            StepBinder(
                json.loads(json.dumps(program)),
                self._models,
                self._engine.cache.environment,
                self._buffers,
                self._device,
            ),
            BUCKETS,
        )
        return self[plan]


@pytest.fixture(scope="module")
def engines(make_engine) -> list[Engine]:
    return [make_engine(plans=PLANS, max_num_seqs=4) for _ in range(2)]


@pytest.fixture
def rig(engines: list[Engine]) -> Rig:
    eager, other = engines
    device = SimulatedDevice()
    return Rig(eager, other, device, Steps(other, device))


def extra_of(plan: SpecPlan, batch: int, seed: int) -> Mapping[str, Tensor]:
    """What the host brings besides rows, as wide as the plan reads it."""
    generator = torch.Generator().manual_seed(seed)
    extra = {}
    if "suffix" in plan.drafts:
        proposals = torch.randint(0, 61, (batch, plan.max_depth), generator=generator)
        for b in range(batch):
            proposals[b, (seed + b) % (plan.max_depth + 1) :] = -1
        extra["proposals"] = proposals
    if plan.combine == VOTE:
        extra["vote_weights"] = torch.rand(batch, len(plan.drafts), generator=generator) + 0.1
    if plan.chooses_blocks:
        # of the first blocks of a sequence; what lies in its window is seen twice
        count = plan.num_chosen(BLOCK)
        extra["chosen_blocks"] = torch.stack(
            [torch.randperm(3, generator=generator)[:count] for _ in range(batch)]
        )
    return extra


def following(inputs: StepInputs, result: StepResult) -> StepInputs:
    """Inputs of the next step, as the host would compute them."""
    made = []
    for b, (*last, _) in enumerate(inputs.rows):
        run = [*last, *result.output_tokens[b][: result.num_accepted[b] + 1]]
        made.append((*run[-len(last) :], result.next_cache_len[b]))
    return inputs._replace(rows=made)


@pytest.mark.default("4-vote-0+lookup2+1+suffix-chain-2", "1-selfw4s2b4-tree-2-1")
@pytest.mark.parametrize(("plan", "batch"), every(4, BATCHES))
def test_replays_equal_the_eager_step(rig, plan, batch) -> None:
    inputs = rig.state(plan, batch)
    for seed in range(4):
        inputs = inputs._replace(extra=extra_of(plan, batch, seed))
        wanted = rig.eager.steps[plan.name].advance(inputs, rig.eager.cache.environment)
        found = rig.steps[plan.name].advance(inputs, rig.other.cache.environment)
        assert found[:4] == wanted[:4]
        rig.assert_same_caches()
        inputs = following(inputs, wanted)
    assert len(rig.device.tapes) == 1


@pytest.mark.default("vote-0+lookup2+1+suffix-chain-2", "selfw4s2b4-tree-2-1")
@pytest.mark.parametrize("plan", every(4, PLANS), ids=IDS)
def test_the_device_goes_on_before_the_host_has_read(rig, plan) -> None:
    """Two steps are in flight; weights and proposals stay those of the first one."""
    inputs = rig.state(plan, 3)._replace(extra=extra_of(plan, 3, 1))
    pending = rig.steps[plan.name].submit(inputs)
    for _ in range(4):
        ahead = rig.steps[plan.name].submit_next(3)
        wanted = rig.eager.steps[plan.name].advance(inputs, rig.eager.cache.environment)
        assert pending.result()[:4] == wanted[:4]
        inputs, pending = following(inputs, wanted), ahead


@pytest.mark.slow
def test_plans_take_turns_in_the_same_buffers(rig) -> None:
    """What one plan reads of the host is as wide as it likes; another's is not in its way."""
    inputs = rig.state(PLANS[0], 2)
    # all may serve these
    inputs = inputs._replace(sampling_words=inputs.sampling_words * torch.tensor([1, 1, 0, 1]))
    for seed, plan in enumerate([*PLANS[::3], *PLANS[::-3]]):
        mine = inputs._replace(extra=extra_of(plan, 2, seed))
        wanted = rig.eager.steps[plan.name].advance(mine, rig.eager.cache.environment)
        found = rig.steps[plan.name].advance(mine, rig.other.cache.environment)
        assert found[:4] == wanted[:4]
        rig.assert_same_caches()
        inputs = following(inputs, wanted)


@pytest.mark.parametrize("plan", TILED, ids=lambda plan: plan.name)
def test_one_tile_of_logits_is_alive_at_a_time(rig, plan, monkeypatch) -> None:
    """Of all models, in what is captured and in eager steps: what the memory plan counts."""
    inputs = rig.state(plan, 4)
    alive: list[weakref.ref[Tensor]] = []
    most = []
    for engine in (rig.eager, rig.other):
        for model in (engine.target, *engine.drafts):
            monkeypatch.setattr(model, "forward", watched(model.forward, alive, most))
    rig.eager.steps[plan.name].advance(inputs, rig.eager.cache.environment)
    num_eager = len(most)
    # what a simulated graph replays, it keeps
    rig.steps[plan.name]._bind(4).run()
    assert len(most) > num_eager > len(plan.tiles(plan.num_nodes)) > 1
    # less would be no tile
    assert max(most[:num_eager]) == max(most[num_eager:]) == 4 * plan.tile


def watched(forward, alive, most):
    """A pass that notes how many rows of logits are alive when it ends."""

    def run(*inputs: Tensor) -> Tensor:
        logits = forward(*inputs)
        alive.append(weakref.ref(logits))
        found = [ref() for ref in alive]
        most.append(sum(len(tensor) for tensor in found if tensor is not None))
        return logits

    return run


@pytest.mark.default(
    "off", "suffix-chain-3", "vote-0+lookup2+1+suffix-chain-2", "selfw4s2b4-tree-2-1"
)
@pytest.mark.parametrize("plan", every(2, PLANS), ids=IDS)
def test_a_capture_writes_nothing(rig, plan) -> None:
    """Padding alone: all rows and the history stay, wherever a tree's shape is data."""
    rig.state(plan, 4)
    rig.steps[plan.name].capture(4)
    rig.assert_same_caches()
    # and it does so at every replay
    assert [str(name) for name in rig.device.tapes[0].operators if "arange" in str(name)] == []
