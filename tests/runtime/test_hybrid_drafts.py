"""Drafts whose layers keep states: these are those of the tokens that the draft has read.

A wrong state of a draft changes no output, but proposals: a draft that is its target is right with
every token, whatever has happened to the request before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from specc.runtime.backends.step_io import StepResult
from specc.runtime.core import EngineCore
from specc.runtime.policies.base import FixedPolicy, Policy
from specc.runtime.scheduling.batch import StepGroup
from specc.runtime.scheduling.request import Request
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from tests.interleavings import Figures, Solo, run_interleaving
from tests.runtime.live_rig import ScriptedNodes
from tests.runtime.states_rig import PlainStates, build_hybrid
from tests.runtime.test_states import Flaky, greedy, prompt_of, run, run_failing
from tests.tiers import only

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 3, 3))
TILED = dataclasses.replace(SpecPlan.from_widths((3, 2)), tile=2)
SHORT = SpecPlan.from_widths((1,))
LOOKUP = SpecPlan.from_widths((1, 1, 1), drafts=("lookup-3",))
TWO = ("draft_0", "draft_1")
MERGED = SpecPlan.from_widths((2, 1), TWO, "merge")
VOTED = SpecPlan.from_widths((1, 1, 1), TWO, "vote")
SECOND = SpecPlan.from_widths((1, 1), TWO[1:])
TOGETHER = (MERGED, VOTED)
PLANS = (CHAIN, TREE, DYNAMIC, TILED, SHORT)
LENGTHS = (1, 2, 17)


@pytest.fixture(scope="module")
def plain() -> PlainStates:
    return PlainStates()


class InTurn(Policy):
    """Plans one after the other, another one in each step; sees that all proposals are right."""

    needs_results = False

    def __init__(self, *plans: SpecPlan) -> None:
        self._plans, self._next = plans, -1
        self.num_right = 0

    def choose(self, num_running: int, stats: SpecStats) -> str:
        self._next += 1
        return self._plans[self._next % len(self._plans)].name

    def observe(self, group: StepGroup, step: StepResult) -> None:
        if group.plan.models:
            # of a dynamic tree, the likeliest path may be another than that of the likeliest tokens
            least = 1 if group.plan.dynamic else group.plan.max_depth
            assert min(step.num_accepted) >= least
            self.num_right += len(group.requests)


class Checked(EngineCore):
    """Looks at the states of everybody after every iteration."""

    plain: PlainStates
    num_checked = 0

    def advance(self) -> bool:
        has_run = super().advance()
        Checked.num_checked += self.plain.check(self)
        return has_run


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


def alone(prompts: Sequence[Sequence[int]], count: int, **sizes: Any) -> list[list[int]]:
    solo = Solo(build_hybrid([], **sizes))
    return [solo.tokens(prompt, greedy(count)) for prompt in prompts]


@pytest.mark.parametrize(
    "plan", only([CHAIN, DYNAMIC, MERGED], (*PLANS, *TOGETHER)), ids=lambda plan: plan.name
)
def test_a_draft_that_is_its_target_is_always_right(plan: SpecPlan, plain: PlainStates) -> None:
    """Also with requests that come later, and outputs that end within a step."""
    engine = build_hybrid([plan], max_num_seqs=3, drafts_itself=True)
    policy, checked = InTurn(plan), []
    core = EngineCore(engine, policy=policy)
    prompts = [prompt_of(length) for length in LENGTHS]
    found = run(core, prompts, 16, lambda: checked.append(plain.check(core)))
    assert sum(checked) > 6
    assert policy.num_right > 6
    assert outputs(found) == alone(prompts, 16)


def test_steps_of_other_plans_between(plain: PlainStates) -> None:
    """A draft that has missed tokens reads them before it drafts again: a few in its first level,
    more in a pass of its own.
    """
    plans = (OFF, SHORT, CHAIN, OFF, LOOKUP, TREE, TREE, OFF, OFF, OFF, CHAIN, DYNAMIC, SHORT)
    engine = build_hybrid(plans, max_num_seqs=3, drafts_itself=True)
    policy = InTurn(*plans)
    core = EngineCore(engine, policy=policy)
    prompts = [prompt_of(length) for length in LENGTHS]
    found = run(core, prompts, 40, lambda: plain.check(core))
    assert policy.num_right > 10
    assert outputs(found) == alone(prompts, 40)


@pytest.mark.parametrize("is_hybrid", [True, False], ids=["hybrid", "attention"])
def test_prefixes(is_hybrid: bool, plain: PlainStates) -> None:
    """A draft reads what its target shares; the target's hits are those of plain decoding."""
    kept = {"num_checkpoints": 8, "grid": 8} if is_hybrid else {}
    prompts = [[*prompt_of(20), *prompt_of(3, seed)] for seed in range(4)]
    wanted, hits = alone(prompts, 16, is_hybrid=is_hybrid), []
    for plans in ((CHAIN, TREE), (OFF,)):
        engine = build_hybrid(plans, drafts_itself=True, is_hybrid=is_hybrid, **kept)
        policy = InTurn(*plans) if is_hybrid else FixedPolicy(plans[0].name)
        core = EngineCore(engine, policy=policy)
        for _ in range(2):
            found = run(core, prompts, 16, lambda core=core: plain.check(core))
            assert outputs(found) == wanted
        hits.append([x.stats.num_cached_tokens for x in found])
        assert engine.cache.places is None or engine.cache.places.num_free == 3
    assert hits[0] == hits[1]
    assert min(hits[0]) >= 16


