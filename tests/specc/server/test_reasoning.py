"""Thinking over HTTP, with the OpenAI client and steps of 1 to 8 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specc.errors import ConfigError
from specc.runtime.requests.chat_template import ChatTemplate
from specc.server.config import ServeConfig
from tests.specc.server.scripted import TEMPLATE, Script, serve_scripted
from tests.specc.server.serving import MODEL, Server

USER = {"role": "user", "content": "hi"}
TEXT = "<think>\nOne and one <b>\n</think>\n\nTwo, é 🙂"
REASONING, CONTENT = "\nOne and one <b>\n", "\n\nTwo, é 🙂"


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Server, Script]]:
    with serve_scripted(reasoning_parser="qwen3") as made:
        yield made


def say(script: Script, text: str, whole: bool = True, **variables: Any) -> None:
    prompt = ChatTemplate(TEMPLATE, {}).render([USER], options=variables)
    script.set(text, prompt, whole)


def ask(server: Server, **options: Any) -> Any:
    options = {"temperature": 0} | options
    return server.client.chat.completions.create(model=MODEL, messages=[USER], **options)


def streamed(server: Server, **options: Any) -> tuple[dict[str, str], list[str | None], list[Any]]:
    """Texts of all deltas, joined; finish reasons; chunks."""
    texts = {"content": "", "reasoning": "", "reasoning_content": ""}
    reasons, chunks = [], list(ask(server, stream=True, **options))
    for chunk in chunks:
        for choice in chunk.choices:
            reasons.append(choice.finish_reason)
            for name in texts:
                texts[name] += getattr(choice.delta, name, None) or ""
    return texts, reasons, chunks


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_message_and_its_stream(rig, whole: bool) -> None:
    """Markers that are special tokens, which texts leave out, and markers of many tokens."""
    server, script = rig
    say(script, TEXT, whole)
    answer = ask(server, extra_body={"return_spec_metrics": True})
    (choice,) = answer.choices
    assert choice.message.content == CONTENT
    assert choice.message.reasoning == choice.message.reasoning_content == REASONING
    assert choice.finish_reason == "stop"
    # one step for each number of tokens, from 1 to 8, but for the last few
    histogram = answer.metrics["speculative_decoding"]["acceptance_histogram"]
    assert all(count >= 1 for count in histogram[:7])
    texts, reasons, chunks = streamed(server)
    assert texts == {
        "content": CONTENT, "reasoning": REASONING, "reasoning_content": REASONING,
    }  # fmt: skip
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert len(chunks) > 5
    # other special tokens stay out of the text
    script.set("<think>a</think>b[ARGS]c", ChatTemplate(TEMPLATE, {}).render([USER]))
    assert ask(server).choices[0].message.content == "bc"


def test_the_prompt_says_how_an_output_begins(rig) -> None:
    server, script = rig
    for end, reasoning, content in (
        ("<think>\n", "a", "b"),
        ("<think></think>", None, "a</think>b"),
    ):
        say(script, "a</think>b", thinking=end)
        more = {"extra_body": {"chat_template_kwargs": {"thinking": end}}}
        message = ask(server, **more).choices[0].message
        assert (message.reasoning, message.content) == (reasoning, content)


def test_thinking_that_is_cut(rig) -> None:
    server, script = rig
    say(script, TEXT)
    choice = ask(server, max_tokens=5).choices[0]
    assert (choice.message.reasoning, choice.message.content) == ("\nOne", None)
    assert choice.finish_reason == "length"
    texts, reasons, _ = streamed(server, max_tokens=5)
    assert (texts["reasoning"], texts["content"], reasons[-1]) == ("\nOne", "", "length")


def test_what_is_asked_for_beside_it(rig) -> None:
    server, script = rig
    say(script, TEXT, whole=False)
    # a stop string ends the output wherever it is
    choice = ask(server, stop=["one <"]).choices[0]
    assert (choice.message.reasoning, choice.stop_reason) == ("\nOne and ", "one <")
    # every token has its log probability, those of markers too, and usage counts them
    answer = ask(server, logprobs=True, n=2)
    assert answer.usage.completion_tokens == 2 * (len(TEXT.encode()) + 1)
    for choice in answer.choices:
        assert (choice.message.reasoning, choice.message.content) == (REASONING, CONTENT)
        assert bytes(b for entry in choice.logprobs.content[:-1] for b in entry.bytes) == (
            TEXT.encode()
        )
    texts, _, chunks = streamed(
        server,
        logprobs=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert texts["reasoning"] == REASONING
    entries = [e for c in chunks for o in c.choices for e in o.logprobs.content]
    assert len(entries) == len(TEXT.encode()) + 1
    hidden = ask(server, extra_body={"include_reasoning": False}).choices[0].message
    assert (hidden.content, hidden.reasoning) == (CONTENT, None)
    texts, _, _ = streamed(server, extra_body={"include_reasoning": False})
    assert texts == {"content": CONTENT, "reasoning": "", "reasoning_content": ""}


def test_a_form_leaves_no_room_for_thinking(rig) -> None:
    pytest.importorskip("llguidance")
    server, script = rig
    say(script, "abba", thinking="<think>")
    more = {"chat_template_kwargs": {"thinking": "<think>"}, "guided_choice": ["abba", "baab"]}
    message = ask(server, extra_body=more).choices[0].message
    assert (message.content, message.reasoning) == ("abba", None)


def test_unknown_parsers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of cohere_command3, .*deepseek_r1, .*, qwen3"):
        ServeConfig(reasoning_parser="r1")
