"""States of layers that keep some are those of exactly the committed tokens, after every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch

from specc.runtime.core import EngineCore
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from tests.interleavings import Figures, Solo, run_interleaving
from tests.runtime.live_rig import ScriptedNodes
from tests.runtime.states_rig import VOCAB, PlainStates, build_hybrid
from tests.tiers import only

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 2, 3))
TILED = dataclasses.replace(SpecPlan.from_widths((3, 2)), tile=4)
LOOKUP = SpecPlan.from_widths((1, 1, 1), drafts=("lookup-3",))
PLANS = (CHAIN, TREE, DYNAMIC, TILED, LOOKUP)
LENGTHS = (1, 15, 16, 17, 63, 64, 65)


@pytest.fixture(scope="module")
def plain() -> PlainStates:
    return PlainStates()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def run(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 20,
    check: Callable[[], object] = lambda: None,
) -> list[Request]:
    """Serve prompts, with a look at the engine after every iteration."""
    requests = [core.requests.make(list(prompt), greedy(max_tokens)) for prompt in prompts]
    for request in requests:
        core.scheduler.add(request)
    while any(not request.is_finished for request in requests):
        assert core.advance()
        check()
    return requests


@pytest.mark.parametrize(
    "plan", only([OFF, CHAIN, TILED], (OFF, *PLANS)), ids=lambda plan: plan.name
)
def test_states_after_every_step(plan: SpecPlan, plain: PlainStates) -> None:
    """Prompts of all lengths, in chunks, five at a time; outputs are those of plain decoding."""
    engine = build_hybrid([plan], max_num_seqs=5)
    core, checked = EngineCore(engine, plan.name), 0

    def check() -> None:
        nonlocal checked
        checked += plain.check(core)

    prompts = [prompt_of(length) for length in LENGTHS]
    found = run(core, prompts, 20, check)
    assert checked > 40
    solo = Solo(build_hybrid([]))
    for prompt, request in zip(prompts, found, strict=True):
        assert request.output_token_ids == solo.tokens(prompt, greedy(20))
    if plan.speculates:
        accepted = core.scheduler.stats.accepted_per_depth
        assert accepted[-1] > 0, "no path was accepted in full"
        assert accepted[0] < 1, "no step without an accepted token"
    assert engine.cache.states is not None
    assert engine.cache.states.num_free == 5


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("plan", [CHAIN, TREE, DYNAMIC], ids=lambda plan: plan.name)
def test_states_of_long_prompts(plan: SpecPlan, batch: int, plain: PlainStates) -> None:
    engine = build_hybrid([plan], max_num_seqs=batch, max_seq_len=256, num_checkpoints=4, grid=32)
    core = EngineCore(engine, plan.name)
    prompts = [prompt_of(length) for length in (200, 1, 65)]
    found = run(core, prompts, 40, lambda: plain.check(core))
    solo = Solo(build_hybrid([], max_seq_len=256))
    assert [x.output_token_ids for x in found] == [solo.tokens(p, greedy(40)) for p in prompts]


class Checked(EngineCore):
    """Looks at the states of everybody after every iteration."""

    plain: PlainStates
    num_checked = 0

    def advance(self) -> bool:
        has_run = super().advance()
        Checked.num_checked += self.plain.check(self)
        return has_run


@pytest.mark.parametrize("seed", only([0], range(9)))
def test_states_in_any_order_of_events(seed: int, plain: PlainStates) -> None:
    """Plans by dice for each request and step, late requests, cancelled ones, and too few blocks,
    so that some give way; prefixes are shared.
    """
    Checked.plain = plain
    engine = build_hybrid(PLANS, pool_blocks=18, num_checkpoints=3, grid=8)
    figures, solo = Figures(), Solo(build_hybrid([]))
    prompts = [prompt_of(length, seed) for length in (3, 12, 17, 34)]
    for round_ in range(2):
        run_interleaving(
            engine, solo, 10 * seed + round_, prompts, figures, make_core=Checked, num_requests=9
        )
        assert engine.cache.states is not None
        assert engine.cache.states.num_free == 3
    assert figures.num_preemptions > 0
    assert figures.num_cached_tokens > 0
    assert len(figures.steps) > 3


@pytest.mark.parametrize("plan", only([TREE], [CHAIN, TREE]), ids=lambda plan: plan.name)
def test_trees_of_which_a_part_is_verified(plan: SpecPlan, plain: PlainStates) -> None:
    engine = build_hybrid([plan])
    core = EngineCore(engine, policy=ScriptedNodes(plan))
    prompts = [prompt_of(length) for length in (3, 9, 20, 6)]
    found = run(core, prompts, 16, lambda: plain.check(core))
    solo = Solo(build_hybrid([]))
    assert [x.output_token_ids for x in found] == [solo.tokens(p, greedy(16)) for p in prompts]
    assert core.scheduler.stats.num_accepted_tokens > 0


class Flaky:
    """Fails between the target's pass and acceptance, in every third step."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, values: object) -> None:
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            raise RuntimeError("flaky")


def run_failing(core: EngineCore, requests: Sequence[Request], plain: PlainStates) -> None:
    """States are compared after every step that did not fail."""
    for request in requests:
        core.scheduler.add(request)
    num_failed = 0
    while any(not request.is_finished for request in requests):
        try:
            core.advance()
        except RuntimeError:
            num_failed += 1
        else:
            plain.check(core)
    assert num_failed > 1


@pytest.mark.parametrize("plan", only([OFF, TREE], [OFF, TREE, TILED]), ids=lambda plan: plan.name)
def test_what_a_failed_step_has_folded_does_not_count(plan: SpecPlan, plain: PlainStates) -> None:
    """A pass that nobody took the results of has moved states: they are made again."""
    engine = build_hybrid([plan], num_checkpoints=2, grid=8)
    core, hook = EngineCore(engine, plan.name), Flaky()
    engine.steps[plan.name].before_accept = hook
    prompts = [prompt_of(length) for length in (3, 9, 18)]
    requests = [core.requests.make(prompt, greedy(12)) for prompt in prompts]
    run_failing(core, requests, plain)
    solo = Solo(build_hybrid([]))
    assert [x.output_token_ids for x in requests] == [solo.tokens(p, greedy(12)) for p in prompts]
    assert engine.cache.states is not None
    assert engine.cache.states.num_free == 3
    # nothing is reserved for passes that never ended
    assert len(_reserved(core)) == 0


def _reserved(core: EngineCore) -> set[int]:
    return core.scheduler._blocks._reserved


def test_a_place_is_taken_from_admission_to_the_end() -> None:
    engine = build_hybrid([CHAIN], max_num_seqs=2)
    core, states = EngineCore(engine, CHAIN.name), engine.cache.states
    assert states is not None
    first, second, third = (core.requests.make(prompt_of(5, i), greedy(8)) for i in range(3))
    for request in (first, second, third):
        core.scheduler.add(request)
    core.advance()
    assert {first.state_place, second.state_place} == {0, 1}
    assert (third.state_place, states.num_free) == (-1, 0)
    core.scheduler.abort(first)
    assert (first.state_place, states.num_free) == (-1, 1)
    core.advance()
    assert third.state_place == 0
    while core.scheduler.has_work:
        core.advance()
    assert (second.state_place, third.state_place, states.num_free) == (-1, -1, 2)
