"""Passes over a tiny pair: outputs never depend on what shares a batch, drafts keep up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specc.runtime.engine import Engine
from specc.runtime.execution.pass_inputs import split_spans
from specc.runtime.policies.base import Policy
from specc.runtime.runner import Runner
from specc.runtime.scheduling.batch import Span
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats

PLANS = ("off", "chain-4", "tree-3-2-1")


@dataclass
class ScriptedPolicy(Policy):
    """Runs through a list of plans, again and again."""

    plans: list[str]
    step: int = -1

    def choose(self, num_running: int, stats: SpecStats) -> str:
        self.step += 1
        return self.plans[self.step % len(self.plans)]


def make_loop(engine: Engine, plans: list[str]) -> tuple[Scheduler, Runner]:
    chunk, limit = engine.prefill_chunk, engine.position_limit
    policy = ScriptedPolicy(plans)
    return (
        Scheduler(engine.cache, engine.plans, policy, chunk, limit),
        Runner(engine.target, engine.drafts, engine.steps, engine.cache, chunk),
    )


def make_request(engine: Engine, prompt: list[int], name: str = "0", **params) -> Request:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 20, **params})
    return Request(name, prompt, sampling, max_seq_len=engine.max_seq_len, num_drafts=1)


def advance(scheduler: Scheduler, runner: Runner) -> None:
    batch = scheduler.schedule()
    scheduler.postprocess(batch, runner.run(batch))


def run_all(engine: Engine, plans: list[str], requests: list[Request]) -> SpecStats:
    scheduler, runner = make_loop(engine, plans)
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        advance(scheduler, runner)
    return scheduler.stats


@dataclass
class Arrival:
    prompt: int
    max_tokens: int
    speculative: bool
    time: int
    abort_time: int


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 6),
        st.integers(1, 20),
        st.sampled_from([True, True, False]),
        st.integers(0, 8),
        st.sampled_from([3, 6, 1000, 1000, 1000]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="session")
def cached_engine(make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """Engines are used again, so caches hold rows of requests before."""
    return cache(make_engine)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ARRIVALS,
    st.lists(st.sampled_from(PLANS), min_size=1, max_size=4),
    st.sampled_from([0, 3, 4]),
    st.integers(1, 3),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_interleaving_yields_what_each_request_yields_alone(
    cached_engine, prompts, greedy, arrivals, plans, block_size, max_num_seqs, chunk, dtype
) -> None:
    engine = cached_engine(
        block_size=block_size, max_num_seqs=max_num_seqs, prefill_chunk=chunk, dtype=dtype
    )
    scheduler, runner = make_loop(engine, plans)
    waiting = [
        (
            arrival,
            make_request(
                engine,
                prompts[arrival.prompt],
                str(i),
                max_tokens=arrival.max_tokens,
                speculative=arrival.speculative,
            ),
        )
        for i, arrival in enumerate(arrivals)
    ]
    clock = 0
    while scheduler.has_work or clock <= 8:
        for arrival, request in waiting:
            if arrival.time == clock:
                scheduler.add(request)
        advance(scheduler, runner)
        for arrival, request in waiting:
            if arrival.abort_time == clock:
                scheduler.abort(request)
        for request in scheduler.running:
            if request.is_prefilled:
                assert len(request.token_ids) == request.cache_len + 1
            assert all(n <= request.cache_len for n in request.draft_lens)
        clock += 1
    for arrival, request in waiting:
        want = greedy(prompts[arrival.prompt], arrival.max_tokens)
        got = request.output_token_ids
        assert got == want[: len(got)]
        assert request.is_finished or arrival.abort_time < 1000
        assert not request.is_finished or got == want
        if not arrival.speculative:
            assert request.stats.num_draft_tokens == 0
    assert engine.cache.allocator.num_free == engine.cache.allocator.num_blocks


@pytest.mark.default("16-catch-up-of-one-token", "16-mixed")
@pytest.mark.parametrize(
    "plans",
    [
        pytest.param(["chain-4"], id="fixed"),
        pytest.param(["off", "off", "off", "off", "chain-4"], id="catch-up-after-off"),
        pytest.param(["off", "chain-4"], id="catch-up-of-one-token"),
        pytest.param(["off", "tree-3-2-1", "chain-4"], id="mixed"),
    ],
)
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_a_draft_equal_to_its_target_is_always_accepted(
    make_engine, prompts, plans: list[str], chunk: int
) -> None:
    """Wrong rows in a draft's cache cost acceptance only: no other test sees them."""
    engine = make_engine(noise=0.0, prefill_chunk=chunk)
    scheduler, runner = make_loop(engine, plans)
    for prompt in prompts:
        scheduler.add(make_request(engine, prompt))
    while scheduler.has_work:
        batch = scheduler.schedule()
        result = runner.run(batch)
        for group, step in zip(batch.groups, result.steps, strict=True):
            assert set(step.num_accepted) == {len(group.plan.widths)}
        scheduler.postprocess(batch, result)
    stats = scheduler.stats
    assert stats.num_spec_steps > 0
    if plans == ["chain-4"]:
        assert stats.acceptance_rate == 1.0
        assert stats.num_output_tokens == len(prompts) * 20


