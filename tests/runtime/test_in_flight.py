"""Steps that are queued ahead of the results change nothing but the time that it takes."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from specc.config import CompileConfig
from specc.errors import RequestError
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.step_buffers import HostResults, StepBuffers
from specc.runtime.in_flight import InFlight
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import RequestOutput, StreamOutput
from specc.runtime.policies.base import Policy
from specc.runtime.scheduling.batch import Batch, RunResult
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import SpecPlan
from tests.runtime.late_engine import Rig, late_rig

PLANS = ("off", "chain-3", "tree-2-1")
PROMPTS = [[5, 6, 7, 8], [40, 41], [9] * 7, list(range(60, 83)), [200]]
MAX_SEQ_LEN = 64
SEEDS = [
    pytest.param(range(5), id="few"),
    pytest.param(range(5, 60), id="many", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def rig(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    path = tmp_path_factory.mktemp("engines") / "overlap"
    plans = tuple(SpecPlan.from_widths(widths) for widths in ((2, 1), (1, 1, 1)))
    config = CompileConfig(
        plans=plans, max_seq_len=MAX_SEQ_LEN, max_batch_size=3, block_size=4, backend="cuda"
    )
    with late_rig(tiny_models, path, config) as made, pytest.MonkeyPatch.context() as patch:
        hold, postprocess = InFlight._hold, Scheduler.postprocess

        def counted(loop: InFlight, *queued: Any) -> None:
            made.num_ahead += len(loop.queued)
            hold(loop, *queued)

        def watched(scheduler: Scheduler, batch: Batch, result: RunResult) -> None:
            requests = [s for group in batch.groups for s in group.requests]
            made.num_dropped += sum(s not in scheduler.running for s in requests)
            postprocess(scheduler, batch, result)

        patch.setattr(InFlight, "_hold", counted)
        patch.setattr(Scheduler, "postprocess", watched)
        yield made


COUNTERS = (
    "num_requests", "num_prompt_tokens", "num_output_tokens", "num_steps", "num_spec_steps",
    "num_draft_tokens", "num_accepted_tokens", "num_trimmed_tokens", "accepted_at_depth",
    "num_prefill_passes", "num_step_passes", "num_first_tokens",
)  # fmt: skip


def counters(stats: SpecStats | None) -> dict[str, Any]:
    assert stats is not None
    return {name: getattr(stats, name) for name in COUNTERS}


def described(output: RequestOutput) -> dict[str, Any]:
    (completion,) = output.outputs
    return dataclasses.asdict(completion) | counters(output.metrics)


@pytest.fixture(scope="module")
def references(rig: Rig) -> list[tuple[list[int], str]]:
    """Tokens and text of each prompt, as long as it can be: stops are chosen from them."""
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    outputs = rig.llm("off", overlaps=False).generate(PROMPTS, params)
    return [(list(output.outputs[0].token_ids), output.outputs[0].text) for output in outputs]


@dataclass(frozen=True)
class Ending:
    """A prompt, and how it ends: by length, at a token of the reference, or in its text."""

    prompt: int
    max_tokens: int
    end: str
    position: int
    speculative: bool

    def params(self, references: list[tuple[list[int], str]]) -> SamplingParams:
        tokens, text = references[self.prompt]
        place = self.position % max(len(text) - 2, 1)
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=self.end != "eos",
            stop_token_ids=[tokens[self.position % len(tokens)]] if self.end == "token" else [],
            stop=text[place : place + 2] if self.end == "text" else (),
            speculative=self.speculative,
        )

    @classmethod
    def draw(cls, dice: random.Random) -> Ending:
        return cls(
            prompt=dice.randrange(len(PROMPTS)),
            max_tokens=dice.choice([1, 3, 9, 14, 20, 33, 1000, 1000, 1000]),
            end=dice.choice(["length", "eos", "token", "text"]),
            position=dice.randrange(3, 40),
            speculative=dice.random() < 0.8,
        )


def draw_eos(dice: random.Random, references: list[tuple[list[int], str]]) -> frozenset[int]:
    """A token that an output holds."""
    return frozenset({references[dice.randrange(len(PROMPTS))][0][dice.randrange(3, 30)]})


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("seeds", SEEDS)
def test_generate_is_the_same_with_and_without(rig, references, plan, seeds) -> None:
    """Tokens, texts, reasons and counters; requests that wait for a slot may join a step later."""
    rig.num_ahead = rig.num_dropped = 0
    for seed in seeds:
        dice = random.Random(seed)
        requests = [Ending.draw(dice) for _ in range(dice.randint(1, 5))]
        rig.engine.eos_token_ids = draw_eos(dice, references)
        prompts = [PROMPTS[request.prompt] for request in requests]
        params = [request.params(references) for request in requests]
        found = {}
        for overlaps in (False, True):
            llm = rig.llm(plan, overlaps=overlaps)
            outputs = llm.generate(prompts, params)
            engine = counters(llm.get_metrics())
            if len(requests) > rig.engine.cache.shape.max_num_seqs:
                del engine["num_prefill_passes"], engine["num_step_passes"]
            found[overlaps] = [described(output) for output in outputs], engine
            assert rig.is_idle(llm)
        assert found[True] == found[False], seed
    assert rig.num_ahead > 5 * len(seeds)
    assert rig.num_dropped > 0


def play(rig: Rig, llms: list[LLM], references: list[tuple[list[int], str]], seed: int) -> Any:
    """Streams of several LLMs, read in turns, closed and overtaken by other requests.

    Returns:
        what each yields, and the counters of each that ends.
    """
    dice = random.Random(seed)
    rig.engine.eos_token_ids = draw_eos(dice, references)
    requests = [Ending.draw(dice) for _ in range(dice.randint(1, 3))]
    streams = [dice.choice(llms).stream(PROMPTS[r.prompt], r.params(references)) for r in requests]
    seen: list[list[StreamOutput]] = [[] for _ in streams]
    outputs = []
    for _ in range(dice.randint(8, 24)):
        index = dice.randrange(len(streams))
        action = dice.choice(["read"] * 10 + ["close", "generate"])
        if action == "read":
            seen[index] += itertools.islice(streams[index], dice.randint(1, 5))
        elif action == "close":
            streams[index].close()
        elif sum(stream.gi_frame is not None for stream in streams) < 3:
            request = Ending.draw(dice)
            (output,) = dice.choice(llms).generate(
                [PROMPTS[request.prompt]], request.params(references)
            )
            outputs.append(described(output))
    for index, stream in enumerate(streams):
        seen[index] += stream
    assert all(rig.is_idle(llm) for llm in llms)
    events = [
        (event.index, event.token_id, event.text, event.finish_reason, event.stop_reason)
        for event in itertools.chain(*seen)
    ]
    ends = [counters(event.metrics) for event in itertools.chain(*seen) if event.finished]
    return outputs, [len(events) for events in seen], events, ends


@pytest.mark.parametrize(
    ("plan", "num_llms"),
    [
        pytest.param(plan, num, marks=[pytest.mark.slow] if (i + num) % 2 else [])
        for i, plan in enumerate(PLANS, start=1)
        for num in (1, 2)
    ],
)
@pytest.mark.parametrize("seeds", SEEDS)
def test_streams_are_the_same_with_and_without(rig, references, plan, num_llms, seeds) -> None:
    """Requests that come and go at any time, also those of two LLMs on one engine."""
    rig.num_ahead = rig.num_dropped = 0
    for seed in seeds:
        found = [
            play(rig, [rig.llm(plan, overlaps=o) for _ in range(num_llms)], references, seed)
            for o in (False, True)
        ]
        assert found[0] == found[1], seed
    assert rig.num_ahead > 5 * len(seeds)
    assert rig.num_dropped > 0


@pytest.mark.parametrize("plan", PLANS)
def test_every_step_but_the_ends_is_queued_ahead(rig, plan) -> None:
    """The first step waits for prefill; a step that may be the last has none after it."""
    llm = rig.llm(plan)
    rig.num_ahead = rig.num_dropped = 0
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=24, ignore_eos=True))
    depth = rig.engine.plans[plan].max_depth
    stats = output.metrics
    assert stats.num_steps - 2 - depth <= rig.num_ahead < stats.num_steps
    assert rig.num_ahead > 0
    assert rig.num_dropped == 0
    assert rig.is_idle(llm)


def test_a_stream_yields_while_the_next_step_runs(rig) -> None:
    llm = rig.llm("chain-3")
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True))
    waiting = [rig.device.num_waiting for _ in stream]
    # a step and the copy of its results
    assert set(waiting) == {0, 2}
    assert waiting.count(2) > waiting.count(0)


def test_a_step_ahead_of_an_end_is_waited_for_and_not_counted(rig, references) -> None:
    """EOS in the middle: the one that asked gets the blocks back and the counters of before."""
    tokens, _ = references[0]
    rig.engine.eos_token_ids = frozenset({tokens[12]})
    rig.num_dropped = 0
    llm = rig.llm("off")
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=40))
    end = tokens.index(tokens[12]) + 1
    assert output.outputs[0].token_ids == tokens[:end]
    assert rig.num_dropped == 1
    assert llm.get_metrics().num_step_passes == end - 1
    assert rig.is_idle(llm)


@pytest.mark.parametrize("num_read", [1, 2, 7])
def test_a_closed_stream_leaves_nothing_in_flight(rig, references, num_read) -> None:
    llm = rig.llm("tree-2-1")
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(num_read):
        next(stream)
    stream.close()
    assert rig.is_idle(llm)
    (output,) = llm.generate([PROMPTS[2]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert output.outputs[0].token_ids == references[2][0][:9]


def test_blocks_of_a_closed_stream_stay_taken_while_a_step_uses_them(rig, references) -> None:
    """Another stream runs in the same step; it frees what the closed one held when it goes on."""
    llm = rig.llm("chain-3")
    allocator = rig.engine.cache.allocator
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    first, second = llm.stream(PROMPTS[0], params), llm.stream(PROMPTS[1], params)
    tokens = [next(first).token_id, next(second).token_id]
    assert tokens == [references[0][0][0], references[1][0][0]]
    while rig.device.num_waiting == 0:
        next(first)
    free = allocator.num_free
    first.close()
    assert allocator.num_free == free
    assert rig.device.num_waiting == 2
    rest = [next(second).token_id]
    while allocator.num_free == free:
        rest.append(next(second).token_id)
    rest += [event.token_id for event in second]
    assert tokens[1:] + rest == references[1][0][:30]
    assert rig.is_idle(llm)


def test_a_request_that_arrives_joins_after_the_step_in_flight(rig, references) -> None:
    llm = rig.llm("chain-3")
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    first = llm.stream(PROMPTS[0], params)
    while rig.device.num_waiting == 0:
        next(first)
    ahead = rig.num_ahead
    (output,) = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert output.outputs[0].token_ids == references[1][0][:4]
    assert rig.num_ahead >= ahead
    first.close()
    assert rig.is_idle(llm)


def test_an_interrupt_of_the_wait_loses_nothing_of_others(rig, references, monkeypatch) -> None:
    llm = rig.llm("chain-3")
    params = SamplingParams(max_tokens=30, ignore_eos=True)
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


def fail_once(
    patch: pytest.MonkeyPatch, owner: type, name: str, *, skip: int, is_done: bool
) -> None:
    """Interrupt the call after `skip` others: before its work, or when that is done."""
    original, calls = getattr(owner, name), itertools.count()

    def interrupted(*args: Any) -> Any:
        is_due = next(calls) == skip
        if is_due and not is_done:
            raise KeyboardInterrupt
        result = original(*args)
        if is_due:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, name, interrupted)


def test_a_failed_append_loses_nothing_of_others(rig, references, monkeypatch) -> None:
    """The results of two steps are due, and those of the first are taken from nobody."""
    llm = rig.llm("chain-3")
    params = SamplingParams(max_tokens=30, ignore_eos=True)
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
    params = SamplingParams(max_tokens=30, ignore_eos=True)
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
    params = SamplingParams(max_tokens=30, ignore_eos=True)
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
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    return {
        plan: [counters(o.metrics) for o in rig.llm(plan).generate(PROMPTS[:3], params)]
        for plan in PLANS
    }


# each two of place, plan and calls that go well before are in one of the default tier's cases
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


@pytest.mark.parametrize(("place", "plan", "skip"), INTERRUPTS)
def test_an_interrupt_anywhere_loses_nothing_of_others(
    rig, references, undisturbed, monkeypatch, place, plan, skip
) -> None:
    """A caller that waits for a slot moves three others on, and is interrupted.

    Counters of the three say that each step and its drafts were those of an undisturbed run.
    """
    owner, name, is_done = place
    params = SamplingParams(max_tokens=30, ignore_eos=True)
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


@pytest.mark.parametrize(
    ("name", "is_done"),
    [
        pytest.param("append", True, id="tokens-without-rows"),
        pytest.param("_event", False, id="token-without-event"),
        pytest.param("_close", False, id="end-without-close"),
    ],
)
def test_a_request_caught_between_two_tokens_is_told(
    rig, references, monkeypatch, name, is_done
) -> None:
    """It can neither go on nor step back: an error for its caller, and nothing for others."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
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


