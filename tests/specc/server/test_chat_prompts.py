"""Chats that go on with a message, repeat it, or bring their own template, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from specc.runtime.requests.chat_template import ChatTemplate
from tests.specc.server.scripted import Script, serve_scripted
from tests.specc.server.serving import Server, assert_error, serve

CHATS = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "It is"}
PARTS = [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]
SAID = " about 21."


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Server, Script]]:
    template = ChatTemplate({"default": TEMPLATE, "rag": "rag {{ messages[0].content }}"}, {})
    with serve_scripted(template, trust_request_chat_template=True) as made:
        yield made


def answer(server: Server, *messages: Any, **options: Any) -> dict[str, Any]:
    body = {"messages": list(messages), "temperature": 0, "return_token_ids": True, **options}
    found = server.post(CHATS, body)
    assert found.status_code == 200, found.text
    return found.json()


def prompt_of(server: Server, found: dict[str, Any]) -> str:
    return server.engine.tokenizer.decode(found["prompt_token_ids"])


CASES: list[tuple[list[Any], dict[str, Any], str, str, str]] = [
    # messages, options, prompt, and the answer's role and content
    ([USER, BEGUN], {"continue_final_message": True}, "<hi><It is", "assistant", SAID),
    (
        [USER, BEGUN], {"continue_final_message": True, "echo": True}, "<hi><It is", "assistant",
        "It is" + SAID,
    ),
    (
        [USER, BEGUN | {"content": PARTS}],
        {"continue_final_message": True, "echo": True, "add_generation_prompt": False},
        "<hi><It\nis", "assistant", "It\nis" + SAID,
    ),
    # another role's message is not repeated, as with vLLM
    ([USER], {"echo": True}, "<hi>=", "assistant", SAID),
    ([USER, BEGUN], {"echo": True}, "<hi><It is>=", "assistant", "It is" + SAID),
    ([USER], {"add_generation_prompt": False}, "<hi>", "user", SAID),
    ([USER], {"add_generation_prompt": False, "echo": True}, "<hi>", "user", "hi" + SAID),
    ([USER], {"chat_template": "rag"}, "rag hi", "assistant", SAID),
    ([USER], {"chat_template": "own {{ messages[0].role }}"}, "own user", "assistant", SAID),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_prompt_and_its_answer(rig, case: int) -> None:
    server, script = rig
    messages, options, prompt, role, content = CASES[case]
    script.set(SAID, prompt)
    found = answer(server, *messages, **options)
    assert prompt_of(server, found) == prompt
    message = found["choices"][0]["message"]
    assert (message["role"], message["content"]) == (role, content)
    stream = server.post(CHATS, {"messages": messages, "temperature": 0, "stream": True, **options})
    lines = [x for x in stream.text.split("\n\n") if x and not x.endswith("[DONE]")]
    deltas = [json.loads(x.removeprefix("data: "))["choices"][0]["delta"] for x in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert [delta["role"] for delta in deltas if "role" in delta] == [role]


def test_a_template_of_the_request_that_is_wrong(rig) -> None:
    server, _ = rig
    for source, words in (("{% for %}", "Jinja does not take"), ("none", "default, rag")):
        found = server.post(CHATS, {"messages": [USER], "chat_template": source})
        assert_error(found, 400, words, param="chat_template")
    body = {"messages": [USER], "chat_template_kwargs": {"chat_template": "a{{ 1 }}"}}
    assert_error(server.post(CHATS, body), 400, "a field of its own", param="chat_template_kwargs")
    body = {"messages": [USER], "chat_template": 5}
    assert_error(server.post(CHATS, body), 400, param="chat_template")
    body = {
        "messages": [USER, BEGUN],
        "continue_final_message": True,
        "add_generation_prompt": True,
    }
    assert_error(server.post(CHATS, body), 400, param="continue_final_message")


def test_templates_of_requests_need_trust() -> None:
    """A template is a program, and says what stands in the prompt; names are the model's own."""
    template = ChatTemplate({"default": "D", "rag": "rag {{ messages[0].content }}"}, {})
    with serve(template=template) as server:
        for source in ("own {{ messages }}", "x", "/etc/passwd", ""):
            found = server.post(CHATS, {"messages": [USER], "chat_template": source})
            words = "--trust-request-chat-template is not set"
            assert_error(found, 400, words, param="chat_template")
        body = {"messages": [USER], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        found = server.post(CHATS, body | {"chat_template": "rag"}).json()
        assert prompt_of(server, found) == "rag hi"
        assert server.post(CHATS, body | {"chat_template": None}).status_code == 200


def test_efforts_that_there_are(rig) -> None:
    server, script = rig
    script.set(SAID, "high")
    source = "{{ reasoning_effort }}"
    found = answer(server, USER, chat_template=source, reasoning_effort="high")
    assert prompt_of(server, found) == "high"
    body = {"messages": [USER], "reasoning_effort": "hgih"}
    assert_error(server.post(CHATS, body), 400, param="reasoning_effort")
