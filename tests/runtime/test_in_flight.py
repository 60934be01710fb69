"""Steps that are queued ahead of the results change nothing but the time that it takes."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import RequestOutput, StreamOutput
from specc.sampling.params import SamplingParams
from tests.runtime.in_flight_rig import (
    PLANS,
    PROMPTS,
    ByLoad,
    counters,
    counting_rig,
    whole_outputs,
)
from tests.runtime.late_engine import Rig
from tests.tiers import every

SEEDS = [
    pytest.param(range(5), id="few"),
    pytest.param(range(5, 60), id="many", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def rig(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with counting_rig(tiny_models, tmp_path_factory.mktemp("engines") / "overlap") as made:
        yield made


def described(output: RequestOutput) -> dict[str, Any]:
    (completion,) = output.outputs
    return dataclasses.asdict(completion) | counters(output.metrics)


@pytest.fixture(scope="module")
def references(rig: Rig) -> list[tuple[list[int], str]]:
    return whole_outputs(rig)


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
            temperature=0,
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


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(3, PLANS, 1))
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


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "num_llms"), list(itertools.product(PLANS, (1, 2))))
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
    (output,) = llm.generate(
        [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    )
    depth = rig.engine.plans[plan].max_depth
    stats = output.metrics
    assert stats.num_steps - 2 - depth <= rig.num_ahead < stats.num_steps
    assert rig.num_ahead > 0
    assert rig.num_dropped == 0
    assert rig.is_idle(llm)


def test_a_stream_yields_while_the_next_step_runs(rig) -> None:
    llm = rig.llm("chain-3")
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
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
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=40))
    end = tokens.index(tokens[12]) + 1
    assert output.outputs[0].token_ids == tokens[:end]
    assert rig.num_dropped == 1
    assert llm.get_metrics().num_step_passes == end - 1
    assert rig.is_idle(llm)


@pytest.mark.parametrize("num_read", [1, 2, 7])
def test_a_closed_stream_leaves_nothing_in_flight(rig, references, num_read) -> None:
    llm = rig.llm("tree-2-1")
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    for _ in range(num_read):
        next(stream)
    stream.close()
    assert rig.is_idle(llm)
    (output,) = llm.generate(
        [PROMPTS[2]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    )
    assert output.outputs[0].token_ids == references[2][0][:9]


def test_blocks_of_a_closed_stream_stay_taken_while_a_step_uses_them(rig, references) -> None:
    """Another stream runs in the same step; it frees what the closed one held when it goes on."""
    llm = rig.llm("chain-3")
    allocator = rig.engine.cache.allocator
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
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
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    first = llm.stream(PROMPTS[0], params)
    while rig.device.num_waiting == 0:
        next(first)
    ahead = rig.num_ahead
    (output,) = llm.generate(
        [PROMPTS[1]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    )
    assert output.outputs[0].token_ids == references[1][0][:4]
    assert rig.num_ahead >= ahead
    first.close()
    assert rig.is_idle(llm)


def test_two_llms_take_turns_on_one_engine(rig, references) -> None:
    """A step in flight is another LLM's business no less: the device holds the state of one."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
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


@pytest.mark.parametrize("needs_results", [True, False])
def test_a_policy_says_whether_it_needs_results(rig, references, needs_results) -> None:
    """Plans change as requests end, and drafts catch up."""
    policy: Any = ByLoad()
    policy.needs_results = needs_results
    llm = LLM(rig.engine, policy=policy)
    rig.num_ahead = 0
    lengths = (9, 30)
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths
    ]
    outputs = llm.generate(PROMPTS[:2], params)
    for output, (tokens, _), length in zip(outputs, references, lengths, strict=False):
        assert output.outputs[0].token_ids == tokens[:length]
    stats = llm.get_metrics()
    assert 0 < stats.num_spec_steps < stats.num_steps
    assert (rig.num_ahead > 0) == (needs_results is False)


def test_a_hook_sees_every_step(rig) -> None:
    llm = rig.llm("chain-3")
    step = rig.engine.steps["chain-3"]
    seen = []
    rig.num_ahead = 0
    step.before_accept = lambda values: seen.append(values["tokens"].tolist())
    try:
        (output,) = llm.generate(
            [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
        )
    finally:
        step.before_accept = None
    assert len(seen) == output.metrics.num_spec_steps
    assert rig.num_ahead == 0


@pytest.mark.parametrize("plan", ["off", "chain-3"])
def test_the_first_of_a_batch_ends_while_others_are_queued_ahead(rig, references, plan) -> None:
    """Rows of those that are left move up: the step after it is not one of the same requests."""
    llm = rig.llm(plan)
    rig.num_ahead = 0
    lengths = (6, 30, 30)
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths
    ]
    outputs = llm.generate(PROMPTS[:3], params)
    for output, (tokens, _), length in zip(outputs, references, lengths, strict=False):
        assert output.outputs[0].token_ids == tokens[:length]
    assert rig.num_ahead > 5