def test_off_never_runs_the_draft(make_engine, prompts) -> None:
    engine = make_engine()
    run_all(engine, ["off"], [make_request(engine, prompt) for prompt in prompts])
    run_all(engine, ["chain-4"], [make_request(engine, p, speculative=False) for p in prompts])
    assert engine.drafts[0].num_tokens == []


def test_prefill_passes_keep_to_the_chunk(make_engine, prompts) -> None:
    engine = make_engine(prefill_chunk=7, max_num_seqs=7)
    stats = run_all(engine, ["off"], [make_request(engine, p, max_tokens=1) for p in prompts])
    num_tokens = sum(len(prompt) for prompt in prompts)
    assert max(engine.target.num_tokens) == 7
    assert sum(engine.target.num_tokens) == num_tokens
    assert len(engine.target.num_tokens) == stats.num_prefill_passes == -(-num_tokens // 7)


@pytest.mark.default("4-tree-3-2-1")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("block_size", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_context_limit(make_engine, greedy, prompts, plan: str, block_size: int) -> None:
    """Decoding up to the last position; a node beyond it would be an IndexError in the models."""
    engine = make_engine(max_seq_len=40, draft_positions=40, block_size=block_size)
    requests = [make_request(engine, prompt, max_tokens=1000) for prompt in prompts]
    run_all(engine, [plan], requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.finish_reason == "length"
        assert len(request.token_ids) == 40
        assert request.output_token_ids == greedy(prompt, 40 - len(prompt))


def test_a_draft_of_a_smaller_context(make_engine, greedy, prompts) -> None:
    engine = make_engine(draft_positions=20, noise=0.0)
    requests = [make_request(engine, prompt, max_tokens=40) for prompt in prompts]
    run_all(engine, ["chain-4"], requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == greedy(prompt, 40)
        assert (request.stats.num_spec_steps > 0) == (len(prompt) + 4 < 20)


def test_split_covers_spans_in_order(make_engine) -> None:
    requests = [make_request(make_engine(), [1], str(i)) for i in range(3)]
    spans = [Span(requests[0], 2, 5), Span(requests[1], 0, 9), Span(requests[2], 3, 4)]
    passes = [
        [(int(s.request.request_id), s.start, s.end) for s in p] for p in split_spans(spans, 4)
    ]
    assert passes == [
        [(0, 2, 5), (1, 0, 1)],
        [(1, 1, 5)],
        [(1, 5, 9)],
        [(2, 3, 4)],
    ]
    assert list(split_spans([], 4)) == []


def test_stage_times_are_reported(make_engine, prompts) -> None:
    engine = make_engine()
    stats = run_all(engine, ["chain-4"], [make_request(engine, prompts[1])])
    assert min(stats.prefill_s, stats.draft_s, stats.verify_s, stats.commit_s) > 0
    assert stats.num_step_passes == stats.num_steps
