"""What of a chat reaches its template, and what its client is told when the template refuses."""

from __future__ import annotations

from typing import Any

import pytest

from specc.runtime.requests.chat_template import ChatTemplate
from specc.server.endpoints import render
from specc.server.errors import ApiError
from specc.server.protocol import ChatRequest

USER = {"role": "user", "content": "a"}


def rendered(source: str, *messages: dict[str, Any], **more: Any) -> str:
    wanted = ChatRequest.model_validate({"messages": list(messages), **more})
    return render(ChatTemplate(source, {}), wanted)


def test_the_fields_of_a_message() -> None:
    call = {"role": "assistant", "name": "ü"}
    source = "{{ messages[0] | tojson }}"
    # no content, as the client has sent none; templates ask for it
    assert rendered(source, call) == '{"role": "assistant", "name": "ü"}'
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": 1}]
    assert '"a\\nb"' in rendered(source, {"role": "user", "content": parts})


def test_what_the_request_says() -> None:
    source = "{{ add_generation_prompt }}{{ thinking }}"
    assert rendered(source, USER, chat_template_kwargs={"thinking": 1}) == "True1"
    assert rendered(source, USER, add_generation_prompt=False) == "False"


@pytest.mark.parametrize(
    ("source", "content", "param", "words"),
    [
        ("a", [{"type": "image_url"}], "messages.1.content", "image_url"),
        ("{{ raise_exception('no') }}", "a", "messages", "refuses: no"),
        ("{{ raise_exception('a=b') }}", "a", "messages", "refuses: a=b"),
        ("{{ 1 / 0 }}", "a", "messages", "fails on"),
    ],
)
def test_whose_fault_it_is(source: str, content: Any, param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(source, USER, {"role": "user", "content": content})
    assert caught.value.status == 400
    assert caught.value.param == param
    assert words in caught.value.message
