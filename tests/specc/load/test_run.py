"""Loads through clients: one with known times, and a tiny engine in this process."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from specc.errors import ConfigError, FaultError, RequestError
from specc.load import run as load_run
from specc.load.arrivals import Arrivals
from specc.load.decisions import DecisionTrace
from specc.load.lengths import LengthDistribution
from specc.load.request import LoadRequest, Workload
from specc.load.run import ClientLimits, Reply, difference, run_load
from specc.load.subject import EngineSubject, ServiceClient
from specc.runtime.core import EngineCore
from specc.runtime.llm import LLM
from specc.runtime.service.service import Service
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from tests.runtime.conftest import EOS, build_engine


class _Skipping(selectors.DefaultSelector):
    """Does not wait for timers."""

    skip: Callable[[float], None]

    def select(self, timeout=None):
        if timeout:
            self.skip(timeout)
        return super().select(timeout and 0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its clock goes on to the next timer at once: times are exact, on a busy machine, too."""

    def __init__(self) -> None:
        selector = _Skipping()
        super().__init__(selector)
        self.now_s = 0.0
        selector.skip = self.skip

    def skip(self, seconds: float) -> None:
        self.now_s += seconds

    def time(self) -> float:
        return self.now_s


def about(seconds: float) -> Any:
    """Timers are due a tick of the clock early, or late."""
    return pytest.approx(seconds, abs=1e-4)


class FakeClient:
    """Answers after known times, and takes down how many requests are open.

    Args:
        fails: request → what it ends with.
    """

    def __init__(self, times=((0.02, 1), (0.05, 2)), fails=None) -> None:
        self.times, self.fails = times, fails or {}
        self.open = self.most = self.num_cancelled = 0
        self.order: list[int] = []
        self.counts = [None, None]

    async def send(self, request, on_tokens):
        self.order.append(request.index)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            begin = asyncio.get_running_loop().time()
            for seconds, count in self.times:
                await asyncio.sleep(begin + seconds - asyncio.get_running_loop().time())
                on_tokens(count)
            end = self.fails.get(request.index, "length")
            if isinstance(end, Exception):
                raise end
            return Reply(end, 7, queue_s=0.001)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.open -= 1

    async def counters(self):
        return self.counts.pop(0)


def load(*times: float, tokens: int = 3) -> list[LoadRequest]:
    return [LoadRequest(i, time, [1, 2], 2, tokens) for i, time in enumerate(times)]


def serve(requests, client, **limits):
    loop = SkippingLoop()
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
        patch.setattr(load_run, "time", SimpleNamespace(perf_counter=loop.time))
        return runner.run(run_load(requests, client, ClientLimits(**limits)))


def serve_with_threads(requests, client, **limits):
    return asyncio.run(run_load(requests, client, ClientLimits(**limits)))


def test_requests_go_out_when_they_are_due_and_are_timed_from_then_on():
    client = FakeClient()
    run = serve(load(0.0, 0.1, 0.3), client)
    assert [one.start_s for one in run.results] == [0.0, 0.1, 0.3]
    for one in run.results:
        assert one.error is None
        assert (one.ttft_s, one.latency_s, one.late_s) == (about(0.02), about(0.05), about(0.0))
        assert [chunk.num_tokens for chunk in one.chunks] == [1, 2]
        assert (one.num_prompt_tokens, one.num_output_tokens) == (7, 3)
        assert one.end_s == one.chunks[-1].time_s
    assert run.duration_s == max(one.end_s for one in run.results)
    assert run.duration_s == about(0.35)


def test_a_late_client_counts_as_latency():
    """A loop that is busy when a request is due does not make the server look fast."""

    class Blocking(FakeClient):
        async def send(self, request, on_tokens):
            if request.index == 0:
                asyncio.get_running_loop().skip(0.2)
            return await super().send(request, on_tokens)

    run = serve(load(0.0, 0.05), Blocking())
    assert run.results[1].start_s == 0.05
    assert run.results[1].late_s == about(0.15)
    assert run.results[1].ttft_s == about(0.15 + 0.02)


