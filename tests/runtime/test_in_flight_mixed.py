"""Iterations ahead of the results, with prompts that join, several plans, and policies that learn.

Every request has the tokens that it has alone, whatever was in flight; and most iterations were.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.runtime.backends.captured.pending_replay import HalfReplay
from specc.runtime.backends.captured.state_rows import StateRows
from specc.runtime.backends.captured.step_buffers import HostResults, StepBuffers
from specc.runtime.backends.captured.step_scores import StepKind
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.policies.adaptive import AdaptivePolicy
from specc.runtime.policies.adaptive_length import AdaptiveConstants
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import SpecPlan
from tests.interleavings import Draw, Figures, Moody, NearTies, Solo, draw_params, run_interleaving
from tests.logprob_interleavings import DrawLogprobs
from tests.runtime.interrupts import fail_now_and_then
from tests.runtime.late_engine import Rig, late_rig
from tests.tiers import every

PLANS = [SpecPlan.from_widths(widths) for widths in ((), (1,), (1, 1, 1), (2, 1))]
PROMPTS = [[5, 6, 7, 8], [40, 41], [9] * 7, list(range(60, 83)), [200], list(range(100, 130))]


@pytest.fixture(scope="module")
def rig(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Four sequences of 128 tokens; prompts in chunks of 8; blocks for about half of the worst."""
    path = tmp_path_factory.mktemp("mixed") / "engine"
    config = CompileConfig(
        plans=tuple(PLANS[1:]),
        max_seq_len=128,
        max_batch_size=4,
        block_size=4,
        prefill_chunk=8,
        backend="cuda",
    )
    with late_rig(tiny_models, path, config, kv_cache_tokens=220) as made:
        yield made


@pytest.fixture(scope="module")
def alone(rig: Rig) -> tuple[Solo, NearTies]:
    """The same engine, operator by operator."""
    engine = Engine.load(rig.path, backend="eager")
    return Solo(engine), NearTies(Engine.load(rig.path, backend="eager"))


class Switching(FixedPolicy):
    """One plan for all, which changes every few iterations, whatever steps have done."""

    def __init__(self, names: Sequence[str], dice: random.Random) -> None:
        self._names, self._dice, self._left = list(names), dice, 0

    def choose(self, num_running: int, stats: SpecStats) -> str:
        self._left -= 1
        if self._left <= 0:
            self._plan, self._left = self._dice.choice(self._names), self._dice.randrange(1, 9)
        return self._plan


def fixed(name: str) -> Callable[..., Any]:
    return lambda names, dice: FixedPolicy(name)


def goodput(names: Sequence[str], dice: random.Random) -> GoodputPolicy:
    return GoodputPolicy({plan.name: plan for plan in PLANS}, shares_pass=False, max_num_seqs=4)


def adaptive(names: Sequence[str], dice: random.Random) -> AdaptivePolicy:
    return AdaptivePolicy(
        {"off": 0, "chain-1": 1, "chain-3": 3}, AdaptiveConstants(window=4, longest_wait=16)
    )


# policy, and the least share of iterations that are queued ahead
# plans that change are in the default tier where calls are interrupted, below
POLICIES = [
    pytest.param(fixed("chain-3"), 0.75, id="fixed"),
    pytest.param(fixed("tree-2-1"), 0.75, id="tree"),
    pytest.param(goodput, 0.75, id="goodput"),
    pytest.param(adaptive, 0.75, id="adaptive"),
    # from off to a tree, drafts have to catch up with tokens that the host has to know
    pytest.param(Switching, 0.65, id="switching"),
    pytest.param(Moody, 0.6, id="moody"),
]
SEEDS = [
    pytest.param(range(1), id="few"),
    pytest.param(range(1, 24), id="many", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "share"), every(6, POLICIES))
@pytest.mark.parametrize("seeds", SEEDS)
def test_interleavings(rig, alone, policy, share, seeds) -> None:
    """Requests come, go and give way at any time: plain, seeded, penalized, cancelled."""
    solo, ties = alone
    figures = Figures()
    for seed in seeds:
        run_interleaving(
            rig.engine, solo, seed, PROMPTS, figures, ties, policy=policy, num_requests=14
        )  # fmt: skip
        assert rig.device.num_waiting == 0
    assert figures.num_ties == 0
    print(f"{figures.num_ahead} of {figures.num_iterations} ahead")
    assert figures.num_ahead > share * figures.num_iterations, figures


