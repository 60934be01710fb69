"""Every format of calls: the same calls, however they are written and however the text comes."""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import strategies as st

from specc.server.parsers.calls import CallParser
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.parsers.message import MessageParser
from specc.server.parsers.reasoning import FORMATS, ReasoningParser
from tests.specc.server.parsers.pieces import Found, check_pieces, counted, cut, joined
from tests.specc.server.parsers.writers import WRITERS, Call, write_cohere, write_kimi

# of values that are texts in tags within tags
KEYS = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
TOOLS: dict[str, Any] = {
    "add": {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"type": "object", "properties": {"k": {"type": "array", "items": KEYS}}},
            "f": {"type": "boolean"},
        },
    },
    "now": None,
}
# braces, quotes and parts of markers in strings; no line breaks at their ends, which some formats
# write around values
NASTY = 'a}"]\\ {"name": "now"} </tool_cal <｜tool [( 🙂é\n  b'
# of formats without a marker: a call stands at the beginning
BEFORE = {"pythonic": ""}
BOTH: list[Call] = [("add", {"x": -1, "s": NASTY, "o": {"k": [1, "}"]}, "f": True}), ("now", {})]


N = "]<]minimax[>["
M3, M3_END = f'{N}<tool_call>{N}<invoke name="add">', f"{N}</invoke>{N}</tool_call>"
K3 = '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>'
K3_ARG, K3_END = "<|close|>argument<|sep|>", "<|close|>call<|sep|><|close|>tools<|sep|>"
K3_S = '<|open|>argument key="s" type="string"<|sep|>'
FORMS = [name for name, form in CALL_FORMATS.items() if not form.is_in_messages]


def read(form: str, text: str, sizes: tuple[int, ...] = ()) -> Found:
    """As `found`; ids may be those of the model."""
    parser = MessageParser(calls=CallParser(CALL_FORMATS[form], TOOLS), make_id=counted())
    message = joined(parser, cut(text, sizes or [max(1, len(text))]))
    calls = [(call.name or "", call.arguments) for call in message.calls]
    return Found(message.content, calls, parser.has_whole_calls)


def values(message: Found) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in message.calls]


def ids(form: str, text: str, size: int) -> list[str | None]:
    parser = MessageParser(calls=CallParser(CALL_FORMATS[form], TOOLS), make_id=counted())
    return [call.id for call in joined(parser, cut(text, [size])).calls]


@pytest.mark.parametrize("form", FORMS)
def test_two_calls_after_a_text(form: str) -> None:
    before = BEFORE.get(form, "I add:\n")
    text = f"{before}{WRITERS[form](BOTH)}\n"
    whole = read(form, text)
    assert (whole.content, values(whole), whole.is_whole) == (before, BOTH, True)
    for size in range(1, 9):
        assert read(form, text, (size,)) == whole, size


@pytest.mark.parametrize("form", FORMS)
def test_an_unknown_tool_is_text(form: str) -> None:
    """Marks included; and so is what is cut before the arguments begin."""
    text = WRITERS[form]([("sub", {"x": 1})])
    for size in (1, 5, len(text)):
        whole = read(form, f"a {text}", (size,))
        assert (whole.content, whole.calls) == (f"a {text}", [])


