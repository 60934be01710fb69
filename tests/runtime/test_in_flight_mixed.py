"""Iterations ahead of the results, with prompts that join, several plans, and policies that learn.

Every request has the tokens that it has alone, whatever was in flight; and most iterations were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.runtime.backends.captured.state_rows import StateRows
from specc.runtime.backends.captured.step_buffers import HostResults, StepBuffers
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.policies.adaptive import AdaptivePolicy
from specc.runtime.policies.adaptive_length import AdaptiveConstants
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import SpecPlan
from tests.interleavings import Figures, Moody, NearTies, Solo, run_interleaving
from tests.logprob_interleavings import DrawLogprobs
from tests.runtime.interrupts import fail_now_and_then
from tests.runtime.late_engine import Rig, late_rig

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


@pytest.mark.parametrize(("policy", "share"), POLICIES)
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


def test_a_request_that_reads_logits_waits_and_others_go_on(rig, alone) -> None:
    """Log probabilities, masks and controls come and go beside requests without."""
    solo, ties = alone
    figures = Figures()
    words = [a + b for a in "abcdefgh" for b in "ABCD"]
    wants = DrawLogprobs(words, (), 0.7)

    def draw(dice: random.Random, max_tokens: int, vocab_size: int) -> SamplingParams:
        if dice.random() < 0.2:
            return wants(dice, 8, vocab_size)
        return SamplingParams(max_tokens=dice.randrange(1, max_tokens), ignore_eos=True)

    for seed in range(2):
        run_interleaving(rig.engine, solo, seed, PROMPTS, figures, ties, draw=draw,
                         policy=fixed("chain-3"))  # fmt: skip
    assert 0.2 * figures.num_iterations < figures.num_ahead < 0.9 * figures.num_iterations


def serve(rig: Rig, policy: Any, num_requests: int) -> EngineCore:
    """Requests of 20 to 60 tokens, with half of the slots refilled as others end."""
    dice = random.Random(1)
    core = EngineCore(rig.engine, policy=policy)
    rig.engine.cache.allocator.forget_all()
    made = 0
    while made < num_requests or core.scheduler.has_work:
        if made < num_requests and len(core.scheduler.running) < 3:
            params = SamplingParams(max_tokens=dice.randrange(20, 60), ignore_eos=True)
            core.scheduler.add(core.requests.make(list(dice.choice(PROMPTS)), params))
            made += 1
        core.advance()
    core.in_flight.settle()
    return core


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


@pytest.mark.parametrize(("owner", "name", "is_done"), PLACES)
def test_an_interrupt_anywhere_loses_nothing(rig, alone, monkeypatch, owner, name, is_done) -> None:
    """Now and then a call ends early, with prompts and steps of several plans in flight."""
    solo, ties = alone
    figures = Figures()
    interrupts = fail_now_and_then(monkeypatch, owner, name, every=7, is_done=is_done)
    run_interleaving(
        rig.engine, solo, 5, PROMPTS, figures, ties, policy=Switching, num_requests=10
    )  # fmt: skip
    assert interrupts.count > 3
    assert rig.device.num_waiting == 0
    assert figures.num_ahead > 0