@pytest.mark.slow
def test_requests_give_way_while_others_are_in_flight(rig, alone) -> None:
    """Long ones in a cache that is too small."""
    solo, ties = alone
    figures = Figures()
    for seed in (3, 4):
        run_interleaving(
            rig.engine, solo, seed, [PROMPTS[3], PROMPTS[5]], figures, ties,
            policy=Switching,
            max_tokens=90,
            num_requests=10,
        )  # fmt: skip
    assert figures.num_preemptions > 1
    assert figures.num_ahead > 0.4 * figures.num_iterations


@pytest.mark.slow
def test_requests_with_grammars_give_way_in_the_middle_of_their_trees(rig, alone) -> None:
    """Those whose drafts obey, and others, in a cache that is too small for them."""

    def draw(dice: random.Random, max_tokens: int, vocab_size: int) -> SamplingParams:
        if dice.random() < 0.4:
            return SamplingParams(
                temperature=0, max_tokens=dice.randrange(20, max_tokens), ignore_eos=True
            )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=dice.choice([0.0, 1.0]),
            seed=dice.randrange(99),
            structured_outputs=StructuredOutputsParams(regex="[a-z]{20,70}"),
        )

    solo, ties = alone
    figures = Figures()
    for seed in (3, 4):
        run_interleaving(
            rig.engine, solo, seed, [PROMPTS[3], PROMPTS[5]], figures, ties,
            policy=fixed("chain-3"),
            max_tokens=90,
            num_requests=10,
            draw=draw,
        )  # fmt: skip
    kinds = {kind for _, kind in rig.engine.steps["chain-3"]._captured}
    assert any(isinstance(kind, StepKind) and kind.masks_drafts for kind in kinds)
    assert figures.num_preemptions > 1
    assert figures.num_ahead > 0.3 * figures.num_iterations


GRAMMARS = [
    StructuredOutputsParams(regex="(ab|cd){2,9}e"),
    StructuredOutputsParams(regex="[a-z]{3,20}"),
    StructuredOutputsParams(choice=["yes", "yesterday", "no", "nothing else"]),
]


def draw_readers(share: float) -> Callable[[random.Random, int, int], SamplingParams]:
    """Log probabilities, grammars and controls for a share of the requests."""
    words = [a + b for a in "abcdefgh" for b in "ABCD"]
    wants = DrawLogprobs(words, (), 0.7)

    def draw(dice: random.Random, max_tokens: int, vocab_size: int) -> SamplingParams:
        if dice.random() > share:
            return SamplingParams(
                temperature=0, max_tokens=dice.randrange(1, max_tokens), ignore_eos=True
            )
        params = wants(dice, max_tokens, vocab_size)
        if dice.random() < 0.6:
            logprobs = dice.choice([None, 2])
            params = SamplingParams(
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                seed=params.seed,
                top_p=params.top_p,
                logprobs=logprobs,
                structured_outputs=dice.choice(GRAMMARS),
            )
        return params

    return draw


# policy, share of requests with masks, and the least share of iterations that are queued ahead
READERS = [
    pytest.param(fixed("chain-3"), 0.3, 0.5, id="fixed"),
    pytest.param(fixed("off"), 1.0, 0.5, id="off"),
    pytest.param(goodput, 0.6, 0.5, id="goodput"),
    pytest.param(adaptive, 0.6, 0.5, id="adaptive"),
    pytest.param(Switching, 0.6, 0.4, id="switching"),
    # requests with masks in several plans: results come first
    pytest.param(Moody, 0.6, 0.2, id="moody"),
]


# steps of several plans come in an iteration, one of which waits for its masks
READER_SEEDS = [pytest.param(range(7, 8), id="few"), SEEDS[1]]


@contextlib.contextmanager
def lost_halves() -> Iterator[list[bool]]:
    """Of each step that waited for its masks: whether another one had taken its place."""
    lost: list[bool] = []
    complete = HalfReplay.complete

    def watched(half: HalfReplay) -> Any:
        lost.append((pending := complete(half)) is None)
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HalfReplay, "complete", watched)
        yield lost


@pytest.mark.parametrize(("policy", "share", "least"), every(6, READERS, 5))
@pytest.mark.parametrize("seeds", READER_SEEDS)
def test_requests_that_read_logits_are_ahead_too(rig, alone, policy, share, least, seeds) -> None:
    """Log probabilities, masks and controls come and go beside requests without."""
    solo, _ = alone
    figures = Figures()
    with lost_halves() as lost:
        for seed in seeds:
            run_interleaving(
                rig.engine, solo, seed, PROMPTS, figures, draw=draw_readers(share), policy=policy,
                num_requests=14,
            )  # fmt: skip
            assert rig.device.num_waiting == 0
    # they come last in their iteration
    assert lost
    assert not any(lost)
    print(f"{figures.num_ahead} of {figures.num_iterations} ahead")
    assert figures.num_ahead > least * figures.num_iterations, figures


