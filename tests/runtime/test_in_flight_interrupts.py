"""Interrupts with steps in flight: whatever they cut short, nothing of others is lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from specc.errors import RequestError
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.step_buffers import HostResults, StepBuffers
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import StreamOutput
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from tests.runtime.in_flight_rig import (
    PLANS,
    PROMPTS,
    ByLoad,
    counters,
    counting_rig,
    whole_outputs,
)
from tests.runtime.interrupts import fail_once
from tests.runtime.late_engine import Rig
from tests.tiers import every


@pytest.fixture(scope="module")
def rig(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with counting_rig(tiny_models, tmp_path_factory.mktemp("engines") / "overlap") as made:
        yield made


@pytest.fixture(scope="module")
def references(rig: Rig) -> list[tuple[list[int], str]]:
    return whole_outputs(rig)


@pytest.mark.slow
def test_an_interrupt_of_the_wait_loses_nothing_of_others(rig, references, monkeypatch) -> None:
    llm = rig.llm("chain-3")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    first, second = llm.stream(PROMPTS[0], params), llm.stream(PROMPTS[1], params)
    tokens = [next(second).token_id]
    next(first)
    while rig.device.num_waiting == 0:
        tokens.append(next(second).token_id)

    def interrupt(results: HostResults) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostResults, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(first)
    tokens += [event.token_id for event in second]
    assert tokens == references[1][0][:30]
    assert rig.is_idle(llm)


def test_a_failed_append_loses_nothing_of_others(rig, references, monkeypatch) -> None:
    """The results of two steps are due, and those of the first are taken from nobody."""
    llm = rig.llm("chain-3")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    first, second = llm.stream(PROMPTS[0], params), llm.stream(PROMPTS[1], params)
    tokens = [next(second).token_id]
    next(first)
    while rig.device.num_waiting == 0:
        tokens.append(next(second).token_id)

    def fail(request: Request, *_: object) -> int:
        raise ValueError("detokenizer")

    with monkeypatch.context() as patch:
        patch.setattr(Request, "append", fail)
        with pytest.raises(ValueError, match="detokenizer"):
            list(first)
    tokens += [event.token_id for event in second]
    assert tokens == references[1][0][:30]
    assert rig.is_idle(llm)


def test_an_interrupt_before_postprocess_keeps_batches_in_order(
    rig, references, monkeypatch
) -> None:
    """Results have come and nothing of them is taken; blocks of one that leaves come back."""
    llm = rig.llm("chain-3")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    first, second = llm.stream(PROMPTS[0], params), llm.stream(PROMPTS[1], params)
    tokens = [next(second).token_id]
    next(first)
    while rig.device.num_waiting == 0:
        tokens.append(next(second).token_id)
    with monkeypatch.context() as patch:
        fail_once(patch, Scheduler, "postprocess", skip=0, is_done=False)
        with pytest.raises(KeyboardInterrupt):
            list(first)
    tokens += [event.token_id for event in second]
    assert tokens == references[1][0][:30]
    assert rig.is_idle(llm)


def start_three(rig: Rig, plan: str) -> tuple[LLM, list[Iterator[StreamOutput]], list[list[Any]]]:
    """Three streams with a step in flight, and the events that they have yielded."""
    llm = rig.llm(plan)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    streams = [llm.stream(prompt, params) for prompt in PROMPTS[:3]]
    events = [[next(stream)] for stream in streams]
    while rig.device.num_waiting == 0:
        events[0].append(next(streams[0]))
    return llm, streams, events


PLACES = [
    pytest.param(HostResults, "wait", False, id="waiting"),
    pytest.param(HostResults, "wait", True, id="waited"),
    pytest.param(StepBuffers, "read_results", False, id="replayed"),
    pytest.param(StepBuffers, "read_results", True, id="queued"),
    pytest.param(CapturedStep, "submit_next", True, id="queued-ahead"),
    pytest.param(Scheduler, "schedule_ahead", True, id="scheduled-ahead"),
    pytest.param(Scheduler, "hold", False, id="not-held"),
    pytest.param(Scheduler, "hold", True, id="held"),
    pytest.param(Scheduler, "postprocess", False, id="not-postprocessed"),
    pytest.param(Scheduler, "postprocess", True, id="postprocessed"),
    pytest.param(Request, "append", False, id="not-appended"),
]


@pytest.fixture(scope="module")
def undisturbed(rig) -> dict[str, list[dict[str, Any]]]:
    """Plan → counters of three requests."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    return {
        plan: [counters(o.metrics) for o in rig.llm(plan).generate(PROMPTS[:3], params)]
        for plan in PLANS
    }


