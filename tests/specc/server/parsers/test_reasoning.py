"""Thinking is told from the answer, however the text comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.server.parsers.events import find_marker
from specc.server.parsers.message import Delta, MessageParser
from specc.server.parsers.reasoning import FORMATS, ReasoningParser
from tests.specc.server.parsers.pieces import cut, joined

K3_THINK, K3_SAY = "<|open|>think<|sep|>", "<|open|>response<|sep|>"
K3_THINK_END, K3_SAY_END = "<|close|>think<|sep|>", "<|close|>response<|sep|>"
K3_END = "<|close|>message<|sep|>"


def read(text: str, form: str, prompt: str = "A", sizes: list[int] | None = None) -> Delta:
    return joined(
        MessageParser(FORMATS[form].parser(prompt, (), {})),
        cut(text, sizes or [max(1, len(text))]),
    )


@pytest.mark.parametrize(
    ("form", "prompt", "text", "reasoning", "content"),
    [
        # inside, as the model or the template says
        ("deepseek_r1", "A", "a\n</think>\n\nb", "a\n", "\n\nb"),
        ("deepseek_r1", "A", "<think>\na</think>b", "\na", "b"),
        ("deepseek_r1", "A", " \n<think>a</think>b", "a", "b"),
        ("deepseek_r1", "A<think>\n", "a</think>b", "a", "b"),
        ("qwen3", "A", "\n<think>\na\n</think>\n\nb", "\na\n", "\n\nb"),
        ("qwen3", "A<think>\n", "a</think>b", "a", "b"),
        ("mistral", "A", "[THINK]a[/THINK]b", "a", "b"),
        ("seed_oss", "A", "<seed:think>a</think></seed:think>b", "a</think>", "b"),
        ("granite", "A", "Here is my thought process: a Here is my response: b", " a ", " b"),
        ("granite", "A", "Here is my thing", "", "Here is my thing"),
        ("minimax_m2", "A", "a</think>b", "a", "b"),
        ("kimi_k2", "A", "a</think>b", "", "a</think>b"),
        ("nemotron_v3", "A<think></think>", "a", "", "a"),
        ("gemma4", "A", "<|channel>thought\na<channel|>b", "a", "b"),
        ("gemma4", "A", "<|channel>a<channel|>thought\nb", "a", "thought\nb"),
        ("gemma4", "A", "<|channel>thought\nthought\n", "thought\n", ""),
        ("gemma4", "A", "<|channel>tho", "tho", ""),
        ("gemma4", "A<|channel>", "thought\na<channel|>b", "a", "b"),
        ("gemma4", "A<|channel>thought\n<channel|>", "thought\nb", "", "thought\nb"),
        ("gemma4", "A", "thought\nb", "", "thought\nb"),
        ("minimax_m3", "A", "<mm:think>a</mm:think>b", "a", "b"),
        ("minimax_m3", "A<mm:think>", "a</mm:think>b", "a", "b"),
        ("minimax_m3", "A", "</mm:think>b</mm:think>", "", "b</mm:think>"),
        ("minimax_m3", "A<mm:think>", "</mm:think>b", "", "b"),
        ("minimax_m3", "A", "</mm:thi", "", "</mm:thi"),
        ("qwen3", "A", "</think>b", "", "</think>b"),
        # channels
        ("kimi_k3", "A", f"{K3_THINK}a\n{K3_THINK_END}\n{K3_SAY}\nb\n{K3_SAY_END}{K3_END}", "a\n",
         "\nb\n"),
        ("kimi_k3", f"A{K3_THINK}", f"a{K3_THINK_END}{K3_SAY}b{K3_SAY_END}\n", "a", "b"),
        ("kimi_k3", f"A{K3_SAY}", f"b {K3_THINK}c{K3_SAY_END}{K3_END}", "", f"b {K3_THINK}c"),
        ("kimi_k3", "A", f"{K3_THINK}a{K3_THINK_END}\n{K3_SAY}b{K3_SAY_END}c", "a", "bc"),
        ("kimi_k3", "A", "a  b\n", "", "a  b\n"),
        ("kimi_k3", "A", f" a  c {K3_SAY}b", "", " a  cb"),
        ("kimi_k3", "A", f"b{K3_SAY_END}{K3_END}", "", "b"),
        ("kimi_k3", f"A{K3_THINK}", f"a{K3_SAY}b", f"a{K3_SAY}b", ""),
        ("kimi_k3", "A", f"{K3_THINK}a{K3_THINK_END}{K3_THINK}b{K3_THINK_END}c", "ab", "c"),
        ("kimi_k3", f"A{K3_THINK}", "a<|clo", "a<|clo", ""),
        ("kimi_k3", "A", f"{K3_SAY}b<|close|>resp", "", "b<|close|>resp"),
        ("kimi_k3", "A", f"{K3_SAY}b{K3_SAY_END}c  <|op", "", "bc  <|op"),
        ("kimi_k3", "A", f"{K3_SAY}b{K3_SAY_END}c \n", "", "bc"),
        ("kimi_k3", "A", f"{K3_SAY}b{K3_SAY_END}<|open|>tools<|sep|>{K3_SAY}", "",
         f"b<|open|>tools<|sep|>{K3_SAY}"),
        ("kimi_k3", "A", "\n\n", "", "\n\n"),
        # marks around the answer
        ("ernie45", "A", "a\n</think>\n\n<response>\nb\nc\n</response>\n", "a\n", "b\nc"),
        ("ernie45", "A", "a</think>\nb\n", "a", "\nb\n"),
        ("ernie45", "A", "a</think><response>b", "a", "b"),
        ("ernie45", "A", "a</think><response>b\n</resp", "a", "b\n</resp"),
        ("ernie45", "A", "a</think><response>\n\nb\n\n</response> c", "a", "\nb\nc"),
        ("ernie45", "A", "a</think> <respo", "a", " <respo"),
        ("ernie45", "A", "a</think>b<response>c</response>", "a", "b<response>c</response>"),
        ("hunyuan_a13b", "A", "<think>a</think><answer>b</answer>", "a", "b"),
        ("hunyuan_a13b", "A", "<answer>\nb</answer><answer>c</answer>", "", "b<answer>c</answer>"),
        ("cohere_command3", "A", "<|START_THINKING|>a<|END_THINKING|>\n<|START_RESPONSE|>b"
         "<|END_RESPONSE|>", "a", "b"),
        ("cohere_command3", "A", "<|START_RESPONSE|>b<|END_RESPONSE|>", "", "b"),
        ("cohere_command4", "<|START_THINKING|>", "a<|END_THINKING|><|START_TEXT|>b<|END_TEXT|>",
         "a", "b"),
        ("cohere_command4", "A", "<|START_RESPONSE|>b<|END_TEXT|>", "", "b<|END_TEXT|>"),
        ("openai_gptoss", "A", "<|channel|>analysis<|message|>a<|end|>b", "a", "b"),
        # thinking that is off: the template has closed it
        ("deepseek_r1", "A</think>", "a", "", "a"),
        ("qwen3", "A<think>\n\n</think>\n\n", " a", "", " a"),
        # a model that does not think, and one that was cut while it did
        ("qwen3", "A", "a <think>b</think>", "", "a <think>b</think>"),
        ("deepseek_r1", "A", "a </thi", "a </thi", ""),
        ("qwen3", "A", "<think>a<", "a<", ""),
        # cut in a marker, or before anything
        ("deepseek_r1", "A", "<thi", "<thi", ""),
        ("qwen3", "A", " <thi", "", " <thi"),
        ("qwen3", "A", "\n\n", "", "\n\n"),
        ("qwen3", "A", "", "", ""),
        # only the first thinking is thinking
        ("qwen3", "A", "<think>a</think>b</think><think>c", "a", "b</think><think>c"),
        ("qwen3", "A", "<think></think>", "", ""),
        ("qwen3", "A", "<think>é</think>🙂", "é", "🙂"),
    ],
)  # fmt: skip
def test_what_is_thinking(form: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    want = Delta(content=content, reasoning=reasoning)
    assert read(text, form, prompt) == want
    for size in range(1, 9):
        assert read(text, form, prompt, [size]) == want, size


def test_nothing_is_held_back_that_is_certain() -> None:
    parser = MessageParser(ReasoningParser(FORMATS["qwen3"], "<think>"))
    assert parser.feed("a<b</thin", is_last=False).reasoning == "a<b"
    assert parser.feed("g", is_last=False).reasoning == "</thing"
    assert parser.feed("</think>c", is_last=False) == Delta(content="c")
    # after the end, no marker is looked for
    assert parser.feed("<", is_last=False) == Delta(content="<")


PARTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<",
        "</",
        "think>",
        "a",
        " ",
        "\n",
        "é",
        "[/THINK]",
        "<|message|>",
        "<response>",
        "</response>",
        "<|channel>",
        "<channel|>",
        "thought\n",
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(PARTS, max_size=8).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.sampled_from(["deepseek_r1", "ernie45", "gemma4", "mistral", "openai_gptoss", "qwen3"]),
    st.sampled_from(["A", "A<think>", "A<think></think>", "[THINK]", "A<|channel>"]),
)
def test_pieces_do_not_matter(text: str, sizes: list[int], form: str, prompt: str) -> None:
    assert read(text, form, prompt, sizes) == read(text, form, prompt)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_hands_out_all_of_a_text(form: str) -> None:
    for text in ("a b", " <b> a", "\n"):
        message = read(text, form, sizes=[1])
        assert message.reasoning + message.content == text


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("abc", (3, None)),
        ("ab<", (2, None)),
        ("ab</end", (2, None)),
        ("a</end>b<x>", (1, "</end>")),
        ("a<x></end>", (1, "<x>")),
        ("</en<x", (4, None)),
        ("", (0, None)),
    ],
)
def test_where_a_marker_may_begin(text: str, want: tuple[int, str | None]) -> None:
    assert find_marker(text, "</end>", "<x>") == want
