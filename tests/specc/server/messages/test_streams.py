"""A message and its stream are the same, whatever pieces its text comes in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.types import Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specc.runtime.service.service import Update
from specc.sampling.params import SamplingParams
from specc.server.config import ServeConfig
from specc.server.errors import ApiError, to_bytes
from specc.server.generate import Output, OutputJob
from specc.server.message_reader import MessageReader
from specc.server.messages.answer import MessageAnswer
from specc.server.messages.blocks import blocks_of
from specc.server.messages.signature import thinking_in
from specc.server.parsers.events import Text
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.parsers.message import CallDelta
from specc.server.protocol import ChatRequest
from specc.server.tool_counts import ToolCounts
from specc.server.tools import ToolUse
from specc.speculation.metrics import SpecStats
from tests.specc.server.messages.events import check_order, events_of, final_of
from tests.specc.server.parsers.pieces import counted, cut
from tests.specc.server.test_tools import ARGUMENTS, CALL, OTHER, TEXT

HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>so"
    "<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|>"
)
FORMATS = {"hermes": "qwen3", "openai": "openai_gptoss"}
PARTS = [
    "<think>", "</think>", CALL, OTHER, "<tool_call>", "</tool_call>", "a b", " ", "\n\n", "é🙂",
    '{"name": "add", "arguments": {"x": [1, "', HARMONY, "<|end|>", "<|start|>assistant",
]  # fmt: skip


def make(form: str | None, hides: bool = False) -> MessageAnswer:
    config = ServeConfig(
        model_names=("m",), tool_call_parser=form, reasoning_parser=FORMATS.get(form or "")
    )
    wanted = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})
    calls = None
    if form is not None:
        calls = dataclasses.replace(CALL_FORMATS[form], make_id=counted())
    reader = MessageReader(
        config, wanted, "", ToolUse({"add": None, "now": None}, calls), ToolCounts()
    )
    answer = MessageAnswer("m", reader, max_seq_len=100, hides_thinking=hides)
    answer.name("1")
    return answer


def whole(form: str | None, text: str, hides: bool = False, **end: Any) -> dict[str, Any]:
    """Told at once."""
    return make(form, hides).whole([ended(text, **end)])


def ended(text: str = "", reason: str = "stop", stop: str | None = None, count: int = 3) -> Output:
    job = OutputJob(0, [1] * 7, SamplingParams(max_tokens=9))
    stats = SpecStats()
    stats.num_cached_tokens = 5
    return Output(job, text, [], [], reason, stop, stats, count)


def streamed(
    form: str | None, pieces: Sequence[str], hides: bool = False, **end: Any
) -> list[dict[str, Any]]:
    """Told in pieces, the last of which may come with the end of the output."""
    writer = make(form, hides).writer(None, lambda: None)  # type: ignore[arg-type]
    begun = Output(ended().job)
    data = writer.begin([begun])
    outputs = [ended(**end)]
    for at, piece in enumerate(pieces):
        is_last = at == len(pieces) - 1
        data += writer.write(outputs, 0, Update([1], piece, None, "stop" if is_last else None))
    return events_of(data + writer.end(outputs))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["hermes", "openai", None]),
    st.lists(st.sampled_from(PARTS), max_size=6).map("".join),
    st.lists(st.integers(1, 8), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
@example("hermes", TEXT, [1], False, "stop")
@example("hermes", TEXT + "b" + CALL, [200], False, "stop")
@example("openai", HARMONY, [3], True, "stop")
@example("hermes", CALL[:-30], [2], False, "length")
def test_every_split_gives_the_same_message(
    form: str | None, text: str, sizes: list[int], hides: bool, reason: str
) -> None:
    want = whole(form, text, hides, reason=reason)
    assert Message.model_validate(want).to_dict(mode="json") == want
    for pieces in (cut(text, sizes) or [""], [*cut(text, sizes), ""], [text]):
        events = streamed(form, pieces, hides, reason=reason)
        check_order(events)
        final = final_of(events)
        assert json.dumps(final, sort_keys=True) == json.dumps(want, sort_keys=True)


def test_blocks_are_in_the_order_of_the_text() -> None:
    blocks = whole("hermes", f"<think>a</think>b{CALL}c\n{OTHER}")["content"]
    assert [block["type"] for block in blocks] == [
        "thinking", "text", "tool_use", "text", "tool_use",
    ]  # fmt: skip
    assert [block.get("text") for block in blocks if block["type"] == "text"] == ["b", "c\n"]
    assert [block["input"] for block in blocks if "input" in block] == [json.loads(ARGUMENTS), {}]


@pytest.mark.parametrize(
    ("text", "end", "reason", "sequence"),
    [
        ("a", {}, "end_turn", None),
        ("a", {"stop": "b"}, "stop_sequence", "b"),
        ("a", {"reason": "length", "count": 9}, "max_tokens", None),
        ("a", {"reason": "length", "stop": "timeout"}, "max_tokens", None),
        ("a", {"reason": "length", "count": 93}, "max_tokens", None),
        (CALL, {}, "tool_use", None),
        (CALL, {"reason": "length"}, "tool_use", None),
        (f"{CALL}a", {"reason": "length"}, "max_tokens", None),
        (CALL[:-30], {"reason": "length"}, "max_tokens", None),
        (CALL[:-30], {"stop": "b"}, "stop_sequence", "b"),
    ],
)
def test_why_it_ended(text: str, end: dict[str, Any], reason: str, sequence: str | None) -> None:
    answer = whole("hermes", text, **end)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_a_full_context_is_no_limit_of_the_client() -> None:
    output = ended("a", "length", count=5)
    output = dataclasses.replace(output, job=dataclasses.replace(output.job, token_ids=[1] * 95))
    answer = make(None).whole([output])
    assert answer["stop_reason"] == "model_context_window_exceeded"


def test_arguments_that_were_cut_are_those_that_were_there() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": [2, "ab'
    (block,) = whole("hermes", text, reason="length")["content"]
    assert block["input"] == {"x": 1, "y": [2]}


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ('{"x": 1e999, "y": [-1e999]}', {"x": "inf", "y": ["-inf"]}),
        (f'{{"x": {"9" * 5000}}}', {}),
        (f'{{"x": {"[" * 5000}{"]" * 5000}}}', {}),
        (f'{{"x": {"[" * 5000}', {}),
        ('{"x": "\\ud83d"}', {"x": "\ud83d"}),
    ],
)
def test_arguments_that_no_client_could_read(arguments: str, want: dict[str, Any]) -> None:
    """Whatever a model writes, the answer is JSON."""
    piece = CallDelta(0, "1", "add", arguments)
    (block,) = blocks_of([piece])
    assert block["input"] == want
    json.loads(to_bytes(block), parse_constant=pytest.fail)


def test_tokens_of_the_cache_are_told_apart() -> None:
    assert whole(None, "a")["usage"] == {
        "input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 5,
        "output_tokens": 3,
    }  # fmt: skip
    answer = make(None)
    answer._has_cached_tokens = False
    usage = answer.whole([ended("a")])["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (7, 0)


def test_hidden_thinking_comes_back() -> None:
    shown, hidden = (whole("hermes", "<think>é 🙂</think>b", hides)["content"] for hides in (0, 1))
    assert [block["type"] for block in hidden] == [block["type"] for block in shown]
    assert (shown[0]["thinking"], hidden[0]["thinking"]) == ("é 🙂", "")
    assert all(thinking_in(blocks[0]) == "é 🙂" for blocks in (shown, hidden))
    # signatures of others say nothing
    for signature in ("", "abc", "specc.text.%", "specc.text./w=="):
        assert thinking_in({"thinking": "", "signature": signature}) == ""


def test_each_block_has_a_signature_of_its_own() -> None:
    pieces = [Text("a", True), Text("b"), Text("c", True)]
    first, _, second = blocks_of(pieces, hides_thinking=True)
    assert (thinking_in(first), thinking_in(second)) == ("a", "c")
    first, _, second = blocks_of(pieces)
    assert first["signature"] != second["signature"]


def test_an_error_in_a_stream_has_the_form_of_errors() -> None:
    writer = make(None).writer(None, lambda: None)  # type: ignore[arg-type]
    (event,) = events_of(writer.fail([], ApiError(500, "Something failed. Please wait.")))
    assert event == {
        "type": "error",
        "error": {"type": "api_error", "message": "Something failed. Please wait."},
        "request_id": "1",
    }
