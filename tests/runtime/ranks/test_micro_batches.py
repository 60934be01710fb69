"""Batches of disjoint requests in the stages of one engine: each request has its own tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from specc.errors import ConfigError
from specc.runtime.core import EngineCore
from specc.runtime.llm import LLM
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.ranks.leader import Leader
from specc.runtime.ranks.led_step import LedStep
from specc.runtime.ranks.orders import Kind
from specc.runtime.scheduling.batch import Batch
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from tests import models
from tests.interleavings import Figures, NearTies, Solo, draw_params, run_interleaving
from tests.lossless import Zoo
from tests.runtime.interrupts import fail_now_and_then
from tests.runtime.ranks.test_led_engine import cases, params, rule_of
from tests.runtime.ranks.test_stages import Engines, assert_same

# blocks for little more than one of the longest
FEW = {"kv_cache_tokens": 160}
STAGES = [
    pytest.param((1, 2), range(2), id="two-stages", marks=pytest.mark.slow),
    pytest.param((1, 2), range(2, 30), id="two-stages-many", marks=pytest.mark.slow),
    pytest.param((1, 3), range(8), id="three-stages", marks=pytest.mark.slow),
    pytest.param((2, 2), range(8), id="stages-of-two-ranks", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def load(zoo: Zoo) -> Iterator[Engines]:
    loaded = Engines(zoo)
    yield loaded
    loaded.close()


class Alone:
    """Solo runs of targets without stages."""

    def __init__(self, zoo: Zoo) -> None:
        self._zoo = zoo
        self._known: dict[str, tuple[Solo, NearTies]] = {}

    def of(self, name: str = "llama") -> tuple[Solo, NearTies]:
        if name not in self._known:
            engines = [Engines(self._zoo).whole(name=name) for _ in range(2)]
            self._known[name] = Solo(engines[0]), NearTies(engines[1])
        return self._known[name]


@pytest.fixture(scope="module")
def alone(zoo: Zoo) -> Alone:
    return Alone(zoo)


def prompts() -> list[list[int]]:
    return [list(prompt[:40]) for prompt in models.prompts()]


def draw(dice: random.Random, max_tokens: int, vocab_size: int) -> SamplingParams:
    """Greedy, seeded, penalized, with log probabilities, within a grammar."""
    drawn = dice.random()
    if drawn < 0.15:
        regex = StructuredOutputsParams(regex="([a-e]{2}[0-9]){2,4}")
        return SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=regex)
    if drawn < 0.3:
        return SamplingParams(
            temperature=0,
            max_tokens=dice.randint(1, max_tokens),
            logprobs=2,
            prompt_logprobs=1,
            ignore_eos=True,
        )
    return draw_params(dice, max_tokens, vocab_size)


def watched_core(*args: Any, **options: Any) -> EngineCore:
    """A core whose batches in flight are compared: no request is in two of them."""
    core = EngineCore(*args, **options)
    hold = core.scheduler.hold

    def held(batch: Batch) -> None:
        others = {id(s) for one in core.in_flight.queued for s in one.batch.requests}
        assert not others.intersection(map(id, batch.requests))
        hold(batch)

    core.scheduler.hold = held  # type: ignore[method-assign]
    return core


@pytest.mark.parametrize(("plan", "options"), cases({"tree-3-2-1-mss"}))
def test_two_batches_generate_what_one_does(
    load: Engines, plan: str, options: dict[str, Any]
) -> None:
    """All kinds of plans and rows, with four requests in two batches."""
    given = params(4, **rule_of(plan, options))
    assert_same(load.whole(), load.staged((1, 2)), plan, given, micro_batches=None)


def test_the_next_order_goes_before_results_are_taken(
    load: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four long requests, hardly a pass is waited for with nothing else in the stages."""
    staged = load.staged((1, 2))
    in_flight, seen = 0, []
    begin = Leader.begin_staged

    def watched(leader: Leader, inputs: Any, *rest: Any) -> Any:
        nonlocal in_flight
        in_flight += len(inputs[7]) > 0
        taken = begin(leader, inputs, *rest)

        def take() -> Any:
            nonlocal in_flight
            seen.append(in_flight)
            found = taken()
            in_flight -= len(inputs[7]) > 0
            return found

        return take

    monkeypatch.setattr(Leader, "begin_staged", watched)
    given = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True) for _ in range(4)]
    for micro_batches, most in ((None, 2), (1, 1)):
        seen.clear()
        llm = LLM(staged, plan="chain-3", micro_batches=micro_batches)
        llm.generate([list(prompt) for prompt in models.prompts()[:4]], given)
        assert max(seen) == most
        assert seen.count(most) > 0.7 * len(seen)


