"""Salts: of what a caller of one salt leaves behind, a caller of another finds nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from specc.drafters.registry import drafter_of
from specc.errors import RequestError
from specc.runtime.async_llm import AsyncLLM
from specc.runtime.backends.step_io import StepResult
from specc.runtime.drafters.host_drafts import HostDrafts
from specc.runtime.llm import LLM
from specc.runtime.requests.salt import BySalt, Salt
from specc.runtime.scheduling.block_pool import BlockPool
from specc.runtime.scheduling.prefix_cache import PrefixCache
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime.conftest import build_engine

SUFFIX = SpecPlan.from_widths((1,) * 3, ("suffix",))
MERGE = SpecPlan.from_widths((1,) * 3, ("draft_0", "suffix"), "merge")
VOTE = SpecPlan.from_widths((1, 1, 1), ("draft_0", "draft_1", "lookup-2"), "vote")
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = [*range(3, 23)]


def salted(salt: str | None) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPT} | ({} if salt is None else {"cache_salt": salt})


def counters(stats: SpecStats) -> dict[str, Any]:
    return {k: v for k, v in vars(stats).items() if not k.endswith("_s")}


def make(tokens: list[int], salt: str | None, name: str = "0") -> Request:
    params = SamplingParams(temperature=0, max_tokens=64)
    return Request(name, tokens, params, max_seq_len=256, salt=Salt.of(salt))


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        (None, None, True), ("a", "a", True), ("a", "b", False), (None, "a", False),
        ("a", None, False), ("a", "A", False), ("é", "e\u0301", False),
    ],
)  # fmt: skip
def test_who_shares(first: str | None, second: str | None, shares: bool) -> None:
    """Rows of the prompt, proposals of the history, and so every figure of the request."""
    engine = build_engine(plans=[OFF, SUFFIX])
    with LLM(engine, SUFFIX.name) as llm:
        alone = llm.generate([salted(first)], PARAMS)[0]
        then = llm.generate([salted(second)], PARAMS)[0]
    assert then.outputs[0].token_ids == alone.outputs[0].token_ids
    assert (then.metrics.num_cached_tokens > 0) is shares
    assert (then.metrics.num_accepted_tokens > alone.metrics.num_accepted_tokens) is shares
    if not shares:
        # as on an engine that nobody has used before
        assert counters(then.metrics) == counters(alone.metrics)


@pytest.mark.parametrize("plan", [SUFFIX, MERGE], ids=["suffix", "merge"])
def test_figures_of_a_salt_are_those_of_an_engine_of_its_own(plan: SpecPlan) -> None:
    """Whoever else has asked the same before, or asks it at the same time."""
    others = [salted("a"), salted("b"), salted(None), *[[*range(i, i + 20)] for i in range(4)]]
    with LLM(build_engine(plans=[OFF, plan]), plan.name) as llm:
        alone = counters(llm.generate([salted("c")], PARAMS)[0].metrics)
    # how a prompt is cut depends on how many run
    alone.pop("num_prefill_passes")
    with LLM(build_engine(plans=[OFF, plan]), plan.name) as llm:
        for _ in range(2):
            llm.generate(others, PARAMS)
        *_, beside = llm.generate([*others[:2], salted("c")], PARAMS)
        assert alone.items() <= counters(beside.metrics).items()
        again = llm.generate([salted("c")], PARAMS)[0].metrics
    assert again.num_cached_tokens > 0
    assert again.num_accepted_tokens > alone["num_accepted_tokens"]


def test_without_a_salt_nothing_need_be_shared() -> None:
    """Equal salts share all the same."""
    engine = build_engine(plans=[OFF, SUFFIX])
    with LLM(engine, SUFFIX.name, shares_unsalted=False) as llm:
        alone = llm.generate([salted(None)], PARAMS)[0].metrics
        then = llm.generate([salted(None)], PARAMS)[0].metrics
        assert counters(then) == counters(alone)
        assert llm.generate([salted("a")], PARAMS)[0].metrics.num_cached_tokens == 0
        assert llm.generate([salted("a")], PARAMS)[0].metrics.num_cached_tokens > 0
        # outputs of one prompt are one caller's
        several = SamplingParams(temperature=0.7, n=2, seed=1, max_tokens=4)
        found = llm.generate([salted(None)], several)[0].metrics
        assert found.num_cached_tokens > 0


def test_keys_of_blocks_differ_by_salt_and_adapter() -> None:
    """No two of them are one, though each is tokens of some other one."""
    keys = set()
    cache = PrefixCache(BlockPool(8), 4)
    for salt in (None, "a", "b"):
        for adapter in (None, 0, 1):
            request = make([*range(10)], salt)
            request.adapter = adapter
            keys.add(cache.key_of(request, 4))
    assert len(keys) == 9


def test_the_history_of_a_salt() -> None:
    host = HostDrafts({SUFFIX.name: SUFFIX, "off": OFF})
    suffix = drafter_of("suffix")
    ended = make([1], "a")
    ended.append([6, 7, 8])
    host.finish(ended)
    for salt, found in (("a", ([8], 2)), ("b", ([], 0)), (None, ([], 0))):
        assert host.propose(make([9, 6, 7], salt, "1"), 3, suffix) == found
        given = host.inputs(SUFFIX, [make([9, 6, 7], salt, "1")])["proposals"]
        assert given.tolist() == [[*found[0], *[-1] * (3 - len(found[0]))]]


def test_votes_are_counted_by_salt() -> None:
    """Whose votes weigh more is what callers of one salt have seen, in whatever batch."""
    plans = {VOTE.name: VOTE, "off": OFF}
    mixed, alone = HostDrafts(plans), HostDrafts(plans)
    dice = random.Random(0)
    for _ in range(70):
        requests = [make([5, 6, 5], salt, str(i)) for i, salt in enumerate(("a", "b", None, "a"))]
        extra = mixed.inputs(VOTE, requests)
        own = [requests[0], requests[3]]
        weights = alone.inputs(VOTE, own)["vote_weights"]
        assert extra["vote_weights"][[0, 3]].tolist() == weights.tolist()
        accepted = [dice.randint(0, 3), 3, 0, dice.randint(0, 3)]
        output = [[6, 5, 6, 5][: n + 1] for n in accepted]
        mixed.observe(VOTE, requests, extra, StepResult(accepted, output, [0] * 4, {}, {}))
        mine = StepResult(accepted[::3], output[::3], [0] * 2, {}, {})
        alone.observe(VOTE, own, {"vote_weights": weights}, mine)
    others = mixed.inputs(VOTE, requests)["vote_weights"]
    assert others[1].tolist() != others[2].tolist()


def test_salts_are_bounded() -> None:
    """Callers choose them."""
    made: list[Salt | None] = []

    def begin(salt: Salt | None) -> list[int]:
        made.append(salt)
        return []

    kept = BySalt(begin, 3)
    kept.of(None).append(1)
    first = kept.of(Salt.of("0"))
    for i in range(1, 5):
        kept.of(Salt.of(str(i)))
        assert kept.of(Salt.of("0")) is first
    assert len(kept) == 3
    assert len(made) == 6
    assert kept.of(None) == [1]
    # what no other request has is kept for none
    assert kept.of(Salt.alone()) == []
    assert len(kept) == 3


@pytest.mark.parametrize("salt", ["", 5, ["a"], "a" * 1025])
def test_what_is_no_salt(salt: Any) -> None:
    with LLM(build_engine(plans=[OFF])) as llm, pytest.raises(RequestError, match="cache_salt"):
        llm.generate([{"prompt_token_ids": PROMPT, "cache_salt": salt}], PARAMS)


def test_async_requests_have_salts_and_predictions_too() -> None:
    async def run() -> list[Any]:
        found = []
        async with AsyncLLM(build_engine(plans=[SUFFIX, OFF])) as llm:
            for salt, prediction in (("a", None), ("b", None), ("a", want)):
                async for output in llm.generate(salted(salt), PARAMS, prediction=prediction):
                    last = output
                found.append(last)
        return found

    want = build_engine(plans=[OFF]).target.greedy(PROMPT, 24)
    first, second, third = asyncio.run(run())
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == want
    assert [x.metrics.num_cached_tokens > 0 for x in (first, second, third)] == [
        False, False, True,
    ]  # fmt: skip
    assert third.metrics.accepted_prediction_tokens == 24
