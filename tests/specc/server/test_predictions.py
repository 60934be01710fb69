"""Predictions and salts over HTTP, as OpenAI's and vLLM's clients send them."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from specc.percentile import percentile
from specc.server import predictions
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime.conftest import EOS, build_engine
from tests.specc.server.serving import MODEL, Server, assert_error, serve

SUFFIX = SpecPlan.from_widths((1,) * 4, ("suffix",))
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "abc"}]
COUNT = 24
GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = build_engine(plans=[SUFFIX, OFF], eos=(EOS,))
    with serve(engine, plan="off") as running:
        yield running


def chat(server: Server, **more: Any) -> dict[str, Any]:
    answer = server.post(CHATS, {"messages": USER} | GREEDY | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def content(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_usage_tells_what_was_predicted(server: Server) -> None:
    plain = chat(server)
    assert "completion_tokens_details" not in plain["usage"]
    text = content(plain)
    for predicted, accepted, rejected in ((text, COUNT, 0), (text[4:] + "zz", None, None)):
        answer = chat(server, prediction={"type": "content", "content": predicted})
        assert content(answer) == text
        details = answer["usage"]["completion_tokens_details"]
        if accepted is None:
            accepted = details["accepted_prediction_tokens"]
            assert 0 < accepted < COUNT
            rejected = len(predicted) - accepted
        assert details == {
            "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected,
        }  # fmt: skip


def test_openais_client_and_its_stream(server: Server) -> None:
    text = content(chat(server))
    given = {"type": "content", "content": [{"type": "text", "text": text}]}
    ask = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": COUNT,
           "prediction": given, "extra_body": {"ignore_eos": True}}  # fmt: skip
    whole = server.client.chat.completions.create(**ask)
    details = whole.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (COUNT, 0)
    chunks = list(
        server.client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens == COUNT


def test_choices_are_counted_together(server: Server) -> None:
    answer = chat(server, n=2, prediction={"type": "content", "content": content(chat(server))})
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 2 * COUNT


def test_figures_of_the_engine(server: Server) -> None:
    def figures() -> tuple[float, float]:
        server.wait_until_published()
        total = server.get("/stats").json()["total"]
        text = server.get("/metrics").text
        for name in ("prediction_draft_tokens", "prediction_accepted_tokens"):
            (line,) = [x for x in text.splitlines() if x.startswith(f"specc:{name}_total")]
            assert float(line.split()[-1]) == total[name]
            assert f"vllm:{name}" not in text
        return total["prediction_draft_tokens"], total["prediction_accepted_tokens"]

    drafted, accepted = figures()
    text = content(chat(server))
    assert figures() == (drafted, accepted)
    chat(server, prediction={"type": "content", "content": text})
    more = figures()
    # the first token is the prompt's, and a step of five brings four of them
    assert more == (drafted + 18, accepted + 18)


@pytest.mark.parametrize(
    ("prediction", "words"),
    [
        ("abc", None), ({"type": "x", "content": "a"}, "type"), ({"type": "content"}, "type"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "no text"),
        ({"type": "content", "content": "a" * 97}, "97 tokens"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_blamed(server: Server, prediction: Any, words: str | None) -> None:
    body = {"messages": USER, "prediction": prediction} | GREEDY
    answer = server.post(CHATS, body)
    if words is None:
        # a text alone is taken for one
        assert answer.status_code == 200
    else:
        assert_error(answer, 400, words, param="prediction")


def test_an_engine_without_steps_for_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    predictions._say.cache_clear()
    with serve() as server, caplog.at_level(logging.WARNING, "specc.serve"):
        text = content(chat(server))
        for _ in range(2):
            answer = chat(server, prediction={"type": "content", "content": text})
            assert content(answer) == text
            assert "completion_tokens_details" not in answer["usage"]
    (said,) = [x.getMessage() for x in caplog.records if "prediction" in x.getMessage()]
    assert "--draft suffix" in said


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_salts_part_callers(path: str) -> None:
    """A request sees what it would see alone, whatever others with other salts have sent."""
    body = {"prompt": "abcdefghijklmno"} if path == COMPLETIONS else {
        "messages": [{"role": "user", "content": "abcdefghijklmno"}]
    }  # fmt: skip
    body |= GREEDY | {"return_spec_metrics": True}

    def ask(server: Server, **more: Any) -> dict[str, Any]:
        answer = server.post(path, body | more).json()
        return {"usage": answer["usage"], "metrics": answer["metrics"]}

    engine = build_engine(plans=[OFF, SUFFIX], eos=(EOS,))
    with serve(engine, plan=SUFFIX.name) as server:
        alone = ask(server, cache_salt="one")
        assert ask(server, cache_salt="two") == ask(server) == alone
        again = ask(server, cache_salt="two")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again["metrics"] != alone["metrics"]
        error = assert_error(server.post(path, body | {"cache_salt": ""}), 400)
        assert error["param"] == "cache_salt"


@pytest.mark.slow
def test_a_salt_costs_no_time(record_testsuite_property: Any) -> None:
    """By turns, so that a busy machine costs all the same; nobody finds a prefix."""
    dice = random.Random(0)
    kinds: dict[str, Any] = {"none": None, "one": "a", "each": ""}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with serve(build_engine(plans=[SUFFIX, OFF], eos=(EOS,)), plan="off") as server:
        for index in range(300):
            for kind, salt in dice.sample(sorted(kinds.items()), len(kinds)):
                body = GREEDY | {"prompt": [dice.randrange(EOS) for _ in range(16)]}
                body |= {} if salt is None else {"cache_salt": salt or str(index)}
                begin_s = time.perf_counter()
                server.complete(**body)
                seconds[kind].append(time.perf_counter() - begin_s)
        assert server.service.state().stats.num_cached_tokens == 0
    for percent in (50, 99):
        found = {kind: percentile(values, percent) or 0.0 for kind, values in seconds.items()}
        record_testsuite_property(f"p{percent}_s", found)
        if percent == 50:
            assert max(found.values()) < 1.1 * min(found.values())


def test_usage_of_a_prediction_tells_nothing_of_others() -> None:
    """It follows from output and prediction, whoever else has drafted."""
    engine = build_engine(plans=[OFF, SUFFIX], eos=(EOS,))
    with serve(engine, plan=SUFFIX.name, api_keys=("one", "two")) as server:
        headers = {"authorization": "Bearer one"}

        def ask(**more: Any) -> Any:
            return server.post(CHATS, {"messages": USER} | GREEDY | more, headers=headers).json()

        text = content(ask(cache_salt="other"))
        given = {"type": "content", "content": text[3:12] + text[:9]}
        first = ask(prediction=given)["usage"]
        # now the whole output is in the history, and longer matches than the prediction's
        headers["authorization"] = "Bearer two"
        assert json.dumps(ask(prediction=given)["usage"]) == json.dumps(first)
