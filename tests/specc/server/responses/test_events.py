"""Streams of responses: the API's order of events, and one result whatever the steps bring."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.runtime.outputs.logprobs import Logprob
from specc.runtime.service.service import Update
from specc.server.errors import ApiError
from specc.server.protocol import ChatRequest, parse
from specc.server.responses import answer as answers
from specc.server.responses.store import ResponseStore
from tests.specc.server.responses.rig import (
    ID,
    PLAIN,
    TOOLS,
    answer_of,
    check_events,
    events_of,
    output_of,
    streamed,
    take,
    updates_of,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "g", "arguments": {"y": [1, '
TEXT = f"<think>\nHm <b>\n</think>\n\nI ask. {CALL}\nAnd: {CALL.replace('f', 'g', 1)}Done 🙂 <"
KINDS = ["reasoning", "message", "function_call", "message", "function_call", "message"]


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers.time, "time", lambda: 1.0)


def score(token: int) -> dict[int, Logprob]:
    return {token: Logprob(-token / 7, 2), token + 1: Logprob(-0.5, 1)}


def whole(text: str, reason: str = "stop", body: Any = None, **more: Any) -> dict[str, Any]:
    config = {"config": more.pop("config")} if "config" in more else {}
    updates = updates_of(text, [len(text) + 1], reason, **more)
    return answer_of(body or {}, **config).whole([output_of(updates)])


def test_a_text_becomes_items_in_its_order() -> None:
    response = whole(TEXT)
    assert [item["type"] for item in response["output"]] == KINDS
    thinking, first, call, second, other, last = response["output"]
    assert thinking["content"] == [{"type": "reasoning_text", "text": "\nHm <b>\n"}]
    texts = [item["content"][0]["text"] for item in (first, second, last)]
    assert texts == ["\n\nI ask. ", "\nAnd: ", "Done 🙂 <"]
    assert [call["name"], other["name"]] == ["f", "g"]
    assert json.loads(call["arguments"]) == {"x": "é"}
    assert call["call_id"] != other["call_id"]
    assert {item["status"] for item in response["output"][1:]} == {"completed"}
    assert len({item["id"] for item in response["output"]}) == len(KINDS)
    usage = response["usage"]
    assert usage["output_tokens"] == len(TEXT) + 1
    assert usage["output_tokens_details"] == {"reasoning_tokens": len("\nHm <b>\n")}
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize(
    "text",
    [TEXT, f"a{CUT}", f"{CALL}\n", "", "<think>a", "plain", f"<think>a</think>{CALL}b{CALL}"],
)
def test_every_number_of_tokens_a_step_gives_the_same_response(text: str, reason: str) -> None:
    if reason == "length" and not text:
        return
    want = json.dumps(whole(text, reason))
    for size in range(1, 9):
        found = check_events(streamed(answer_of({}), updates_of(text, [size], reason)))
        assert json.dumps(found) == want, size


PARTS = st.sampled_from(
    [CALL, CUT, "<think>", "</think>", "<tool_call>", "</tool_call>", "{", " ", "\n", "é🙂", "a<"]
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(PARTS, max_size=6).map("".join),
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.sampled_from(["stop", "length"]),
)
def test_every_split_gives_the_same_response(text: str, sizes: list[int], reason: str) -> None:
    text = text or "a"
    found = check_events(streamed(answer_of({}), updates_of(text, sizes, reason)))
    assert json.dumps(found) == json.dumps(whole(text, reason))


@settings(max_examples=30, deadline=None)
@given(st.text("ab é🙂", min_size=1), st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_log_probabilities_are_those_of_the_text(text: str, sizes: list[int]) -> None:
    """None is of the token that ends it, and deltas have each once."""
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "tools": []}
    answer = answer_of(body, PLAIN)
    found = check_events(streamed(answer, updates_of(text, sizes, logprobs=score)))
    (item,) = found["output"]
    scores = item["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in scores] == [-(ord(c) % 250) / 7 for c in text]
    assert {len(entry["top_logprobs"]) for entry in scores} == {1}
    assert json.dumps(found) == json.dumps(whole(text, body=body, config=PLAIN, logprobs=score))


def test_tokens_without_text_are_told_at_the_end() -> None:
    """Such as a part of a character that the limit has cut off."""
    body = {"include": ["message.output_text.logprobs"], "tools": []}
    last = Update([5], "", [score(5)], "length")
    first = Update([97], "a", [score(97)])
    found = check_events(streamed(answer_of(body, PLAIN), [first, last]))
    (part,) = found["output"][0]["content"]
    assert [entry["logprob"] for entry in part["logprobs"]] == [-97 / 7, -5 / 7]


def test_what_is_cut_says_so() -> None:
    response = whole(f"a{CUT}", "length")
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["arguments"] == '{"y": [1, '
    response = whole("ab", "length")
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    # all of a call, and the end of the tokens with it
    response = whole(CALL, "length")
    assert (response["status"], response["incomplete_details"]) == ("completed", None)


def test_functions_of_namespaces_are_told_by_both_names() -> None:
    """The model knows one name; and a function of the same name without one is another."""
    space = {"type": "namespace", "name": "n", "tools": TOOLS}
    calls = CALL + CALL.replace('"f"', '"n__f"')
    response = whole(calls, body={"tools": [*TOOLS, space]})
    names = [(item.get("namespace"), item["name"]) for item in response["output"]]
    assert names == [(None, "f"), ("n", "f")]
    assert response["tools"][2]["tools"][1]["name"] == "g"
    events = streamed(answer_of({"tools": [*TOOLS, space]}), updates_of(calls, [3]))
    assert json.dumps(check_events(events)) == json.dumps(response)


def test_thinking_that_is_not_shown_counts() -> None:
    response = whole("<think>abc</think>d", body={"include_reasoning": False})
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3


def writer_after(text: str, store: ResponseStore) -> tuple[Any, Any, str, list[str]]:
    """A writer that has written this, its outputs, what it wrote, and a note if it cancels."""
    cancelled: list[str] = []
    output, answer = output_of(), answer_of({}, store=store)
    wanted = parse(ChatRequest, {"messages": [{"role": "user"}]})
    writer = answer.writer(wanted, lambda: cancelled.append("yes"))
    written = writer.begin([output])
    update = updates_of(text, [len(text)], "length")[0]
    update = type(update)(update.token_ids, text)
    take(output, update)
    return writer, [output], (written + writer.write([output], 0, update)).decode(), cancelled


def test_a_failure_is_told_by_the_response() -> None:
    store = ResponseStore(8, 1 << 20)
    writer, outputs, written, _ = writer_after("ab", store)
    written += writer.fail(outputs, ApiError(500, "Sorry.")).decode()
    final = check_events(events_of(written))
    assert final["status"] == "failed"
    assert final["error"] == {"code": "server_error", "message": "Sorry."}
    assert final["output"][0]["status"] == "incomplete"
    kept = store.get(b"me", ID)
    assert kept is not None
    assert json.loads(kept.response) == final


def test_a_response_that_is_too_large_to_keep_says_so() -> None:
    store = ResponseStore(8, 1500)
    response = answer_of({}, store=store).whole([output_of(updates_of("a", [2]))])
    assert response["store"] is False
    assert store.get(b"me", ID) is None


def test_a_cancelled_response_ends_with_what_it_has() -> None:
    store = ResponseStore(8, 1 << 20)
    writer, outputs, written, cancelled = writer_after("ab", store)
    response = writer.cancel()
    assert writer.cancel() == response
    assert cancelled == ["yes"]
    # what the engine had made meanwhile is not told, and the end of its stream is no failure
    late = updates_of("c", [1], "length")[0]
    assert writer.write(outputs, 0, late) == b""
    written += writer.fail(outputs, ApiError(503, "It stops.")).decode()
    final = check_events(events_of(written))
    assert final == response
    assert (final["status"], final["output"][0]["content"][0]["text"]) == ("cancelled", "ab")
    assert final["usage"]["output_tokens"] == 2
