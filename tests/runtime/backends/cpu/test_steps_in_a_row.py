"""Steps in a row are those one by one: results, caches, outputs, counters, and where they end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specc.runtime.backends.step_io import StepInputs, StepResult
from specc.runtime.core import EngineCore
from specc.runtime.in_flight import StepPace
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import RequestOutput
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.scheduling.batch import Batch, RunResult, StepGroup
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF
from tests import models
from tests.lossless import PLAN_IDS, Zoo
from tests.runtime.backends.cpu.cpu_pair import Pair, load_pair, step_inputs

NAME = "gemma3-tied"
CHAIN = next(plan for plan in PLAN_IDS if plan.startswith("chain"))


@pytest.fixture(scope="module")
def shared_pair(zoo: Zoo) -> Pair:
    return load_pair(zoo, NAME)


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    shared_pair.fill_caches()
    yield shared_pair
    for step in shared_pair.compiled.steps.values():
        step.before_accept = None


def given(pair: Pair, batch: int, seed: int) -> StepInputs:
    inputs = step_inputs(pair.compiled, batch, seed)
    lengths = inputs["cache_len"].clamp(max=40).tolist()
    tokens = inputs["last_tokens"].tolist()
    rows = [(*row, length) for row, length in zip(tokens, lengths, strict=True)]
    names = ("block_table", "sampling_values", "sampling_words")
    return StepInputs(rows, *(inputs[name] for name in names))


def one_by_one(pair: Pair, plan: str, inputs: StepInputs, count: int) -> list[StepResult]:
    results: list[StepResult] = []
    for _ in range(count):
        step = pair.compiled.steps[plan].advance(inputs, pair.compiled.cache.environment)
        rows = []
        for b, row in enumerate(inputs.rows):
            tokens = [*row[:-1], *step.output_tokens[b][: step.num_accepted[b] + 1]]
            rows.append((*tokens[1 - len(row) :], step.next_cache_len[b]))
        inputs = inputs._replace(rows=rows)
        results.append(step)
    return results


def found(results: list[StepResult]) -> list[StepResult]:
    """All but the times."""
    return [result._replace(stage_s=dict.fromkeys(result.stage_s, 0.0)) for result in results]


@pytest.mark.parametrize("plan", PLAN_IDS)
def test_results_and_caches_are_those_of_single_steps(pair: Pair, plan: str) -> None:
    engine = pair.compiled
    for seed, (batch, count) in enumerate(((1, 5), (3, 4), (2, 1), (5, 3))):
        inputs = given(pair, batch, seed)
        pair.fill_caches(seed)
        wanted = one_by_one(pair, plan, inputs, count)
        rows = {name: slab.clone() for name, slab in engine.cache.environment.items()}
        pair.fill_caches(seed)
        step: Any = engine.steps[plan]
        results = step.advance_often(inputs, engine.cache.environment, count, [])
        assert found(results) == found(wanted)
        assert all(seconds > 0 for one in results for seconds in one.stage_s.values())
        for name, slab in engine.cache.environment.items():
            assert torch.equal(slab, rows[name]), name


@pytest.mark.parametrize("plan", [PLAN_IDS[0], CHAIN])
def test_a_token_that_ends_a_sequence_is_in_the_last_step(pair: Pair, plan: str) -> None:
    """Of any sequence, among accepted tokens alone."""
    inputs = given(pair, 3, 7)
    wanted = one_by_one(pair, plan, inputs, 6)
    emitted = [
        {t for b in range(3) for t in step.output_tokens[b][: step.num_accepted[b] + 1]}
        for step in wanted
    ]
    step: Any = pair.compiled.steps[plan]
    lengths = set()
    for token in sorted(set().union(*emitted)):
        pair.fill_caches()
        results = step.advance_often(inputs, pair.compiled.cache.environment, 6, [-5, token])
        first = next(i for i, tokens in enumerate(emitted) if token in tokens)
        assert len(results) == first + 1
        assert found(results) == found(wanted[: first + 1])
        lengths.add(first)
    assert len(lengths) > 2
    # -1 stands after the tokens of every sequence that accepted less than all
    pair.fill_caches()
    assert len(step.advance_often(inputs, pair.compiled.cache.environment, 6, [-1])) == 6


def test_a_hook_is_asked_in_each(pair: Pair) -> None:
    llm = LLM(pair.compiled, plan=CHAIN)
    requests = [llm._core.requests.make([1, 2, 3], SamplingParams(temperature=0))]
    step = pair.compiled.steps[CHAIN]
    batch = Batch(groups=[StepGroup(step.plan, requests)])
    assert llm._runner.can_repeat(batch)
    step.before_accept = lambda values: None
    assert not llm._runner.can_repeat(batch)
    assert not LLM(pair.eager, plan=CHAIN)._runner.can_repeat(batch)


PROMPTS = [[1, 2, 3], list(range(40, 60)), [9] * 5]
SAMPLED = {"temperature": 0.9, "seed": 11}


def counted(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> list[int]:
    """Steps of each call that runs several."""
    counts: list[int] = []
    kind = type(pair.compiled.steps[CHAIN])
    advance_often = kind.advance_often

    def often(self: Any, *arguments: Any) -> list[StepResult]:
        results: list[StepResult] = advance_often(self, *arguments)
        counts.append(len(results))
        return results

    monkeypatch.setattr(kind, "advance_often", often)
    return counts


def facts(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    return [
        (
            one.outputs[0].token_ids,
            one.outputs[0].text,
            one.outputs[0].finish_reason,
            one.outputs[0].stop_reason,
            one.metrics.num_steps,
            one.metrics.num_accepted_tokens,
        )
        for one in outputs
    ]


@pytest.mark.default(
    "greedy-off", "greedy-chain-4", "sampled-off", "sampled-chain-4", "stops-off", "stops-chain-4"
)
@pytest.mark.parametrize("plan", PLAN_IDS)
@pytest.mark.parametrize(
    "sampling",
    [{}, SAMPLED, {"stop_token_ids": list(range(0, models.VOCAB, 9)), **SAMPLED}],
    ids=["greedy", "sampled", "stops"],
)
def test_outputs_and_counters(pair: Pair, plan: str, sampling: dict, monkeypatch) -> None:
    """Requests of different lengths, together and alone; some end in the middle of a row."""
    params = [
        SamplingParams(
            max_tokens=count,
            ignore_eos="stop_token_ids" not in sampling,
            **{"temperature": 0, **sampling},
        )
        for count in (30, 17, 23)
    ]
    one_by_one = LLM(pair.compiled, plan=plan, multi_step_ms=0)
    in_a_row = LLM(pair.compiled, plan=plan, multi_step_ms=1000)
    counts = counted(monkeypatch, pair)
    wanted = [facts(one_by_one.generate(PROMPTS, params))]
    wanted += [facts(one_by_one.generate([p], s)) for p, s in zip(PROMPTS, params, strict=True)]
    assert not counts
    # the first steps of a kind are run alone: how long they take is not known
    for _ in range(2):
        assert facts(in_a_row.generate(PROMPTS, params)) == wanted[0]
        for prompt, own, want in zip(PROMPTS, params, wanted[1:], strict=True):
            assert facts(in_a_row.generate([prompt], own)) == want
    assert max(counts) > 1
    assert in_a_row._open.in_flight.num_iterations >= sum(counts)
    scheduler = in_a_row._open.scheduler
    assert scheduler._blocks.num_free == pair.compiled.cache.shape.num_blocks
    assert not scheduler._blocks.left


@pytest.mark.parametrize("plan", ["off", CHAIN])
def test_a_stop_string_in_the_middle(pair: Pair, plan: str, monkeypatch) -> None:
    """What steps after it have brought is dropped, also where others go on."""
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    one_by_one = LLM(pair.compiled, plan=plan, multi_step_ms=0)
    in_a_row = LLM(pair.compiled, plan=plan, multi_step_ms=1000)
    texts = [one.outputs[0].text for one in one_by_one.generate(PROMPTS, plain)]
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[text[i : i + 2]])
        for i, text in zip((5, 9, 14), texts, strict=True)
    ]
    wanted = facts(one_by_one.generate(PROMPTS, params))
    assert {fact[2] for fact in wanted} == {"stop"}
    counts = counted(monkeypatch, pair)
    for _ in range(2):
        assert facts(in_a_row.generate(PROMPTS, params)) == wanted
    assert max(counts) > 3
    assert in_a_row._open.scheduler._blocks.num_free == pair.compiled.cache.shape.num_blocks


def core_of(pair: Pair, plan: str) -> EngineCore:
    return EngineCore(pair.compiled, plan, shares_prefixes=False, multi_step_s=1.0)


def begun(core: EngineCore, *options: dict[str, Any]) -> list[Any]:
    """Requests that have their first token."""
    requests = [
        core.requests.make(
            [1, 2, 3 + i], SamplingParams(ignore_eos=True, **{"temperature": 0, **option})
        )
        for i, option in enumerate(options)
    ]
    for request in requests:
        core.scheduler.add(request)
    while not all(request.has_output for request in requests):
        assert core.advance()
    return requests


@pytest.mark.parametrize("plan", ["off", CHAIN])
def test_how_many_follow_each_other(pair: Pair, plan: str) -> None:
    """Up to the step in which a request may end by its length; blocks for all are taken."""
    core = core_of(pair, plan)
    short, long = begun(core, {"max_tokens": 12}, {"max_tokens": 60})
    batch = core.scheduler.schedule()
    per_step = pair.compiled.plans[plan].max_depth + 1
    most = -(-short.num_tokens_left // per_step)
    assert core.scheduler.steps_in_a_row(batch, 1) == 1
    assert core.scheduler.steps_in_a_row(batch, 2) == 2
    assert core.scheduler.steps_in_a_row(batch, 50) == most
    for request in (short, long):
        rows = len(request.blocks) * core.engine.cache.shape.rows_per_block
        reached = pair.compiled.plans[plan].num_reached_rows
        assert rows >= request.cache_len + (most - 1) * per_step + reached
        core.scheduler.abort(request)


@pytest.mark.parametrize("why", ["waits", "deadline", "prompt", "policy", "part"])
def test_who_has_a_say_in_each_step(pair: Pair, why: str) -> None:
    core = core_of(pair, "off")
    option = {"max_tokens": 40}
    (request,) = begun(core, option)
    scheduler = core.scheduler
    batch = scheduler.schedule()
    assert scheduler.steps_in_a_row(batch, 8) == 8
    other = core.requests.make([5, 6], SamplingParams(temperature=0, max_tokens=3))
    if why == "waits":
        scheduler.add(other)
    elif why == "deadline":
        scheduler._has_deadlines = True
    elif why == "prompt":
        scheduler.add(other)
        batch = scheduler.schedule()
        assert batch.prefill
        assert not scheduler.waiting
    elif why == "policy":

        class Needs(type(scheduler.policy)):
            needs_results = True

        scheduler.use(Needs("off"))
    else:
        other.blocks = []
        scheduler.running.append(other)
    assert scheduler.steps_in_a_row(batch, 8) == 1
    for one in (request, other):
        scheduler.abort(one)


def test_pace() -> None:
    pace = StepPace(0.02)
    core: Any = type("Plan", (), {"name": "off"})
    batch = Batch(groups=[type("Group", (), {"plan": core, "requests": [0]})()])
    assert pace.most(batch) == 1
    for seconds, steps, most in ((0.004, 1, 5), (0.02, 5, 5), (0.05, 1, 1), (0.0001, 1, 8)):
        pace.took(batch, seconds, steps)
        assert pace.most(batch) == most
    assert StepPace(0.0).most(batch) == 1


@pytest.mark.parametrize("ask", [{"logprobs": 2}, {"allowed_token_ids": [1, 2, 3, 4, 5]}])
def test_requests_that_are_looked_at_in_each_step(pair: Pair, ask: dict, monkeypatch) -> None:
    counts = counted(monkeypatch, pair)
    llm = LLM(pair.compiled, plan=CHAIN, multi_step_ms=1000)
    for _ in range(2):
        llm.generate(
            [[1, 2, 3]], SamplingParams(max_tokens=12, ignore_eos=True, **{"temperature": 0, **ask})
        )
    assert not counts


def test_seconds_since_the_iteration_before(pair: Pair) -> None:
    """What a policy is told of the host: see `RunResult.wall_s`."""

    class Watching(FixedPolicy):
        def __init__(self) -> None:
            super().__init__(OFF.name)
            self.seen: list[tuple[bool, float, float]] = []

        def observe_batch(self, batch: Batch, result: RunResult) -> None:
            timed_s = sum(sum(step.stage_s.values()) for step in result.steps)
            self.seen.append((bool(batch.prefill), result.wall_s, timed_s + result.prefill_s))

    policy = Watching()
    llm = LLM(pair.compiled, policy=policy, multi_step_ms=1000)
    begin_s = time.perf_counter()
    for _ in range(2):
        llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    took_s = time.perf_counter() - begin_s
    first, *others = policy.seen
    assert first[:2] == (True, 0.0)
    # a generation ends, and what comes before the next one is nobody's
    again = [i for i, (is_prompt, *_) in enumerate(others) if is_prompt]
    assert len(again) == 1
    assert others[again[0]][1] == 0.0
    steps = [(wall, timed) for is_prompt, wall, timed in others if not is_prompt]
    assert all(wall > 0 for wall, _ in steps)
    # steps in a row share their seconds; together all took as long as their stages, or longer
    shared = [len(list(own)) for _, own in itertools.groupby(wall for wall, _ in steps)]
    assert max(shared) > 1
    assert sum(timed for _, timed in steps) <= sum(wall for wall, _ in steps) <= took_s