def test_a_commit_goes_with_the_next_order(load: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """No message of its own, and not after the next pass of the same requests."""
    staged = load.staged((1, 2))
    job = staged.target.leader._job  # type: ignore[attr-defined]
    order, orders = job.order, []

    def watched(kind: Kind, tensors: Any = (), model: int = 0, holds: bool = False) -> int:
        orders.append((kind, holds, tensors))
        return order(kind, tensors, model, holds)

    monkeypatch.setattr(job, "order", watched)
    given = [SamplingParams(temperature=0, max_tokens=16, ignore_eos=True) for _ in range(4)]
    LLM(staged, plan="tree-3-2-1").generate([list(p) for p in models.prompts()[:4]], given)
    kinds = [kind for kind, *_ in orders]
    assert kinds.count(Kind.COMMIT) > 4
    assert all(holds == (kind is Kind.COMMIT) for kind, holds, _ in orders)
    # first blocks of the sequences whose rows a pass has left behind, and nobody has kept yet
    open_blocks: set[int] = set()
    for kind, _, tensors in orders:
        table = tensors[3 if kind is Kind.COMMIT else 6]
        blocks = {int(row[0]) for row in table}
        if kind is Kind.COMMIT:
            open_blocks -= blocks
        elif len(tensors[7]) and tensors[5] is not None:
            # trees: every second pass is that of the other batch
            assert not open_blocks & blocks
            open_blocks |= blocks


class Fickle(FixedPolicy):
    """Needs the results of every step before it chooses."""

    needs_results = True


def test_a_policy_that_needs_results_has_one_batch_at_a_time(load: Engines) -> None:
    staged, whole = load.staged((1, 2)), load.whole()
    given = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True) for _ in range(4)]
    found = []
    for engine in (whole, staged):
        llm = LLM(engine, policy=Fickle("chain-3"))
        outputs = llm.generate([list(p) for p in models.prompts()[:4]], given)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert llm._in_flight.num_beside == 0
    assert found[0] == found[1]


# from here on with few blocks: a process is in one group, so ranks start again


@pytest.mark.parametrize(("shape", "seeds"), STAGES)
def test_interleavings(load: Engines, alone: Alone, shape: tuple[int, int], seeds: range) -> None:
    """Requests come, go, and give way at any time, each step by any of the plans."""
    # two layers are too few for three stages
    name = "llama" if shape[1] < 3 else "gemma3"
    solo, ties = alone.of(name)
    staged, figures = load.staged(shape, name=name, **FEW), Figures()
    cores: list[EngineCore] = []

    def make_core(*args: Any, **options: Any) -> EngineCore:
        cores.append(watched_core(*args, **options))
        return cores[-1]

    for seed in seeds:
        run_interleaving(
            staged, solo, seed, prompts(), figures, ties,
            draw=draw,
            max_tokens=70,
            num_requests=9,
            make_core=make_core,
        )  # fmt: skip
    num_beside = sum(core.in_flight.num_beside for core in cores)
    assert figures.num_ties <= figures.num_compared // 50
    assert num_beside > figures.num_iterations // 3
    assert figures.num_preemptions > len(seeds) // 4
    assert figures.num_cached_tokens > 0
    assert set(figures.steps) == set(staged.plans)
    if len(seeds) > 3:
        assert figures.num_cancelled > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "is_done"),
    [
        (LedStep, "_commit", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (Scheduler, "postprocess", False),
                (Scheduler, "hold", False),
                (Scheduler, "schedule", True),
            )
        ),
    ],
)
def test_an_interrupt_anywhere_loses_nothing(
    load: Engines,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    is_done: bool,
) -> None:
    """Now and then a call ends early, with a batch in the other stage: results nobody reads."""
    solo, ties = alone.of()
    interrupts = fail_now_and_then(monkeypatch, owner, name, every=9, is_done=is_done)
    figures = Figures()
    run_interleaving(load.staged((1, 2), **FEW), solo, 5, prompts(), figures, ties, num_requests=6)
    assert interrupts.count > 3


@pytest.mark.slow
def test_micro_batches_of_an_engine_without_stages_are_refused(load: Engines) -> None:
    with pytest.raises(ConfigError, match="--micro-batches 2, and an engine without stages"):
        LLM(load.whole(**FEW), micro_batches=2)
