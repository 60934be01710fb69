"""What callers of one server learn of each other: nothing, where they have keys of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.server.config import ServeConfig
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime.conftest import build_engine
from tests.specc.server.serving import Server, serve

PROMPT = "the same beginning of two prompts"
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_spec_metrics": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(api_keys=("one", "two")) as running:
        yield running


def as_caller(server: Server, key: str, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    answer = server.post("/v1/completions", BODY | body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def test_nobody_is_told_what_others_have_sent(server: Server) -> None:
    """Whether a guess was in the cache, or in an output, would tell that it is right."""
    as_caller(server, "one")
    answer = as_caller(server, "two", prompt=PROMPT + " and more").json()
    assert answer["usage"]["prompt_tokens_details"] is None
    assert answer["usage"]["prompt_tokens"] == len(PROMPT + " and more")
    assert "metrics" not in answer
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = as_caller(server, "two", stream=True, stream_options=options).text
    assert stream.count('"prompt_tokens_details":null') == stream.count('"usage"') > 1
    assert "speculative_decoding" not in stream
    assert "cached_tokens" not in stream
    # it was in the cache all the same
    assert server.service.state().stats.num_cached_tokens > 0


def test_whom_it_is_told() -> None:
    """With one key, or none, there is nobody else."""
    for keys, wanted, tells in (
        ((), None, True), (("a",), None, True), (("a", "a"), None, True), (("a", "b"), None, False),
        (("a", "b"), True, True), ((), False, False), (("a",), False, False),
    ):  # fmt: skip
        config = ServeConfig(api_keys=keys, enable_prompt_tokens_details=wanted)
        assert config.tells_cached_tokens is tells
        assert config.tells_acceptance is (len(set(keys)) < 2)
        config = ServeConfig(api_keys=keys, enable_spec_metrics=wanted)
        assert config.tells_acceptance is tells


def test_it_can_be_told() -> None:
    keys = {"api_keys": ("one", "two")}
    with serve(**keys, enable_prompt_tokens_details=True, enable_spec_metrics=True) as server:
        as_caller(server, "one")
        answer = as_caller(server, "two").json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("shares", [True, False])
def test_options_that_end_sharing(shares: bool) -> None:
    """As steps and requests see it: what one caller has sent or got is nothing to another."""
    suffix = SpecPlan.from_widths((1, 1, 1), ("suffix",))
    engine = build_engine(plans=[suffix, OFF])
    with LLM(engine, suffix.name, enable_prefix_caching=shares, shares_outputs=shares) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        prompt = [*range(3, 23)]
        first, again = (llm.generate([prompt], params)[0] for _ in range(2))
        (own, other) = (found.outputs[0] for found in (first, again))
        assert own.token_ids == other.token_ids
        stats = llm.get_metrics()
        assert (stats.num_cached_tokens > 0) is shares
        assert (again.metrics.num_spec_steps < first.metrics.num_spec_steps) is shares
