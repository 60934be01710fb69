"""States of captured steps, queued ahead of results on a device that runs late.

The tiny target of `states_rig` and the device are simulated; outputs, states and shared prefixes
are those of plain decoding on the host.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.captured.backend import DeviceModel, DeviceOperators
from specc.runtime.backends.captured.captured_runner import CapturedRunner
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.device_link import DeviceLink
from specc.runtime.backends.captured.engine_steps import make_buffers
from specc.runtime.backends.captured.step_binder import StepBinder
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import OFF, SpecPlan
from tests.interleavings import Figures, Solo, run_interleaving
from tests.runtime.backends.captured.simulated_device import LateDevice
from tests.runtime.live_rig import ScriptedNodes
from tests.runtime.states_rig import SLABS, PlainStates, build_hybrid
from tests.runtime.test_state_prefixes import GRID, chats, wanted_hits
from tests.runtime.test_states import CHAIN, DYNAMIC, PLANS, TILED, TREE, greedy, prompt_of, run
from tests.tiers import only

LENGTHS = (1, 15, 33, 17, 5)


def captured_hybrid(
    plans: Sequence[SpecPlan], device: LateDevice, *, overlaps: bool = False, **sizes: Any
) -> Engine:
    """An engine of `build_hybrid` whose steps are captured on a device that runs late."""
    engine = build_hybrid(plans, **sizes)
    models: dict[str, Any] = {"target": engine.target}
    models |= {f"draft_{i}": draft for i, draft in enumerate(engine.drafts)}
    cache, known = engine.cache, [OFF, *(plan for plan in plans if plan != OFF)]
    buffers = make_buffers(device, cache, known, len(models))
    sides = device.side_stream() if overlaps else None
    for name, model in models.items():
        model.name, model.weights = name, {}
    for plan in known:
        made = fuse_step(
            plan, dict.fromkeys(models, 1), block_size=cache.shape.block_size,
            states=[geometry for _, geometry in SLABS],
        )  # fmt: skip
        binder = StepBinder(
            json.loads(json.dumps(made.to_json())), models, cache.environment, buffers, device,
            side=sides,
        )  # fmt: skip
        sizes_of_batches = [2**i for i in range(8) if 2**i < cache.shape.max_num_seqs]
        engine.steps[plan.name] = CapturedStep(
            binder, [*sizes_of_batches, cache.shape.max_num_seqs], skips_filters=True
        )
    engine.target, *engine.drafts = [DeviceModel(model, device) for model in models.values()]
    engine.operators, engine.link = DeviceOperators(device), DeviceLink(device)
    engine.backend, engine.runner_type = "cuda", CapturedRunner
    return engine


class LateStates(PlainStates):
    """Of what is committed, where the device has not gone on from there."""

    device: LateDevice
    num_checked = num_ahead = 0

    def check(self, core: EngineCore) -> int:
        queued = core.in_flight.queued
        # prompts run at once, and so does what is queued before the first capture of another plan
        has_run = not self.device.num_waiting or any(len(batch.groups) > 1 for batch, _ in queued)
        ahead = {
            request
            for batch, _ in queued
            for request in (batch.requests if has_run else [x.request for x in batch.prefill])
        }
        count = 0
        for request in core.scheduler.running:
            if request in ahead or not request.cache_len:
                continue
            self.check_request(core, request)
            count += 1
        self.num_checked += count
        self.num_ahead += bool(queued)
        return count


@pytest.fixture
def late() -> LateStates:
    found = LateStates()
    found.device = LateDevice()
    return found


def outputs_of(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize(
    "plan", only([OFF, CHAIN], (OFF, CHAIN, TREE, DYNAMIC, TILED)), ids=lambda x: x.name
)
def test_states_after_every_step(plan: SpecPlan, late: LateStates) -> None:
    """Prompts in chunks; requests come and go, so that batches are padded."""
    engine = captured_hybrid([plan], late.device, max_num_seqs=4)
    core = EngineCore(engine, plan.name)
    prompts = [prompt_of(length) for length in LENGTHS]
    found = run(core, prompts, 14, lambda: late.check(core))
    solo = Solo(build_hybrid([]))
    assert outputs_of(found) == [solo.tokens(prompt, greedy(14)) for prompt in prompts]
    assert late.num_checked > 20
    assert late.num_ahead > 5
    assert late.device.tapes
    if plan.speculates:
        assert core.scheduler.stats.num_accepted_tokens > 0
    assert engine.cache.states is not None
    assert engine.cache.states.num_free == 4


@pytest.mark.parametrize("plan", only([CHAIN], (OFF, CHAIN, TREE)), ids=lambda x: x.name)
def test_hits_depend_on_tokens_alone(plan: SpecPlan, late: LateStates) -> None:
    """Steps that may come to where states are kept wait for results, and leave them."""
    sizes = {"num_checkpoints": 20, "grid": GRID}
    engine = captured_hybrid([plan], late.device, **sizes)
    found, outputs = chats(engine, plan, late)
    _, alone = chats(build_hybrid([plan], **sizes), plan, PlainStates(), shares=False)
    assert outputs == alone
    assert found == wanted_hits(outputs)
    assert late.num_ahead > 5
    assert late.num_checked > 20


class Checked(EngineCore):
    """Looks at the states of everybody after every iteration."""

    late: LateStates

    def advance(self) -> bool:
        has_run = super().advance()
        self.late.check(self)
        return has_run


@pytest.mark.parametrize("seed", only([1], range(6)))
def test_states_in_any_order_of_events(seed: int, late: LateStates) -> None:
    """Plans by dice, late requests, cancelled ones, and too few blocks for all."""
    Checked.late = late
    engine = captured_hybrid(PLANS, late.device, pool_blocks=18, num_checkpoints=3, grid=16)
    figures, solo = Figures(), Solo(build_hybrid([]))
    prompts = [prompt_of(length, seed) for length in (3, 12, 17, 34)]
    run_interleaving(engine, solo, 10 * seed, prompts, figures, make_core=Checked, num_requests=9)
    assert engine.cache.states is not None
    assert engine.cache.states.num_free == 3
    assert late.num_checked > 5
    assert figures.num_ahead > 0


def test_trees_of_which_a_part_is_verified(late: LateStates) -> None:
    engine = captured_hybrid([TREE], late.device)
    core = EngineCore(engine, policy=ScriptedNodes(TREE))
    prompts = [prompt_of(length) for length in (3, 9, 20)]
    found = run(core, prompts, 10, lambda: late.check(core))
    solo = Solo(build_hybrid([]))
    assert outputs_of(found) == [solo.tokens(prompt, greedy(10)) for prompt in prompts]
    assert core.scheduler.stats.num_accepted_tokens > 0


@pytest.mark.slow
def test_drafting_beside_verification(late: LateStates) -> None:
    """With halves of a batch whose states lie in rows of their own."""
    engine = captured_hybrid([CHAIN], late.device, overlaps=True, max_num_seqs=8)
    core = EngineCore(engine, CHAIN.name)
    prompts = [prompt_of(length) for length in range(2, 10)]
    found = run(core, prompts, 8, lambda: late.check(core))
    solo = Solo(build_hybrid([]))
    assert outputs_of(found) == [solo.tokens(prompt, greedy(8)) for prompt in prompts]