# of cases in which each two of place, plan and calls that go well before meet, the default tier
# has one of four
INTERRUPTS = [
    pytest.param(
        place.values, plan, skip,
        id=f"{place.id}-{plan}-{skip}",
        marks=[pytest.mark.slow] if (i + j + skip) % 3 else [],
    )
    for i, place in enumerate(PLACES)
    for j, plan in enumerate(PLANS)
    for skip in range(4)
]  # fmt: skip


@pytest.mark.parametrize(("place", "plan", "skip"), every(4, INTERRUPTS))
def test_an_interrupt_anywhere_loses_nothing_of_others(
    rig, references, undisturbed, monkeypatch, place, plan, skip
) -> None:
    """A caller that waits for a slot moves three others on, and is interrupted.

    Counters of the three say that each step and its drafts were those of an undisturbed run.
    """
    owner, name, is_done = place
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm, streams, events = start_three(rig, plan)
    with monkeypatch.context() as patch:
        fail_once(patch, owner, name, skip=skip, is_done=is_done)
        with pytest.raises(KeyboardInterrupt):
            next(llm.stream(PROMPTS[4], params))
    for seen, stream in zip(events, streams, strict=True):
        seen += stream
    for seen, (tokens, _), stats in zip(events, references, undisturbed[plan], strict=False):
        assert [event.token_id for event in seen] == tokens[:30]
        assert counters(seen[-1].metrics) == stats
    assert rig.is_idle(llm)


@pytest.mark.default("end-without-close")
@pytest.mark.parametrize(
    ("name", "is_done"),
    [
        pytest.param("append", True, id="tokens-without-rows"),
        pytest.param("_event", False, id="token-without-event", marks=pytest.mark.slow),
        pytest.param("_close", False, id="end-without-close"),
    ],
)
def test_a_request_caught_between_two_tokens_is_told(
    rig, references, monkeypatch, name, is_done
) -> None:
    """It can neither go on nor step back: an error for its caller, and nothing for others."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm, streams, events = start_three(rig, "tree-2-1")
    with monkeypatch.context() as patch:
        fail_once(patch, Request, name, skip=1, is_done=is_done)
        with pytest.raises(KeyboardInterrupt):
            # its end frees the slot that this one waits for
            llm.generate([PROMPTS[4]], params)
    lost = {}
    for index, (seen, stream) in enumerate(zip(events, streams, strict=True)):
        try:
            for event in stream:
                seen.append(event)
        except RequestError as error:
            lost[index] = error.found
    (found,) = lost.values()
    assert "interrupted between two of its tokens" in found
    for index, seen in enumerate(events):
        tokens = [event.token_id for event in seen]
        assert tokens == references[index][0][: len(tokens) if index in lost else 30]
    assert rig.is_idle(llm)
    (output,) = llm.generate([PROMPTS[4]], params)
    assert output.outputs[0].token_ids == references[4][0][:30]


@pytest.mark.slow
def test_drafts_catch_up_again_after_an_interrupt(rig, references, monkeypatch) -> None:
    """Plans change from off to a chain; a catch-up whose step is given up is repeated."""
    policy: Any = ByLoad()
    policy.needs_results = False
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (9, 30)
    ]
    whole = LLM(rig.engine, policy=policy).generate(PROMPTS[:2], params)
    num_caught_up = 0
    for skip in range(12):
        llm = LLM(rig.engine, policy=policy)
        stream = llm.stream(PROMPTS[:2], params)
        events = [next(stream)]
        with monkeypatch.context() as patch:
            fail_once(patch, HostResults, "wait", skip=skip, is_done=False)
            with pytest.raises(KeyboardInterrupt):
                all(llm._in_flight.advance() for _ in itertools.count())
        groups = [group for queued in llm._in_flight.queued for group in queued.batch.groups]
        chained = [s for group in groups if group.plan.speculates for s in group.requests]
        num_caught_up += any(s.draft_lens[0] < s.cache_len - 1 for s in chained)
        events += stream
        for index, output in enumerate(whole):
            seen = [event for event in events if event.index == index]
            assert [event.token_id for event in seen] == output.outputs[0].token_ids, skip
            assert counters(seen[-1].metrics) == counters(output.metrics), skip
        assert rig.is_idle(llm)
    assert num_caught_up > 0
