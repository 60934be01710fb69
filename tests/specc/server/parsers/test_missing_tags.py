"""Calls without some of their tags, as models write them: the calls, or text, and no wrong one."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
from hypothesis import strategies as st

from specc.server.parsers.calls import CallParser
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.parsers.message import MessageParser
from tests.specc.server.parsers.pieces import Found, check_pieces, counted, cut, joined
from tests.specc.server.parsers.test_formats import TOOLS, read, values
from tests.specc.server.parsers.writers import WRITERS, Call

TEXT = "two\nlines, and a } of <text>"
CALLS: list[Call] = [
    ("add", {"x": -1, "s": TEXT, "o": {"k": [1, "}"]}, "f": True}),
    ("now", {}),
    ("add", {"f": False, "s": TEXT}),
]
QWEN = ("<tool_call>\n", "</tool_call>", "</parameter>\n", "</function>\n")
GLM = ("</arg_value>\n", "</tool_call>")
# what may be missing of a call, each by itself, and it is read all the same
OPTIONAL = {
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "mimo", "step3p5"), QWEN),
    "seed_oss": ("<seed:tool_call>\n", "</seed:tool_call>", *QWEN[2:]),
    "glm45": GLM[:1],
    "glm47": ("</arg_value>",),
    "poolside_v1": GLM[:1],
    "hy_v3": ("<tool_calls>\n", "</tool_calls>", "</tool_call>\n", GLM[0]),
    "minimax_m2": ("<minimax:tool_call>\n", "</minimax:tool_call>", "</parameter>\n",
                   "</invoke>\n"),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>",
                     "</｜DSML｜parameter>\n", "</｜DSML｜invoke>\n"),
    "deepseek_v4": ("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>", "</｜DSML｜parameter>\n",
                    "</｜DSML｜invoke>\n"),
    "step3": ("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>", "<｜tool_call_end｜>",
              "</steptml:parameter>\n", "</steptml:invoke>"),
    "kimi_k3": ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", "<|close|>argument<|sep|>",
                "<|close|>call<|sep|>"),
    "minimax_m3": ("]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>",
                   "]<]minimax[>[</invoke>\n"),
}  # fmt: skip
# without these, no call is certain
NEEDED = {
    "qwen3_coder": ("<function=add>", "<parameter=s>\n"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_value>", "</arg_key>"),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_value>", "</arg_key>"),
    "hy_v3": ("<tool_call>", "<tool_sep>", "<arg_value>"),
    "minimax_m2": ('<invoke name="add">', '<parameter name="s">'),
    "minimax_m3": ("]<]minimax[>[</s>", "]<]minimax[>[</item>"),
    "kimi_k3": ('<|open|>call tool="add" index="1"<|sep|>',),
}  # fmt: skip
# one of those that share all but their outer marks
DIFFERENT = (
    "qwen3_coder", "glm45", "hy_v3", "minimax_m2", "deepseek_v32", "step3", "kimi_k3", "minimax_m3"
)  # fmt: skip
MISSING = [(form, tag) for form, tags in OPTIONAL.items() for tag in tags]
KEPT = [(form, tag) for form, tags in NEEDED.items() for tag in tags]


def without(text: str, *tags: str) -> str:
    for tag in tags:
        own = tag if tag in text else tag.strip()
        assert own in text
        text = text.replace(own, "")
    return text


def read_in_pieces(form: str, text: str) -> Found:
    """However it comes."""
    whole = read(form, text)
    for size in (1, 3, 8, 40):
        assert read(form, text, (size,)) == whole, size
    return whole


@pytest.mark.parametrize(("form", "tag"), MISSING)
def test_one_is_missing(form: str, tag: str) -> None:
    """Of every call, and of the last one alone."""
    # without the mark of its end, a name without arguments could only be spoken of
    middle = (
        CALLS[1:2] if tag not in ("</invoke>\n", "</｜DSML｜invoke>\n", "</tool_call>\n") else []
    )
    # of formats whose calls have one mark at their end, a text before it could hold that mark
    is_certain = form not in ("glm45", "glm47", "poolside_v1")
    for calls in ([CALLS[0], *middle, CALLS[2]], CALLS[:1], CALLS[2:], CALLS[:2]):
        part = WRITERS[form](calls)
        if tag.strip() not in part:
            continue
        found = read_in_pieces(form, f"I do:\n\n{without(part, tag)}")
        assert found.content.strip() == "I do:"
        assert found.is_whole == (is_certain or calls[-1] != CALLS[2])
        if found.is_whole:
            assert values(found) == calls
    text = WRITERS[form](CALLS)
    before, _, after = text.rpartition(tag if tag in text else tag.strip())
    found = read_in_pieces(form, before + after)
    assert [(name, json.loads(own)) for name, own in found.calls[:2]] == CALLS[:2]


@pytest.mark.parametrize(("form", "tag"), KEPT)
def test_one_that_is_needed_is_missing(form: str, tag: str) -> None:
    for calls in (CALLS, CALLS[:1]):
        found = read_in_pieces(form, without(WRITERS[form](calls), tag))
        assert not found.is_whole or values(found) in (CALLS[1:2], CALLS[1:])


@pytest.mark.parametrize("form", OPTIONAL)
def test_several_are_missing(form: str) -> None:
    """Whatever is reported as whole was called, in this order; the rest is text."""
    for calls in (CALLS, CALLS[:1], CALLS[2:]):
        text = WRITERS[form](calls)
        tags = [tag for tag in OPTIONAL[form] if tag.strip() in text]
        for own in itertools.chain(*(itertools.combinations(tags, n) for n in (2, 3, 4))):
            found = read(form, without(text, *own))
            assert read(form, without(text, *own), (3,)) == found
            if found.is_whole:
                rest = iter(calls)
                assert all(call in rest for call in values(found)), own


@pytest.mark.parametrize(("form", "tag"), [one for one in MISSING if one[0] in DIFFERENT])
def test_wherever_it_is_cut(form: str, tag: str) -> None:
    text = without(WRITERS[form](CALLS), tag)
    for end in range(0, len(text), 11):
        found = read(form, text[:end], (5,))
        if found.is_whole:
            assert values(found) == CALLS[: len(found.calls)], text[:end]


ADD = "<function=add>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\na\n</parameter>\n</function>"
END = "\n</parameter>\n</function>\n</tool_call>"
NOW = "<tool_call><function=now></function></tool_call>"
BOTH = '{"x": 1, "s": "a"}'


def qwen(value: str) -> str:
    return f"<tool_call>\n<function=add>\n<parameter=s>\n{value}"


CASES: dict[str, tuple[str, str, list[tuple[str, str]], bool]] = {
    "no opening": (f"I add.\n\n{ADD}\n</tool_call>", "I add.\n\n", [("add", BOTH)], True),
    "neither": (f"I add.\n\n{ADD}\n", "I add.\n\n", [("add", BOTH)], True),
    "two without": (f"{ADD}\n{ADD}\n</tool_call>", "", [("add", BOTH)] * 2, True),
    "the first without": (f"{ADD}\n<tool_call>\n{ADD}</tool_call>", "", [("add", BOTH)] * 2, True),
    "on one line": ("<function=add><parameter=x>1<parameter=s>a</function></tool_call>", "",
                    [("add", BOTH)], True),
    "another value's type": ("<tool_call><function=add><parameter=f>\nTrue <parameter=x> 5 "
                             "</tool_call>", "", [("add", '{"f": true, "x": 5}')], True),
    "no arguments, no end": ("<tool_call>\n<function=now>\n</tool_call>", "", [("now", "{}")],
                             True),
    "a name, then a call": (f"<function=now> or\n<function=now>\n{ADD}", "<function=now> or\n"
                            "<function=now>\n", [("add", BOTH)], True),
    "and text after": (f"{qwen('a')}\n</function>\n</tool_call>\n\nDone.", "\n\nDone.",
                       [("add", '{"s": "a"}')], True),
    # what is spoken of
    "a name": ("<function=add> adds, and <tool_call><function=now> too.",
               "<function=add> adds, and <tool_call><function=now> too.", [], False),
    "marks": ("In <tool_call>, <function=, <function=add>, <parameter=x> and </function> are tags.",
              "In <tool_call>, <function=, <function=add>, <parameter=x> and </function> are tags.",
              [], False),
    "another tool's": ("<function=sub>\n<parameter=x>\n1\n</parameter>\n</function>",
                       "<function=sub>\n<parameter=x>\n1\n</parameter>\n</function>", [], False),
    "without a call": ("</function>\n</tool_call>", "</function>\n</tool_call>", [], False),
    # of values that write of calls
    "a call in a value": (f"{qwen(ADD)}{END}", "", [("add", json.dumps({"s": ADD}))], True),
    "with its tag": (f"{qwen('<tool_call>' + ADD + '</tool_call>')}{END}", "",
                     [("add", json.dumps({"s": f"<tool_call>{ADD}</tool_call>"}))], True),
    "two in a value": (qwen(f"{NOW}\n{NOW}{END}"), "",
                       [("add", json.dumps({"s": f"{NOW}\n{NOW}"}))], True),
    "ends in a value": (f"{qwen('a </function> b</function></tool_call>c')}{END}", "",
                        [("add", '{"s": "a </function> b</function></tool_call>c"}')], True),
    "ends on lines": (qwen("a\n</function>\n</tool_call>\nb") + END, "",
                      [("add", '{"s": "a\\n</function>\\n</tool_call>\\nb"}')], True),
    "mentions": (qwen("see <parameter=x> or `<parameter=o>`, <function=add>") + END, "",
                 [("add", '{"s": "see <parameter=x> or `<parameter=o>`, <function=add>"}')], True),
    "a parameter that is none": (qwen("a\n<parameter=y>\nb") + END, "",
                                 [("add", '{"s": "a\\n<parameter=y>\\nb"}')], True),
    "a parameter that was": (qwen("a\n<parameter=s>\nb") + END, "",
                             [("add", '{"s": "a\\n<parameter=s>\\nb"}')], True),
    # not certain
    "one mark of two": (f"{qwen('a')}\n</function>", "", [("add", '{"s": "a\\n</function>')],
                        False),
    "one mark, and text": (f"{qwen('a')}\n</function>\nSo", "",
                           [("add", '{"s": "a\\n</function>\\nSo')], False),
    "a call follows": (qwen("a\n</function>\n<function=now>\n</function>"), "",
                       [("add", '{"s": "a"}'), ("now", "{}")], True),
    "a half of one": (qwen("a\n</function>\n<function=no"), "",
                      [("add", '{"s": "a\\n</function>\\n<function=no')], False),
    "ends far away": (qwen(f"a\n</function>\n</tool_call>{'b' * 5000}") + END, "",
                      [("add", json.dumps({"s": f"a\n</function>\n</tool_call>{'b' * 5000}"}))],
                      True),
    "then a stray end": (qwen("a\n<parameter=x>\n5\n</parameter>\n</parameter>\n</function>"),
                         "</parameter>\n</function>", [("add", '{"s": "a", "x": 5')], False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases_of_qwen(name: str) -> None:
    text, content, calls, whole = CASES[name]
    assert read_in_pieces("qwen3_coder", text) == Found(content, calls, whole)


def test_every_value_comes_as_it_was_closed() -> None:
    """With all of its tags, a call is what it was, whatever its texts write of."""
    marks = ["<tool_call>", "</tool_call>", "<function=now>", "</function>", "<parameter=x>", "\n"]
    for parts in itertools.product(marks, repeat=3):
        value = "a" + "".join(parts) + "b"
        text = f"{qwen(value)}{END}"
        found = read("qwen3_coder", text)
        assert read("qwen3_coder", text, (4,)) == found
        assert not found.is_whole or json.loads(found.calls[0][1])["s"].startswith("a")
        if "\n<parameter=x>" not in value and "a<parameter=x>" not in value:
            assert values(found) == [("add", {"s": value})], value


@pytest.mark.default("qwen3_coder", "hy_v3", "step3")
@pytest.mark.parametrize("form", DIFFERENT)
def test_pieces_do_not_matter(form: str) -> None:
    """Nor what is missing: all that is whole is JSON, and what is no call is text."""
    text = WRITERS[form](CALLS)
    marks = [mark for mark in (*CALL_FORMATS[form].markers, *CALL_FORMATS[form].starts) if mark]
    lines = text.splitlines(keepends=True)
    parts = st.sampled_from([*marks, *lines, "add", "now", "\n", " ", "a", *OPTIONAL[form]])
    whole_text = st.lists(st.sampled_from(OPTIONAL[form]), max_size=3, unique=True).map(
        lambda tags: without(text, *(tag for tag in tags if tag.strip() in text))
    )

    check_pieces(functools.partial(read, form), st.one_of(parts, whole_text), 25)


def test_texts_still_come_as_they_are_written() -> None:
    """What may be the end of a value is held back, and nothing else."""
    parser = MessageParser(calls=CallParser(CALL_FORMATS["qwen3_coder"], TOOLS), make_id=counted())
    seen = []
    for piece in (qwen("ab"), "c\n", "\nd <par", "k>\n<param", "eter=x>\n5"):
        calls = parser.feed(piece, is_last=False).calls
        seen.append(calls[0].arguments if calls else "")
    assert seen == ['{"s": "ab', "c", "\\n\\nd ", "<park>", '", "x": ']


def test_ids_and_indices_of_calls_without_tags() -> None:
    parser = MessageParser(calls=CallParser(CALL_FORMATS["qwen3_coder"], TOOLS), make_id=counted())
    message = joined(parser, cut(f"{ADD}\n{ADD}", [6]))
    assert [(call.index, call.id) for call in message.calls] == [(0, "call_0"), (1, "call_1")]


def test_tools_without_declared_parameters() -> None:
    """Any name may be one of a parameter's, on a line of its own."""
    tools: dict[str, Any] = {"run": {"type": "object"}}
    text = "<function=run>\n<parameter=a>\nb\n<parameter=c>\nd\n</parameter>\n</function>"
    parser = MessageParser(calls=CallParser(CALL_FORMATS["qwen3_coder"], tools), make_id=counted())
    (call,) = parser.feed(text, is_last=True).calls
    assert json.loads(call.arguments) == {"a": "b", "c": "d"}