def test_places_are_given_in_order_and_waits_are_timed_from_the_place_on():
    client = FakeClient(((0.03, 1),))
    run = serve(load(*[0.0] * 6), client, max_concurrency=2)
    assert client.most == 2
    assert client.order == list(range(6))
    starts = [one.start_s for one in run.results]
    assert starts[:2] == [0.0, 0.0]
    assert starts[2:] == [about(seconds) for seconds in (0.03, 0.03, 0.06, 0.06)]
    assert [one.latency_s for one in run.results] == [about(0.03)] * 6


def test_failures_of_all_kinds_are_counted():
    client = FakeClient(
        fails={
            0: FaultError("the engine failed", "a step", "wait"),
            1: ConnectionResetError(104, "reset"),
            2: "abort",
            3: "stop",
        }
    )
    run = serve(load(0.0, 0.0, 0.0, 0.0, 0.0), client)
    errors = [one.error for one in run.results]
    assert errors == ["the engine failed", "reset", "ended by abort", None, None]
    silent = serve(load(0.0), FakeClient(times=()))
    assert silent.results[0].error == "no output"
    assert not silent.results[0].is_ok


def test_a_timeout_ends_the_request_there_too():
    client = FakeClient(((0.01, 1), (9.0, 1)))
    run = serve(load(0.0, 0.0), client, timeout_s=0.1)
    assert [one.error for one in run.results] == ["timeout", "timeout"]
    assert client.num_cancelled == 2
    assert run.duration_s == about(0.1)
    assert not run.results[0].is_ok


def test_what_a_client_does_not_expect_is_no_result():
    with pytest.raises(ExceptionGroup) as caught:
        serve(load(0.0, 5.0), FakeClient(fails={0: KeyError("bug")}))
    assert isinstance(caught.value.exceptions[0], KeyError)


def test_counters_of_a_server_are_those_of_the_load():
    client = FakeClient()
    client.counts = [
        SpecStats(num_spec_steps=5, num_draft_tokens=9, num_accepted_tokens=4),
        SpecStats(
            num_spec_steps=8, num_draft_tokens=15, num_accepted_tokens=6, accepted_at_depth=[2, 1]
        ),
    ]
    stats = serve(load(0.0), client).stats
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 6, 2)
    assert stats.accepted_at_depth == [2, 1]
    before = SpecStats(accepted_at_depth=[3])
    assert difference(SpecStats(accepted_at_depth=[5, 2]), before).accepted_at_depth == [2, 2]


@pytest.fixture(scope="module")
def engine():
    return build_engine(eos=(EOS,))


@pytest.fixture
def idle(engine):
    yield engine
    pool = engine.cache.allocator
    assert pool.num_free == pool.num_blocks


def small_load(count: int = 6, rate: float = 200.0) -> list[LoadRequest]:
    workload = Workload(
        count,
        LengthDistribution.parse("uniform:4-12", ""),
        LengthDistribution.parse("uniform:3-30", ""),
        ["abcdefghijklmnopqrstuvwxyz"],
        lambda text: [ord(letter) - ord("a") for letter in text],
    )
    return workload.requests(Arrivals(rate))


@pytest.mark.default("goodput")
@pytest.mark.parametrize("policy", ["off", "chain-4", "goodput"])
def test_an_engine_serves_a_load(idle, policy):
    requests = small_load()
    lines: list[dict] = []
    trace = DecisionTrace(lines.append, {"rate": 200})
    subject = EngineSubject(idle, ClientLimits(timeout_s=60), warmup=2)
    subject.check([policy])
    run = subject.run(policy, requests, lambda done, total: None, trace)
    trace.end()
    assert [one.error for one in run.results] == [None] * len(requests)
    for request, one in zip(requests, run.results, strict=True):
        assert one.num_prompt_tokens == len(request.prompt)
        assert one.num_output_tokens == request.num_output_tokens
        assert sum(chunk.num_tokens for chunk in one.chunks) == request.num_output_tokens
        assert all(a.time_s <= b.time_s for a, b in pairwise(one.chunks))
        # of two threads, which a busy machine may keep waiting between their looks at the clock
        assert 0 <= one.queue_s <= one.latency_s + 5
    # those of the warm-up are not among them
    assert run.stats.num_output_tokens == sum(r.num_output_tokens for r in requests)
    assert run.stats.num_requests == len(requests)
    assert (run.stats.num_spec_steps > 0) == (policy != "off") or policy == "goodput"
    if policy == "goodput":
        # all tokens but the first ones of prompts that nobody decoded beside
        total = run.stats.num_output_tokens
        assert total - len(requests) <= sum(line["tokens"] for line in lines) < total
        assert all(line["predicted_s"] > 0 and line["iterations"] > 0 for line in lines)
        # after a trial, a decision may name a request that has ended in it
        assert all(0 < sum(line["plans"].values()) <= len(requests) for line in lines)
        seen = {line["observed_s"] or line["observed_with_prompts_s"] for line in lines}
        assert min(seen) > 0
        assert {line["rate"] for line in lines} == {200}
    else:
        assert lines == []


