"""The policy measured: what loses costs next to nothing, and what gains is used."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from specc.errors import ConfigError, RequestError
from specc.runtime.backends.step_io import StepResult
from specc.runtime.policies.measured import MeasuredConstants, MeasuredPolicy
from specc.runtime.policies.named import make_policy
from specc.runtime.policies.repeated_text import repeats
from specc.runtime.scheduling.batch import Batch, RunResult, Span, StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan

PLAN = SpecPlan.from_widths((1, 1, 1))
SELF = SpecPlan.from_widths((1, 1, 1), ("self_x0",))
STATS = SpecStats()
# seconds of a step of off
OFF_S = 0.01


class Engine:
    """Runs steps as an engine does, up to eight in a row; tokens and seconds of one sequence.

    Args:
        cost: seconds of a step of the plan, of off's.
        accepts: probability of each draft token, by tokens so far.
        catch_up: seconds for each token that a draft has missed, of off's step.
        in_a_row: steps without asking the policy.
        has_walls: seconds of the whole iteration are known.
    """

    def __init__(
        self, cost: float, accepts: Callable[[int], float], seed: int = 0, *,
        catch_up: float = 0.0, in_a_row: int = 8, has_walls: bool = True,
    ) -> None:  # fmt: skip
        self.policy = MeasuredPolicy(PLAN if catch_up else SELF)
        self._plan = PLAN if catch_up else SELF
        self._cost, self._accepts, self._catch_up = cost, accepts, catch_up
        self._in_a_row, self._has_walls = in_a_row, has_walls
        self._random = random.Random(seed)
        self._missed = 0
        self.seconds, self.tokens, self.steps, self.drafted = 0.0, 0, 0, 0

    def run(self, tokens: int, batch: int = 1) -> None:
        requests = [Request(str(i), [0], SamplingParams(), max_seq_len=9) for i in range(batch)]
        last = self.tokens + tokens
        while self.tokens < last:
            name = self.policy.choose(batch, STATS)
            assert name in (OFF.name, self._plan.name)
            for _ in range(self._in_a_row):
                self._step(name, requests)

    def _step(self, name: str, requests: list[Request]) -> None:
        plan = OFF if name == OFF.name else self._plan
        accepted = [self._draw(plan.max_depth) for _ in requests]
        seconds = (
            OFF_S * (self._cost if plan.speculates else 1) * max(0.5, self._random.gauss(1, 0.05))
        )
        is_behind = plan.speculates and self._missed > 1
        if is_behind:
            seconds += self._catch_up * OFF_S * self._missed
        self._missed = 0 if plan.speculates else self._missed + 1
        self.seconds += seconds
        self.tokens += 1 + accepted[0]
        self.steps += 1
        self.drafted += plan.speculates
        step = StepResult(accepted, [], [], {}, {"step": seconds})
        batch = Batch([], [StepGroup(plan, requests, catches_up=is_behind)])
        result = RunResult([], 0.0, [step])
        result.wall_s = seconds if self._has_walls else 0.0
        self.policy.observe_batch(batch, result)

    def _draw(self, depth: int) -> int:
        accepted, chance = 0, self._accepts(self.tokens)
        while accepted < depth and self._random.random() < chance:
            accepted += 1
        return accepted


def speed(engine: Engine, tokens: int, batch: int = 1) -> float:
    """Tokens of a sequence in the time of a step of off, after 64 tokens."""
    engine.run(64, batch)
    before, begin_s = engine.tokens, engine.seconds
    engine.run(tokens, batch)
    return (engine.tokens - before) * OFF_S / (engine.seconds - begin_s)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("cost", "chance", "catch_up"),
    [
        (1.2, 0.1, 0.0), (1.3, 0.15, 0.0), (1.9, 0.3, 0.02), (2.5, 0.3, 0.02), (3.8, 0.5, 0.0),
        (6.0, 0.9, 0.02),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [256, 2000])
def test_a_plan_that_loses_costs_next_to_nothing(
    tokens: int, cost: float, chance: float, catch_up: float, seed: int
) -> None:
    engine = Engine(cost, lambda count: chance, seed, catch_up=catch_up)
    assert speed(engine, tokens) > 0.97


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("cost", "chance"), [(1.2, 0.6), (2.0, 0.9), (1.15, 0.4)])
@pytest.mark.parametrize("options", [{}, {"in_a_row": 1}, {"has_walls": False}], ids=str)
def test_a_plan_that_gains_is_used(options: dict, cost: float, chance: float, seed: int) -> None:
    whole = sum(chance**depth for depth in range(PLAN.max_depth + 1)) / cost
    assert speed(Engine(cost, lambda count: chance, seed, **options), 600) > 0.93 * whole


def test_what_changes_is_noticed() -> None:
    """Prose, then text that repeats itself, then prose."""
    engine = Engine(1.2, lambda count: 0.95 if 1000 < count < 3000 else 0.05)
    assert speed(engine, 900) > 0.97
    engine.run(1500)
    before, begin_s = engine.tokens, engine.seconds
    engine.run(500)
    assert (engine.tokens - before) * OFF_S / (engine.seconds - begin_s) > 2.5
    engine.run(200)
    before, begin_s = engine.tokens, engine.seconds
    engine.run(1000)
    assert (engine.tokens - before) * OFF_S / (engine.seconds - begin_s) > 0.97


def test_batches_start_from_what_others_have_found() -> None:
    engine = Engine(2.5, lambda count: 0.3)
    engine.run(200, batch=8)
    drafted = engine.drafted
    for batch in (4, 2):
        engine.run(64, batch)
    assert engine.drafted == drafted


def test_other_iterations_teach_nothing() -> None:
    """Prompts beside a step, and steps of several plans."""
    policy = MeasuredPolicy(PLAN)
    request = Request("0", [0], SamplingParams(), max_seq_len=9)
    group, step = StepGroup(PLAN, [request]), StepResult([0], [], [], {}, {"step": 9.0})
    for _ in range(50):
        assert policy.choose(1, STATS) == PLAN.name
        policy.observe_batch(Batch([Span(request, 0, 1)], [group]), RunResult([None], 9.0, [step]))
        both = [group, StepGroup(OFF, [request])]
        policy.observe_batch(Batch([], both), RunResult([], 0.0, [step, step]))
    for _ in range(8):
        policy.observe_batch(Batch([], [group]), RunResult([], 0.0, [step]))
    assert policy.choose(1, STATS) == OFF.name
    assert not policy.needs_results


class Host:
    """An index that finds suffixes of this length."""

    def __init__(self) -> None:
        self.length = 0

    def propose(self, request: Request, depth: int, drafter: object) -> tuple[list[int], int]:
        return [1] * depth, self.length


def test_a_lookup_that_has_found_something_is_tried() -> None:
    """Long before its share of the time would pay for it; and not again where that was nothing."""
    plan, host = SpecPlan.from_widths((1, 1, 1), ("suffix",)), Host()
    policy = MeasuredPolicy(plan, host)  # type: ignore[arg-type]
    requests = [Request("0", [0], SamplingParams(), max_seq_len=9)]

    def run(steps: int, accepted: int) -> int:
        drafted = 0
        for _ in range(steps):
            names = policy.choose_each(requests, STATS) or [policy.choose(1, STATS)]
            drafts = names == [plan.name]
            drafted += drafts
            step = StepResult([accepted if drafts else 0], [], [], {}, {"step": 1 + 0.2 * drafts})
            group = StepGroup(plan if drafts else OFF, requests)
            policy.observe_batch(Batch([], [group]), RunResult([], 0.0, [step]))
        return drafted

    assert run(40, 0) == 4
    host.length = 3
    assert run(20, 3) == 0
    host.length = 4
    assert run(20, 3) == 20
    # what it had gained pays for a while
    run(100, 0)
    assert run(200, 0) < 30


def test_trials_that_lose_much_end_early() -> None:
    """After one step, where steps are not run in a row."""
    engine = Engine(6.0, lambda count: 0.1, in_a_row=1)
    engine.run(64)
    engine.drafted = 0
    engine.run(2000)
    assert 1 <= engine.drafted <= 5


@pytest.mark.parametrize(("cost", "is_tried"), [(1.5, True), (4.5, False)])
def test_text_that_repeats_itself_is_reason_for_a_trial(cost: float, is_tried: bool) -> None:
    """Of a plan whose steps would be faster than off if all was accepted."""
    policy = MeasuredPolicy(SELF)
    request = Request("0", [0], SamplingParams(), max_seq_len=9)
    drafted = []
    for number in range(180):
        names = policy.choose_each([request], STATS) or [policy.choose(1, STATS)]
        drafts = names == [SELF.name]
        drafted.append(drafts)
        accepted = 3 if drafts and number >= 110 else 0
        request.token_ids += range(number * 9, number * 9 + 1 + accepted)
        if number >= 100:
            request.token_ids[-1 - accepted :] = [0] * (1 + accepted)
        step = StepResult([accepted], [], [], {}, {"step": cost if drafts else 1.0})
        group = StepGroup(SELF if drafts else OFF, [request])
        policy.observe_batch(Batch([], [group]), RunResult([], 0.0, [step]))
    assert not any(drafted[20:100])
    assert any(drafted[100:130]) == all(drafted[130:]) == is_tried


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], False), (list(range(8)), False), ([7] * 8, False), ([7] * 9, True),
        (list(range(2000)), False), ([*range(8), *range(9)], False), ([*range(9), *range(9)], True),
        ([*range(8), *range(2000, 4000), *range(8)], False), ([1 << 56, 0] * 4 + [1], False),
    ],
)  # fmt: skip
def test_text_that_repeats_itself(tokens: list[int], found: bool) -> None:
    assert repeats(tokens) is found


def test_by_name() -> None:
    plans = {"off": OFF, PLAN.name: PLAN}
    made = make_policy("measured", plans, None, {}, plan=PLAN.name)  # type: ignore[arg-type]
    assert made.choose(1, STATS) == PLAN.name
    with pytest.raises(RequestError, match="a default plan that drafts"):
        make_policy("measured", plans, None, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"first": 0}, {"share": 0.0}, {"share": 1.0}, {"saved": 0.0}])
def test_constants_out_of_range(changes: dict) -> None:
    with pytest.raises(ConfigError):
        MeasuredConstants(**changes)