@pytest.mark.parametrize(
    "plan", only([CHAIN, DYNAMIC], [*PLANS, MERGED]), ids=lambda plan: plan.name
)
def test_chats_go_on_with_states_of_both(
    plan: SpecPlan, plain: PlainStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft has states of a prefix, too; of a shorter one, where that ended with a leaf that it
    had not read.
    """
    admit, lengths = Request.admit, []

    def noted(request: Request, blocks: list[int], num_cached: int, lens: Sequence[int]) -> None:
        lengths.append((num_cached, *lens))
        admit(request, blocks, num_cached, lens)

    monkeypatch.setattr(Request, "admit", noted)
    engine = build_hybrid(
        [plan], prefill_chunk=11, num_checkpoints=20, grid=8, max_seq_len=160, drafts_itself=True
    )
    policy, history, ends = InTurn(plan), prompt_of(19), [0]
    core = EngineCore(engine, policy=policy)
    for turn in range(6):
        (request,) = run(core, [history], 9 + turn, lambda: plain.check(core))
        ends.append(len(history) + len(request.output_token_ids) - 1)
        history = [*history, *request.output_token_ids, *prompt_of(2 + turn, turn)]
    assert [count for count, *_ in lengths] == [end // 8 * 8 for end in ends[:-1]]
    # prompts have left some in any case
    assert all(16 <= draft <= count for count, *drafts in lengths[1:] for draft in drafts)
    assert sum(count == draft for count, draft, *_ in lengths[1:]) >= 2
    assert policy.num_right > 6


def test_requests_that_give_way(plain: PlainStates) -> None:
    """They come back to another place, and the draft reads everything again."""
    engine = build_hybrid([CHAIN, TREE], pool_blocks=20, drafts_itself=True)
    policy = InTurn(CHAIN, TREE)
    core = EngineCore(engine, policy=policy)
    prompts = [prompt_of(20, seed) for seed in range(4)]
    found = run(core, prompts, 24, lambda: plain.check(core))
    assert core.scheduler.stats.num_preemptions > 0
    assert outputs(found) == alone(prompts, 24)


@pytest.mark.parametrize("seed", only([0], range(6)))
def test_states_in_any_order_of_events(seed: int, plain: PlainStates) -> None:
    """See the test of the same name of targets; two drafts that read different tokens."""
    Checked.plain = plain
    plans = (*PLANS, *TOGETHER, SECOND, LOOKUP)
    figures, solo = Figures(), Solo(build_hybrid([]))
    prompts = [prompt_of(length, seed) for length in (3, 12, 17, 34)]
    for round_, blocks in enumerate((18, None)):
        # too few blocks, and enough for prefixes to stay
        engine = build_hybrid(
            plans, pool_blocks=blocks, num_checkpoints=6, grid=4, drafts_itself=True
        )
        run_interleaving(
            engine, solo, 10 * seed + round_, prompts, figures, make_core=Checked, num_requests=9
        )
        assert engine.cache.states is not None
        assert engine.cache.states.num_free == 3
    assert figures.num_preemptions > 0
    assert figures.num_cached_tokens > 0
    assert len(figures.steps) > 3


def test_trees_of_which_a_part_is_verified(plain: PlainStates) -> None:
    engine = build_hybrid([TREE], drafts_itself=True)
    core = EngineCore(engine, policy=ScriptedNodes(TREE))
    prompts = [prompt_of(length) for length in (3, 9, 20, 6)]
    found = run(core, prompts, 16, lambda: plain.check(core))
    assert outputs(found) == alone(prompts, 16)
    assert core.scheduler.stats.num_accepted_tokens > 0


def test_what_a_failed_step_has_folded_does_not_count(plain: PlainStates) -> None:
    engine = build_hybrid([TREE], drafts_itself=True, num_checkpoints=2, grid=8)
    policy, hook = InTurn(TREE), Flaky()
    core = EngineCore(engine, policy=policy)
    engine.steps[TREE.name].before_accept = hook
    requests = [core.requests.make(prompt_of(n), greedy(12)) for n in (3, 9, 18)]
    run_failing(core, requests, plain)
    assert policy.num_right > 3