def shared(one: str, other: str) -> int:
    """Characters with which both begin."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


@pytest.mark.parametrize("form", FORMS)
def test_wherever_it_is_cut(form: str) -> None:
    """What has come of a call is a beginning of it; text before it is text."""
    text = BEFORE.get(form, "T ") + WRITERS[form](BOTH)
    whole = read(form, text)
    for end in range(0, len(text), 7):
        part = read(form, text[:end], (4,))
        for (name, arguments), (want_name, want) in zip(part.calls, whole.calls, strict=False):
            assert name == want_name
            rest = arguments[shared(want, arguments) :]
            # of a text, what may have become the mark after it
            is_mark = any(mark.startswith(rest) for mark in CALL_FORMATS[form].markers)
            assert is_mark or re.fullmatch(r"(\\n)?(<[^>]*)?", rest), end
        if not part.calls:
            assert part.content == text[:end]
        elif part.is_whole:
            assert part.calls == whole.calls[: len(part.calls)]
        assert part.content.startswith(BEFORE.get(form, "T")[:end])


@pytest.mark.parametrize(
    "form",
    [
        "apertus", "cohere_command3", "deepseek_v3", "functiongemma", "gemma4", "granite",
        "kimi_k2", "xlam",
    ],
)  # fmt: skip
def test_pieces_do_not_matter(form: str) -> None:
    text = WRITERS[form](BOTH)
    # markers, names and JSON, and parts of them
    marks = [m for m in CALL_FORMATS[form].markers if m]
    parts = [*marks, *(m[:3] for m in marks), *(m[3:] for m in marks), text, "add", "now", "{}"]
    parts += [text[at : at + 40] for at in range(0, len(text), 40)]
    parts += ['{"x": 1}', "}", " ", "\n", "é"]

    check_pieces(functools.partial(read, form), st.sampled_from(parts), 30)


def test_ids_of_kimi_are_the_ones_that_its_model_writes() -> None:
    """Its templates hand them back to the model."""
    for size in (1, 7, 500):
        assert ids("kimi_k2", write_kimi(BOTH), size) == ["functions.add:0", "functions.now:1"]
    assert ids("deepseek_v31", WRITERS["deepseek_v31"](BOTH), 5) == ["call_0", "call_1"]


def test_ids_of_cohere_are_the_ones_that_its_model_writes() -> None:
    for size in (1, 7, 500):
        assert ids("cohere_command3", write_cohere(BOTH), size) == ["0", "1"]
    # no id that could be sent back, and one that comes too late
    for field in ('"tool_call_id": ""', '"tool_call_id": 3'):
        text = f'<|START_ACTION|>[{{{field}, "tool_name": "now", "parameters": {{}}}}]'
        assert ids("cohere_command4", text, 4) == ["call_0"]
    text = '<|START_ACTION|>[{"tool_name": "now", "parameters": {}, "tool_call_id": "0"}]'
    assert ids("cohere_command4", text, 4) == ["call_0"]


def test_an_id_that_another_call_has_is_no_id() -> None:
    """Of one output, or of an earlier one of the conversation: models may begin at 0 each time."""
    twice = write_cohere(BOTH).replace('"1", "tool_name"', '"0", "tool_name"')
    assert ids("cohere_command3", twice, 7) == ["0", "call_0"]
    for size in (1, 7, 500):
        parser = MessageParser(
            calls=CallParser(CALL_FORMATS["cohere_command4"], TOOLS),
            make_id=counted(),
            taken_ids=["0", "2"],
        )
        found = joined(parser, cut(write_cohere([*BOTH, BOTH[1]]), [size])).calls
        assert [call.id for call in found] == ["call_0", "1", "call_1"]


def test_ids_of_kimi_have_the_next_number_that_is_free() -> None:
    """Templates want that form, and models may begin at 0 each time."""
    for size in (1, 7, 500):
        parser = MessageParser(
            calls=CallParser(CALL_FORMATS["kimi_k2"], TOOLS),
            make_id=counted(),
            taken_ids=["functions.add:0", "functions.add:1", "functions.now:7", "call_9"],
            is_numbered=CALL_FORMATS["kimi_k2"].is_numbered,
        )
        found = joined(parser, cut(write_kimi([*BOTH, BOTH[1]]), [size])).calls
        ids = [call.id for call in found]
        assert ids == ["functions.add:2", "functions.now:1", "functions.now:2"]
    # of one output, and without the prefix
    text = write_kimi([BOTH[1], BOTH[1]]).replace("functions.now:0", "now:1")
    parser = MessageParser(
        calls=CallParser(CALL_FORMATS["kimi_k2"], TOOLS), taken_ids=["now:1"], is_numbered=True
    )
    found = joined(parser, [text]).calls
    assert [call.id for call in found] == ["functions.now:2", "functions.now:1"]


B, E, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
ONE, AFTER = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
K_BEGIN, K_ONE, K_ARGS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
)
D = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
CASES = {
    "no section end": ("deepseek_v31", f"{B}{ONE}now{SEP}{{}}{AFTER} b", " b", [("now", "{}")],
                       True),
    "no call end": ("deepseek_v31", f"{B}{ONE}now{SEP}{{}}{ONE}add{SEP}{{}}{E}", "",
                    [("now", "{}"), ("add", "{}")], True),
    "cut in the end": ("deepseek_v31", f"{B}{ONE}now{SEP}{{}}{AFTER}\n{E[:5]}", "",
                       [("now", "{}")], True),
    "something after the end": ("deepseek_v31", f"{B}{ONE}now{SEP}{{}}{AFTER}{E[:5]}a",
                                f"{E[:5]}a", [("now", "{}")], True),
    "an empty section": ("deepseek_v31", f"{B}{E}", f"{B}{E}", [], False),
    "no JSON": ("deepseek_v31", f"{B}{ONE}add{SEP}(1){AFTER}", f"{B}{ONE}add{SEP}(1){AFTER}",
                [], False),
    "JSON that ends early": ("deepseek_v31", f'{B}{ONE}add{SEP}{{"x": 1, y}}{AFTER}', f"y}}{AFTER}",
                             [("add", '{"x": 1, ')], False),
    "a second one that is none": ("deepseek_v31", f"{B}{ONE}now{SEP}{{}}{AFTER}{ONE}sub{SEP}{{}}",
                                  f"{ONE}sub{SEP}{{}}", [("now", "{}")], True),
    "no fence": ("deepseek_v3", f"{B}{ONE}function{SEP}now\n{{}}{AFTER}",
                 f"{B}{ONE}function{SEP}now\n{{}}{AFTER}", [], False),
    "a name without a number": ("kimi_k2", f"{K_BEGIN}{K_ONE}add{K_ARGS}{{}}",
                                f"{K_BEGIN}{K_ONE}add{K_ARGS}{{}}", [], False),
    "only a name": ("glm45", "<tool_call>now is the time", "<tool_call>now is the time", [], False),
    "a key twice": ("glm45", "<tool_call>add<arg_key>s</arg_key><arg_value>1</arg_value><arg_key>s"
                    "</arg_key>", "<arg_key>s</arg_key>", [("add", '{"s": "1"')], False),
    "a key alone": ("glm45", "<tool_call>add\n<arg_key>x</arg_key>5", "5", [("add", '{"x": ')],
                    False),
    "a text is as it is": ("glm45", "<tool_call>add<arg_key>s</arg_key><arg_value>\n 5 \n"
                           "</arg_value></tool_call>", "", [("add", '{"s": "\\n 5 \\n"}')], True),
    "a mark in a key": ("glm45", "<tool_call>add<arg_key>s<arg_key></arg_key><arg_value>",
                        "<arg_key>s<arg_key></arg_key><arg_value>", [("add", "{")], False),
    "said to be text": ("deepseek_v32", f'{D}<｜DSML｜parameter name="x" string="true">5'
                        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", "",
                        [("add", '{"x": "5"}')], True),
    "said to be none": ("deepseek_v32", f'{D}<｜DSML｜parameter name="s" string="false">[5]'
                        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", "",
                        [("add", '{"s": [5]}')], True),
    "said otherwise": ("deepseek_v32", f'{D}<｜DSML｜parameter name="s" string="no">',
                       '<｜DSML｜parameter name="s" string="no">', [("add", "{")], False),
    "no quotes": ("minimax_m2", "<minimax:tool_call><invoke name=now></invoke>",
                  "<minimax:tool_call><invoke name=now></invoke>", [], False),
    "single quotes": ("minimax_m2", "<minimax:tool_call><invoke name='now'></invoke>", "",
                      [("now", "{}")], True),
    "granite of 3.1": ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', "",
                       [("now", "{}")], True),
    "granite without a mark": ("granite", ' [{"name": "now", "arguments": {}}]', "",
                               [("now", "{}")], True),
    "some other list": ("granite", ' [{"name": "now"}, 2]', ' [{"name": "now"}, 2]', [], False),
    "xlam at the beginning": ("xlam", '\n[{"name": "now", "arguments": {}}]', "",
                              [("now", "{}")], True),
    "xlam in a fence": ("xlam", 'a ```json\n[{"name": "now", "arguments": {}}]\n``` b', "a  b",
                        [("now", "{}")], True),
    "xlam after Mistral's mark": ("xlam", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', "",
                                  [("now", "{}")], True),
    "two marks of xlam's": ("xlam", '[TOOL_CALLS][{"name": "now", "arguments": {}}]\n'
                            '[TOOL_CALLS] [{"name": "add", "arguments": {}}]', "",
                            [("now", "{}"), ("add", "{}")], True),
    "a part of a mark after a call": ("xlam", '[{"name": "now", "arguments": {}}]</tool_call>[TOO',
                                      "[TOO", [("now", "{}")], True),
    "some other fence": ("xlam", "```json\n[1, 2]\n```", "```json\n[1, 2]\n```", [], False),
    "a fence after another mark": ("xlam", '[TOOL_CALLS][{"name": "now", "arguments": {}}] ```',
                                   " ```", [("now", "{}")], True),
    "cohere's key": ("cohere_command3", '<|START_ACTION|>[{"name": "now", "parameters": {}}]',
                     '<|START_ACTION|>[{"name": "now", "parameters": {}}]', [], False),
    "two tools under one name": ("apertus", '<|tools_prefix|>[{"now": {}, "add": {}}]',
                                 ', "add": {}}]', [("now", "{}")], True),
    "an object without its end": ("apertus", '<|tools_prefix|>[{ "now" : {} ', "",
                                  [("now", "{}")], True),
    "no separator": ("hy_v3", "<tool_calls><tool_call>now</tool_call></tool_calls>",
                     "<tool_calls><tool_call>now</tool_call></tool_calls>", [], False),
    "an escaped key": (
        "kimi_k3",
        f'{K3}<|open|>argument key="a&quot;&amp;" type="string"<|sep|>&amp;{K3_ARG}{K3_END}',
        "", [("add", '{"a\\"&": "&amp;"}')], True,
    ),
    "no type": (
        "kimi_k3", f'{K3}<|open|>argument key="x"<|sep|>5{K3_ARG}{K3_END}',
        "", [("add", '{"x": "5"}')], True,
    ),
    "a number that is none": (
        "kimi_k3", f'{K3}<|open|>argument key="x" type="number"<|sep|>5x{K3_ARG}{K3_END}',
        "", [("add", '{"x": "5x"}')], True,
    ),
    "white space in a section": (
        "kimi_k3", f"{K3}\n {K3_S} a\n{K3_ARG}\n{K3_END}", "", [("add", '{"s": " a\\n"}')], True,
    ),
    "an argument without a key": (
        "kimi_k3", f'{K3}<|open|>argument type="string"<|sep|>5',
        '<|open|>argument type="string"<|sep|>5', [("add", "{")], False,
    ),
    "a key of kimi's twice": (
        "kimi_k3", f"{K3}{K3_S}a{K3_ARG}{K3_S}b", f"{K3_S}b", [("add", '{"s": "a"')], False,
    ),
    "text after an argument": (
        "kimi_k3", f"{K3}{K3_S}a{K3_ARG}b", "b", [("add", '{"s": "a"')], False,
    ),
    "a call without a name": (
        "kimi_k3", '<|open|>tools<|sep|><|open|>call index="1"<|sep|>',
        '<|open|>tools<|sep|><|open|>call index="1"<|sep|>', [], False,
    ),
    "a tag without an end": (
        "kimi_k3", f"<|open|>tools<|sep|><|open|>call {'a' * 400}",
        f"<|open|>tools<|sep|><|open|>call {'a' * 400}", [], False,
    ),
    "elements of an object": (
        "minimax_m3",
        f"{M3}\n{N}<o>\n{N}<k>\n{N}<item>1{N}</item>\n{N}<item>b{N}</item>{N}</k>\n"
        f"{N}<z>1{N}</z>{N}<z>2{N}</z>{N}</o>\n{M3_END}",
        "", [("add", '{"o": {"k": [1, "b"], "z": ["1", "2"]}}')], True,
    ),
    "elements without a schema": (
        "minimax_m3",
        f"{M3}{N}<y>{N}<item>1{N}</item>{N}</y>"
        f"{N}<w>{N}<item>1{N}</item>{N}<v>{N}</v>{N}</w>{M3_END}",
        "", [("add", '{"y": ["1"], "w": {"item": "1", "v": ""}}')], True,
    ),
    "nothing in it": (
        "minimax_m3", f"{M3}{N}<o>{N}</o>{N}<s>{N}</s>{M3_END}",
        "", [("add", '{"o": {}, "s": ""}')], True,
    ),
    "JSON for elements": (
        "minimax_m3", f'{M3}{N}<o>{{"k": [1]}}{N}</o>{N}<x>1e400{N}</x>{M3_END}',
        "", [("add", '{"o": {"k": [1]}, "x": "1e400"}')], True,
    ),
    "the same name inside": (
        "minimax_m3", f"{M3}{N}<y>{N}<y>1{N}</y>{N}</y>{M3_END}",
        "", [("add", '{"y": {"y": "1"}}')], True,
    ),
    "white space is text": (
        "minimax_m3", f"{M3}{N}<s> \n{N}</s>{N}<y>\n a ]{N}</y>{M3_END}",
        "", [("add", '{"s": " \\n", "y": "\\n a ]"}')], True,
    ),
    "text beside elements": (
        "minimax_m3", f"{M3}{N}<o>a{N}<k>{N}</k>{N}</o>b",
        f"a{N}<k>{N}</k>{N}</o>b", [("add", '{"o": ')], False,
    ),
    "elements after a text": (
        "minimax_m3", f"{M3}{N}<s>a{N}<k>b", f"{N}<k>b", [("add", '{"s": "a')], False,
    ),
    "another end": (
        "minimax_m3", f"{M3}{N}<s>a{N}</y>b", f"{N}</y>b", [("add", '{"s": "a')], False,
    ),
    "no mark before a tag": ("minimax_m3", f"{M3}<s>a", "<s>a", [("add", "{")], False),
    "an empty tag": ("minimax_m3", f"{M3}{N}< >a", f"{N}< >a", [("add", "{")], False),
    "no white space": (
        "minimax_m3", f'{N}<tool_call>{N}<invokename="now">',
        f'{N}<tool_call>{N}<invokename="now">', [], False,
    ),
    "a name without quotes": (
        "minimax_m3", f"{N}<tool_call>{N}<invoke name=now>{M3_END}", "", [("now", "{}")], True,
    ),
    "more in a tag": (
        "minimax_m3", f'{N}<tool_call>{N}<invoke name="now" !>',
        f'{N}<tool_call>{N}<invoke name="now" !>', [], False,
    ),
    "too deep": (
        "minimax_m3", f"{M3}{f'{N}<y>' * 65}a", f"{f'{N}<y>' * 64}a", [("add", '{"y": ')], False,
    ),
    "words like a mark": ("gigachat3", "a function call {}", "a function call {}", [], False),
    "a word like a mark": ("phi4_mini_json", "functools.wraps(add)", "functools.wraps(add)", [],
                           False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    form, text, content, calls, whole = CASES[name]
    for size in (*range(1, 9), len(text)):
        assert read(form, text, (size,)) == Found(content, calls, whole), size


@pytest.mark.parametrize(("form", "begin"), [("kimi_k3", K3), ("minimax_m3", M3)])
def test_a_tag_without_an_end_is_handed_out(form: str, begin: str) -> None:
    """While the text goes on: nothing is held back without bound."""
    before = begin[: begin.rindex(" tool=" if form == "kimi_k3" else " name=")]
    for size in (1, 7, 1000):
        parser = MessageParser(calls=CallParser(CALL_FORMATS[form], TOOLS))
        text = f"{before} {'a' * 1000}"
        found = [parser.feed(piece, is_last=False).content for piece in cut(text, [size])]
        assert "".join(found) == text


@pytest.mark.parametrize(
    ("form", "thinks", "ends_it"),
    [
        ("deepseek_v31", "deepseek_v3", True),
        ("kimi_k2", "kimi_k2", True),
        ("deepseek_v4", "deepseek_v4", True),
        ("glm45", "glm45", False),
        ("poolside_v1", "poolside_v1", False),
    ],
)
def test_calls_beside_thinking(form: str, thinks: str, ends_it: bool) -> None:
    """A section that begins in the middle of thinking ends it, of models that call out of it."""
    call_format = CALL_FORMATS[form]
    ends = (call_format.interrupts,) if call_format.interrupts else ()
    closed = "I think</think>" + WRITERS[form](BOTH)
    for text in (closed, closed.replace("</think>", "")) if ends_it else (closed,):
        for size in (1, 3, 8, len(text)):
            parser = MessageParser(
                ReasoningParser(FORMATS[thinks], "<think>", ends),
                CallParser(call_format, TOOLS),
                make_id=counted(),
            )
            message = joined(parser, cut(text, [size]))
            assert (message.reasoning, message.content) == ("I think", "")
            assert [call.name for call in message.calls] == ["add", "now"]


def test_a_format_has_a_writer_here() -> None:
    assert list(WRITERS) == FORMS