def test_two_on_one_engine_overtake_steps_that_wait_for_masks(rig, alone) -> None:
    """A step of the other one takes the place of half a step, which then is queued anew."""
    solo, _ = alone
    cores = [EngineCore(rig.engine, policy=FixedPolicy("chain-3")) for _ in range(2)]
    rig.engine.cache.allocator.forget_all()
    dice, requests = random.Random(3), []
    with lost_halves() as lost:
        while len(requests) < 20 or any(core.scheduler.has_work for core in cores):
            core = dice.choice(cores)
            if len(requests) < 20 and len(core.scheduler.running) < 2:
                params = draw_readers(0.8)(dice, 24, rig.engine.vocab_size)
                requests.append(core.requests.make(list(dice.choice(PROMPTS)), params))
                core.scheduler.add(requests[-1])
            elif core.scheduler.has_work:
                core.advance()
    for core in cores:
        core.in_flight.settle()
    assert 5 < sum(lost) < len(lost) - 5
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == solo.tokens(prompt, request.params)
    assert rig.device.num_waiting == 0


def serve(rig: Rig, policy: Any, num_requests: int) -> EngineCore:
    """Requests of 20 to 60 tokens, with half of the slots refilled as others end."""
    dice = random.Random(1)
    core = EngineCore(rig.engine, policy=policy)
    rig.engine.cache.allocator.forget_all()
    made = 0
    while made < num_requests or core.scheduler.has_work:
        if made < num_requests and len(core.scheduler.running) < 3:
            params = SamplingParams(
                temperature=0, max_tokens=dice.randrange(20, 60), ignore_eos=True
            )
            core.scheduler.add(core.requests.make(list(dice.choice(PROMPTS)), params))
            made += 1
        core.advance()
    core.in_flight.settle()
    return core


@pytest.mark.slow
@pytest.mark.parametrize("policy", [goodput, fixed("chain-3")], ids=["goodput", "fixed"])
def test_nearly_all_iterations_of_a_server_are_ahead(rig, policy) -> None:
    """Under the default of a server, with prompts that join all the time."""
    core = serve(rig, policy([], random.Random(1)), 24)
    loop = core.in_flight
    assert loop.num_iterations > 150
    assert loop.num_ahead > 0.8 * loop.num_iterations, loop.num_ahead / loop.num_iterations
    assert core.scheduler.stats.num_prefill_passes > 24


PLACES = [
    (HostResults, "wait", False),
    (StepBuffers, "copy_from", False),
    (StepBuffers, "read_results", True),
    (StateRows, "save", True),
    (StateRows, "route", True),
    (Scheduler, "schedule_ahead", True),
    (Scheduler, "hold", False),
    (Scheduler, "postprocess", False),
    (Scheduler, "postprocess", True),
]


MASKED_PLACES = [
    (HalfReplay, "complete", False),
    (HalfReplay, "complete", True),
    (HostResults, "wait", False),
    (Scheduler, "postprocess", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "is_done"), every(9, PLACES))
def test_an_interrupt_anywhere_loses_nothing(rig, alone, monkeypatch, owner, name, is_done) -> None:
    """Now and then a call ends early, with prompts and steps of several plans in flight."""
    interrupt_now_and_then(rig, alone, monkeypatch, owner, name, is_done, draw_params)


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "is_done"), every(4, MASKED_PLACES, 1))
def test_an_interrupt_between_the_halves_of_a_step_loses_nothing(
    rig, alone, monkeypatch, owner, name, is_done
) -> None:
    # drafts that obey grammars need few steps
    interrupt_now_and_then(rig, alone, monkeypatch, owner, name, is_done, draw_readers(0.8), 4)


def interrupt_now_and_then(
    rig: Rig,
    alone: tuple[Solo, NearTies],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    is_done: bool,
    draw: Draw,
    step: int = 7,
) -> None:
    """Let every seventh call of something, or another one, end early, before its work or after."""
    solo, ties = alone
    figures = Figures()
    interrupts = fail_now_and_then(monkeypatch, owner, name, every=step, is_done=is_done)
    run_interleaving(
        rig.engine, solo, 5, PROMPTS, figures, ties, policy=Switching, num_requests=10, draw=draw
    )  # fmt: skip
    assert interrupts.count > 2
    assert rig.device.num_waiting == 0
    assert figures.num_ahead > 0