def test_two_llms_take_turns_on_one_engine(rig, references) -> None:
    """A step in flight is another LLM's business no less: the device holds the state of one."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    llms = [rig.llm("chain-3"), rig.llm("chain-3")]
    streams = [llm.stream(PROMPTS[i], params) for i, llm in enumerate(llms)]
    tokens: list[list[int]] = [[], []]
    rig.num_ahead = 0
    for turn in range(12):
        # results of one are read when several steps of the other were queued after them
        events = itertools.islice(streams[turn % 2], 6)
        tokens[turn % 2] += [event.token_id for event in events]
    assert tokens == [references[0][0][:30], references[1][0][:30]]
    assert rig.num_ahead > 5
    assert all(rig.is_idle(llm) for llm in llms)


class ByLoad(Policy):
    """Chains for few, plain decoding for many; `needs_results` as the test says."""

    needs_results = True

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return "chain-3" if num_running < 2 else "off"


@pytest.mark.parametrize("needs_results", [True, False])
def test_a_policy_says_whether_it_needs_results(rig, references, needs_results) -> None:
    """Plans change as requests end, and drafts catch up."""
    policy: Any = ByLoad()
    policy.needs_results = needs_results
    llm = LLM(rig.engine, policy=policy)
    rig.num_ahead = 0
    lengths = (9, 30)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate(PROMPTS[:2], params)
    for output, (tokens, _), length in zip(outputs, references, lengths, strict=False):
        assert output.outputs[0].token_ids == tokens[:length]
    stats = llm.get_metrics()
    assert 0 < stats.num_spec_steps < stats.num_steps
    assert (rig.num_ahead > 0) == (needs_results is False)


def test_drafts_catch_up_again_after_an_interrupt(rig, references, monkeypatch) -> None:
    """Plans change from off to a chain; a catch-up whose step is given up is repeated."""
    policy: Any = ByLoad()
    policy.needs_results = False
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (9, 30)]
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


def test_a_hook_sees_every_step(rig) -> None:
    llm = rig.llm("chain-3")
    step = rig.engine.steps["chain-3"]
    seen = []
    rig.num_ahead = 0
    step.before_accept = lambda values: seen.append(values["tokens"].tolist())
    try:
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=15, ignore_eos=True))
    finally:
        step.before_accept = None
    assert len(seen) == output.metrics.num_spec_steps
    assert rig.num_ahead == 0
