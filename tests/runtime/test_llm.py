"""The API that users call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.errors import RequestError
from specc.runtime.llm import LLM
from specc.runtime.policies.base import Policy
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats

PLANS = ("off", "chain-4", "tree-3-2-1")


@pytest.fixture(scope="session")
def llms(make_engine) -> dict[str, LLM]:
    """One LLM a plan; tests leave them without requests."""
    return {plan: LLM(make_engine(), plan=plan) for plan in PLANS}


@pytest.fixture
def llm(llms) -> LLM:
    return llms["tree-3-2-1"]


def is_idle(llm: LLM) -> bool:
    allocator = llm.engine.cache.allocator
    return not llm._scheduler.has_work and allocator.num_free == allocator.num_blocks


@pytest.mark.default("tree-3-2-1")
@pytest.mark.parametrize("plan", PLANS)
def test_generate(llms, prompts, greedy, plan: str) -> None:
    llm = llms[plan]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    assert [output.outputs[0].token_ids for output in outputs] == [greedy(p, 20) for p in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        assert output.finished
        assert output.prompt is None
        assert output.prompt_token_ids == prompt
        assert completion.index == 0
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert len({output.request_id for output in outputs}) == len(outputs)
    assert is_idle(llm)


def test_params_of_each_prompt(llm) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, speculative=n != 4) for n in (3, 4, 5)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 4, 5]
    assert [output.metrics.num_spec_steps > 0 for output in outputs] == [True, False, True]
    shown = llm.generate({"prompt_token_ids": [0, 1], "prompt": "shown"}, params[0])
    assert [shown[0].prompt, outputs[0].prompt, llm.generate([])] == ["shown", "a", []]


def test_bos_is_put_before_text_once(make_engine) -> None:
    engine = make_engine()
    engine.add_bos, engine.bos_token_id = True, 7
    llm = LLM(engine)
    one = SamplingParams(temperature=0, max_tokens=1)
    outputs = llm.generate(["ab", "", "hb", [0]], one)
    assert [output.prompt_token_ids for output in outputs] == [[7, 0, 1], [7], [7, 1], [0]]


@pytest.mark.parametrize(
    ("prompts", "params", "found"),
    [
        pytest.param("", None, "prompt 0 has no tokens", id="empty-text"),
        pytest.param([[]], None, "prompt 0 has no tokens", id="no-ids"),
        pytest.param(["a", [1] * 96], None, "prompt 1 has 96 tokens", id="too-long"),
        pytest.param([[1, 61]], None, "prompt 0 holds token id 61", id="id-too-large"),
        pytest.param([[1, -1]], None, "prompt 0 holds token id -1", id="id-negative"),
        pytest.param(
            ["a", "b"],
            [SamplingParams(temperature=0)],
            "2 prompts and 1 SamplingParams",
            id="params",
        ),
        pytest.param(["a", 3.5], None, "prompt 1 of type float", id="type"),
        pytest.param([[1, "a"]], None, "prompt 0 of type list", id="mixed-ids"),
        pytest.param([{"text": "a"}], None, "prompt 0, a dict with text", id="dict"),
    ],
)
def test_a_bad_request_stops_all_before_any_work(llm, prompts, params, found) -> None:
    before = llm.get_metrics()
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=found) as caught:
            call(prompts, params)
        assert caught.value.needed
        assert caught.value.do
    assert llm.get_metrics() == before
    assert is_idle(llm)


def test_longest_prompt(llm, greedy) -> None:
    prompt = [1] * 95
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=9))
    assert output.outputs[0].token_ids == greedy(prompt, 1)
    assert output.outputs[0].finish_reason == "length"


def test_unknown_plan_names_the_plans(make_engine) -> None:
    with pytest.raises(RequestError, match="off, chain-4, tree-3-2-1"):
        LLM(make_engine(), plan="chain-9")


def test_without_tokenizer(make_engine, greedy) -> None:
    engine = make_engine()
    engine.tokenizer = None
    llm = LLM(engine)
    (output,) = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=4))
    assert output.outputs[0].token_ids == greedy([1, 2], 4)
    assert output.outputs[0].text == ""
    with pytest.raises(RequestError, match="is text"):
        llm.generate("a")
    with pytest.raises(RequestError, match="without a tokenizer"):
        llm.generate([[1]], SamplingParams(temperature=0, stop="a"))


def test_eos_ends_where_the_target_says_it(make_engine, prompts, greedy) -> None:
    """Some token in the middle of the output is made EOS, at any place in a step."""
    for position in range(2, 12):
        eos = greedy(prompts[1], 20)[position]
        want = greedy(prompts[1], 20)
        want = want[: want.index(eos) + 1]
        llm = LLM(make_engine(eos=(eos,), noise=0.0), plan="chain-4")
        (output,) = llm.generate([prompts[1]], SamplingParams(temperature=0, max_tokens=20))
        assert output.outputs[0].token_ids == want
        assert output.outputs[0].text == llm.tokenizer.decode(want[:-1])
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
        stats = output.metrics
        assert stats.num_output_tokens == len(want)
        assert stats.acceptance_rate == 1.0
        assert stats.num_output_tokens == 1 + stats.num_steps * stats.mean_acceptance_length


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 22), st.integers(1, 4)), max_size=2),
    st.lists(st.integers(0, 60), max_size=2),
    st.integers(1, 24),
    st.booleans(),
)
def test_every_plan_ends_like_plain_decoding(
    llms, prompts, greedy, index, cuts, stop_ids, max_tokens, include
) -> None:
    """Stop strings are cut out of the text to come, so they span tokens and hit often."""
    text = llms["off"].tokenizer.decode(greedy(prompts[index], 24))
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        stop=[stop for begin, size in cuts if (stop := text[begin : begin + size])],
        stop_token_ids=stop_ids,
        include_stop_str_in_output=include,
    )
    completions = []
    for llm in llms.values():
        (output,) = llm.generate([prompts[index]], params)
        completions.append(output.outputs[0])
        events = list(llm.stream([prompts[index]], params))
        assert "".join(event.text for event in events) == output.outputs[0].text
        assert [event.token_id for event in events] == output.outputs[0].token_ids
        assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1].finish_reason == output.outputs[0].finish_reason
        assert is_idle(llm)
    assert completions[0] == completions[1] == completions[2]
    if completions[0].finish_reason == "stop" and completions[0].stop_reason in params.stop:
        if include:
            assert completions[0].text.endswith(completions[0].stop_reason)
        else:
            assert not any(stop in completions[0].text for stop in params.stop)


def test_streams_name_their_prompts(llm, prompts, greedy) -> None:
    tokens: dict[int, list[int]] = {}
    metrics: list[SpecStats] = []
    for event in llm.stream(prompts, SamplingParams(temperature=0, max_tokens=9)):
        tokens.setdefault(event.index, []).append(event.token_id)
        if event.finished:
            assert event.metrics is not None
            metrics.append(event.metrics)
    assert [tokens[i] for i in range(len(prompts))] == [greedy(p, 9) for p in prompts]
    assert len(metrics) == len(prompts)
    assert all(stats.num_requests == 1 for stats in metrics)


def test_streams_and_generate_may_overlap(llm, prompts, greedy) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    first, second = llm.stream(prompts[1], params), llm.stream([prompts[2], prompts[4]], params)
    tokens: dict[tuple[str, int], list[int]] = {
        ("first", 0): [],
        ("second", 0): [],
        ("second", 1): [],
    }
    tokens["first", 0].append(next(first).token_id)
    event = next(second)
    tokens["second", event.index].append(event.token_id)
    (output,) = llm.generate([prompts[3]], params)
    assert output.outputs[0].token_ids == greedy(prompts[3], 12)
    for name, stream in (("second", second), ("first", first)):
        for event in stream:
            tokens[name, event.index].append(event.token_id)
    assert tokens["first", 0] == greedy(prompts[1], 12)
    assert tokens["second", 0] == greedy(prompts[2], 12)
    assert tokens["second", 1] == greedy(prompts[4], 12)


def test_a_stream_that_others_finish_loses_nothing(llm, prompts, greedy) -> None:
    """Both requests end while the consumer holds an event of the second."""
    stream = llm.stream(prompts[1:3], SamplingParams(temperature=0, max_tokens=6))
    events = []
    while not events or events[-1].index == 0:
        events.append(next(stream))
    llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=40))
    events += stream
    for index in (0, 1):
        tokens = [event.token_id for event in events if event.index == index]
        assert tokens == greedy(prompts[1 + index], 6)


def test_a_closed_stream_gives_its_blocks_back(llm, prompts) -> None:
    stream = llm.stream(prompts, SamplingParams(temperature=0, max_tokens=20))
    next(stream)
    assert not is_idle(llm)
    stream.close()
    assert is_idle(llm)
    llm.stream(prompts)  # never started: nothing to give back
    assert is_idle(llm)


def test_a_failed_pass_leaves_the_engine_usable(
    llm, prompts, greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(batch: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "run", fail)
        with pytest.raises(MemoryError):
            llm.generate(prompts)
    assert is_idle(llm)
    (output,) = llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=5))
    assert output.outputs[0].token_ids == greedy(prompts[0], 5)


def test_metrics(make_engine, prompts) -> None:
    llm = LLM(make_engine())
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    engine = llm.get_metrics()
    total = SpecStats()
    for output in outputs:
        total.merge(output.metrics)
    for name in (
        "num_requests", "num_prompt_tokens", "num_output_tokens", "num_steps", "num_spec_steps",
        "num_draft_tokens", "num_accepted_tokens", "num_trimmed_tokens", "accepted_at_depth",
    ):  # fmt: skip
        assert getattr(total, name) == getattr(engine, name), name
    assert engine.num_requests == len(prompts)
    assert engine.num_output_tokens == 20 * len(prompts)
    assert engine.num_step_passes < total.num_step_passes  # shared by a batch
    assert engine.elapsed_s > engine.prefill_s + engine.draft_s + engine.verify_s
    assert 1 < engine.mean_acceptance_length <= 4
    stats = outputs[0].metrics
    assert stats.num_steps == stats.num_step_passes
    assert stats.time_to_first_token > 0
    assert stats.tokens_per_s == pytest.approx(20 / stats.elapsed_s)
    engine.num_requests = 0
    assert llm.get_metrics().num_requests == len(prompts)


def test_seconds_at_work_hold_the_last_wait_and_what_fails(
    llm, prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elapsed_behind(name: str, work: Callable[[], object]) -> float:
        def slow() -> bool:
            time.sleep(0.1)
            return bool(work())

        stream = llm.stream(prompts[0], SamplingParams(temperature=0, max_tokens=20))
        next(stream)
        before = llm.get_metrics().elapsed_s
        with monkeypatch.context() as patch:
            patch.setattr(llm._in_flight, name, slow)
            with contextlib.suppress(MemoryError):
                next(stream) if name == "advance" else stream.close()
        stream.close()
        return llm.get_metrics().elapsed_s - before

    def fail() -> None:
        raise MemoryError

    assert elapsed_behind("settle", llm._in_flight.settle) >= 0.1
    assert elapsed_behind("advance", fail) >= 0.1
    assert is_idle(llm)


def test_progress(llm, prompts) -> None:
    calls: list[tuple[int, int, int]] = []
    report: Callable[[int, int, int], None] = lambda *args: calls.append(args)  # noqa: E731
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6), progress=report)
    assert calls[-1] == (len(prompts), len(prompts), 6 * len(prompts))
    assert calls == sorted(calls)


class OffThenOn(Policy):
    """Plain for a while, as a policy that distrusts its draft at first."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def choose(self, num_running: int, stats: SpecStats) -> str:
        self.seen.append(num_running)
        return "off" if stats.num_steps < 10 else "chain-4"


def test_a_policy_of_the_caller(make_engine, prompts, greedy) -> None:
    policy = OffThenOn()
    llm = LLM(make_engine(noise=0.0), policy=policy)
    outputs = llm.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=21))
    assert [o.outputs[0].token_ids for o in outputs] == [greedy(p, 21) for p in prompts[:2]]
    stats = llm.get_metrics()
    assert stats.num_steps - stats.num_spec_steps == 10
    assert stats.acceptance_rate == 1.0
    assert policy.seen[0] == 0
    assert max(policy.seen) == 2
