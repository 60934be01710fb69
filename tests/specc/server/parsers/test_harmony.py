"""Harmony: thinking, calls and the answer are messages of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.server.parsers.harmony import HarmonyParser
from specc.server.parsers.message import MessageParser
from tests.specc.server.parsers.pieces import counted, cut, joined

TOOLS: dict[str, Any] = {"add": {"type": "object"}, "now": None}
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
NEXT = "<|start|>assistant"
THINK = "<|channel|>analysis<|message|>2 + 2?<|end|>"
FINAL = "<|channel|>final<|message|>4."
ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": "<|a}"}'
NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
X, N = ("add", '{"x": "<|a}"}'), ("now", "{}")
# reasoning, content, calls, whether there are calls and none is cut
Read = tuple[str, str, list[tuple[str, str]], bool]


def read(text: str, size: int | tuple[int, ...], prompt: str = PROMPT, tools: Any = TOOLS) -> Read:
    parser = MessageParser(HarmonyParser(tools, prompt), make_id=counted())
    message = joined(parser, cut(text, [size] if isinstance(size, int) else size))
    calls = [(call.name or "", call.arguments) for call in message.calls]
    return message.reasoning, message.content, calls, parser.has_whole_calls


def check(text: str, want: Read, **options: Any) -> None:
    for size in (*range(1, 9), max(1, len(text))):
        assert read(text, size, **options) == want, size


SUB = '<|channel|>commentary to=functions.sub <|constrain|>json<|message|>{"x": 1}'
LONG = "<|channel|>" + "a" * 400
CASES: dict[str, tuple[str, Read]] = {
    "an answer": (f"{THINK}{NEXT}{FINAL}<|return|>", ("2 + 2?", "4.", [], False)),
    "its end is not shown": (f"{THINK}{NEXT}{FINAL}", ("2 + 2?", "4.", [], False)),
    "no thinking": (FINAL, ("", "4.", [], False)),
    "a call": (f"{THINK}{NEXT}{ADD}<|call|>", ("2 + 2?", "", [X], True)),
    "two calls": (f"{ADD}<|call|>{NEXT}{NOW}", ("", "", [X, N], True)),
    "a text before it": (f"<|channel|>commentary<|message|>I add:<|end|>{NEXT}{ADD}\n<|call|>",
                         ("", "I add:", [X], True)),
    "a recipient beside the role": (f'{THINK}{NEXT} to=functions.add<|channel|>commentary json'
                                    '<|message|>{"x": "<|a}"}', ("2 + 2?", "", [X], True)),
    "a recipient first": (' to=add<|channel|>commentary<|message|>{"x": "<|a}"}',
                          ("", "", [X], True)),
    "a call while it thinks": ("<|channel|>analysis to=functions.now code<|message|>{}",
                               ("", "", [N], True)),
    "several messages": (f"{THINK}{NEXT}{THINK}{NEXT}<|channel|>commentary<|message|>a<|end|>{NEXT}"
                         f"{FINAL}", ("2 + 2?\n2 + 2?", "a\n4.", [], False)),
    "messages without ends": ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b",
                              ("a", "b", [], False)),
    "an empty message": ("<|channel|>analysis<|message|><|end|>" + NEXT + FINAL,
                         ("", "4.", [], False)),
    "a built-in tool": ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
                        ("1 + 1", "", [], False)),
    "a mark that is none": ("<|channel|>final<|message|>a <|b|> <|me <|",
                            ("", "a <|b|> <|me <|", [], False)),
    "white space": (f"{THINK}\n{NEXT}{FINAL}<|return|>\n", ("2 + 2?", "4.", [], False)),
    # not of this form
    "a plain text": ("Hello <b>", ("", "Hello <b>", [], False)),
    "a plain text after a message": (f"{THINK}Hello", ("2 + 2?", "Hello", [], False)),
    "to": ("to=day is", ("", "to=day is", [], False)),
    "no text": ("", ("", "", [], False)),
    "only white space": (" \n", ("", " \n", [], False)),
    "a head without an end": (LONG, ("", LONG, [], False)),
    "a head with a late end": (f"{LONG}<|message|>b", ("", f"{LONG}<|message|>b", [], False)),
    # no calls
    "unknown": (f"{SUB}<|call|>", ("", SUB, [], False)),
    "no object": ("<|channel|>commentary to=functions.add<|message|>1 + 1<|call|>",
                  ("", "<|channel|>commentary to=functions.add<|message|>1 + 1", [], False)),
    # cut
    "cut in a mark": ("<|chan", ("", "<|chan", [], False)),
    "cut in a head": (f"{THINK}{NEXT}<|channel|>fin", ("2 + 2?", "", [], False)),
    "cut in arguments": (ADD[:-3], ("", "", [("add", '{"x": "<|a')], False)),
    "cut before arguments": (ADD[: ADD.index("{")], ("", ADD[: ADD.index("{")], [], False)),
    "no JSON any more": (f"{ADD[:-1]}, y}}<|call|>{NEXT}{NOW}",
                         ("", "y}", [("add", X[1][:-1] + ", "), N], False)),
    "a text after arguments": (f"{NOW} ok<|end|>{NEXT}{FINAL}", ("", " ok\n4.", [N], True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_messages(name: str) -> None:
    check(*CASES[name])


def test_without_tools_there_are_no_calls() -> None:
    check(f"{THINK}{NEXT}{NOW}<|call|>", ("2 + 2?", NOW, [], False), tools={})


@pytest.mark.parametrize(
    ("begun", "want"),
    [
        ("<|channel|>final<|message|>", ("", "a", [], False)),
        ("<|channel|>analysis<|message|>", ("a", "", [], False)),
        ("<|channel|>analysis<|message|>so ", ("a", "", [], False)),
        (f"{THINK}{NEXT}<|channel|>final<|message|>", ("", "a", [], False)),
    ],
)
def test_what_the_prompt_has_begun(begun: str, want: Read) -> None:
    check("a<|end|>", want, prompt=PROMPT + begun)


def test_a_head_that_the_prompt_has_begun() -> None:
    begun = "<|channel|>commentary to=functions.now"
    check(" <|constrain|>json<|message|>{}", ("", "", [N], True), prompt=PROMPT + begun)
    assert read("<|channel|>final<|message|>a", 3, prompt="Q:") == ("", "a", [], False)


def test_a_first_head_that_was_cut_is_no_text() -> None:
    """An output that ends before it has said more than whom its message is for."""
    parser = HarmonyParser(TOOLS, "<|start|>assistant")
    assert [*parser.feed(" to=functions.weather"), *parser.finish()] == []
    parser = HarmonyParser(TOOLS, "<|start|>assistant")
    assert [*parser.feed(" today"), *parser.finish()] != []


def test_nothing_is_held_back_that_is_certain() -> None:
    parser = MessageParser(HarmonyParser(TOOLS, PROMPT), make_id=counted())
    seen = []
    for piece in ("<|channel|>analysis<|mess", "age|>a<b <|en", "d|><|start|>assistant", ADD[:-4],
                  ADD[-4:-1], ADD[-1:]):  # fmt: skip
        delta = parser.feed(piece, is_last=False)
        seen.append((delta.reasoning, delta.content, [call.arguments for call in delta.calls]))
    assert seen == [
        ("", "", []), ("a<b ", "", []), ("", "", []), ("", "", ['{"x": "<|']), ("", "", ['a}"']),
        ("", "", ["}"]),
    ]  # fmt: skip


PARTS = [
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
    "<|", "|>", "assistant", "analysis", "final", "commentary", " to=functions.add", "to=now", "{}",
    '{"x": 1}', "}", "a", " ", "\n", "é", THINK, ADD, FINAL,
]  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=9).map(tuple),
)
def test_pieces_do_not_matter(text: str, sizes: tuple[int, ...]) -> None:
    whole = read(text, max(1, len(text)))
    assert read(text, sizes) == whole
    if whole[3]:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[2])


def test_a_text_after_a_call_is_not_its_end() -> None:
    for text, ends in ((NOW, True), (f"{NOW}<|call|>{NEXT}{FINAL}", False)):
        parser = MessageParser(HarmonyParser(TOOLS, PROMPT))
        parser.feed(text, is_last=True)
        assert parser.ends_with_call == ends


def test_blanks_after_a_call_are_read_once() -> None:
    """However many come one by one before the mark that ends it."""
    parser = HarmonyParser(TOOLS, PROMPT)
    parser.feed(NOW)
    for _ in range(400):
        parser.feed(" ")
        assert len(parser._held) <= 1
    assert parser.feed("<|call|>") == []