def test_chunks_hold_what_the_library_generates(idle):
    requests = small_load(3)
    outputs = LLM(idle, plan="chain-4").generate(
        [request.prompt for request in requests],
        [
            SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=0)
            for request in requests
        ],
    )
    core = EngineCore(idle, "chain-4")
    with Service(core) as service:
        run = serve_with_threads(requests, ServiceClient(service))
    for output, one in zip(outputs, run.results, strict=True):
        assert len(output.outputs[0].token_ids) == one.num_output_tokens


def test_an_engine_that_is_too_slow_is_rid_of_its_requests(idle):
    core = EngineCore(idle, "off")
    advance = core.advance

    def slowly() -> bool:
        import time

        time.sleep(0.05)
        return advance()

    core.advance = slowly  # type: ignore[method-assign]
    with Service(core) as service:
        run = serve_with_threads(
            load(0.0, 0.0, 0.0, tokens=40), ServiceClient(service), timeout_s=0.3
        )
        assert service.drain(10)
    assert [one.error for one in run.results] == ["timeout"] * 3
    # what came before is on record
    assert any(one.chunks for one in run.results)


def test_a_request_that_never_fits_is_a_failure_and_the_others_go_on(idle):
    requests = [LoadRequest(0, 0.0, [1] * 500, 500, 4), *load(0.0, 0.0)[1:]]
    with Service(EngineCore(idle, "off")) as service:
        run = serve_with_threads(requests, ServiceClient(service))
    assert "500 tokens" in run.results[0].error
    assert run.results[1].is_ok


def test_a_warm_up_that_fails_ends_the_benchmark(idle):
    subject = EngineSubject(idle, ClientLimits(), warmup=1)
    with pytest.raises(RequestError, match="warm-up"):
        subject.run("off", [LoadRequest(0, 0.0, [1] * 500, 500, 4)], lambda a, b: None, None)


def test_policies_that_an_engine_has_not_got(idle):
    with pytest.raises(RequestError, match="chain-9"):
        EngineSubject(idle, ClientLimits()).check(["off", "chain-9"])


def test_goodput_alone_verifies_adaptively(idle, monkeypatch):
    """Other policies of a sweep do as they do without it, and would refuse it."""
    asked: list[bool] = []

    def recorded(*args: Any, **options: Any) -> EngineCore:
        asked.append(options["adapts_verification"])
        return EngineCore(*args, **options)

    monkeypatch.setattr("specc.load.subject.EngineCore", recorded)
    for adapts in (True, False):
        subject = EngineSubject(idle, ClientLimits(), adapts_verification=adapts)
        subject.check(["off", "chain-4", "goodput"])
        asked.clear()
        for policy in ("off", "chain-4", "goodput"):
            run = subject.run(policy, small_load(2), lambda done, total: None, None)
            assert [one.error for one in run.results] == [None, None]
        assert asked == [False, False, adapts]


def test_adaptive_verification_is_refused_before_anything_is_served(idle):
    """Without goodput, and of an engine that cannot, whose goodput would refuse it in its turn."""
    subject = EngineSubject(idle, ClientLimits(), adapts_verification=True)
    with pytest.raises(ConfigError, match="--adaptive-verification, and the policies off, chain-4"):
        subject.check(["off", "chain-4"])
    plain = EngineSubject(build_engine(plans=((),)), ClientLimits(), adapts_verification=True)
    with pytest.raises(ConfigError, match="--adaptive-verification, and an engine of the plans"):
        plain.check(["off", "goodput"])
