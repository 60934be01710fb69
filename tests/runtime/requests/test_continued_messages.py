"""`continue_final_message`: prompts that end within the last message, as transformers has them."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest

from specc.errors import RequestError
from specc.runtime.requests.chat_template import ChatTemplate
from tests.template_matrix import transformers_tokenizer

TOKENIZER = transformers_tokenizer()
USER = {"role": "user", "content": "x"}
CONTINUED: dict[str, Any] = {
    "text": {"content": "It is about"},
    "white space": {"content": " It is  \n"},
    "empty": {"content": ""},
    "parts": {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "It is "}]},
    "thinking": {"content": "b", "reasoning_content": "It is"},
    "nothing": {"content": None},
    "no text": {"content": []},
}
FINAL = {
    "as it is": "{% for m in messages %}<{{ m.content }}>{% endfor %}",
    "parts": "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}>{% endfor %}",
    "trimmed": "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}",
    "thinking": "{% for m in messages %}<{{ m.thinking }}|{{ m.content }}>{% endfor %}",
    "not shown": "{% for m in messages %}<{{ m.content[:3] }}>{% endfor %}",
    "not read": "{{ messages | length }}",
}


def by_transformers(source: str, messages: Any, field: bool | str) -> Any:
    """None where it fails, which it does in several ways."""
    with contextlib.suppress(ValueError, TypeError, IndexError):
        return TOKENIZER.apply_chat_template(
            copy.deepcopy(messages),
            chat_template=source,
            continue_final_message=field,
            tokenize=False,
        )
    return None


@pytest.mark.parametrize("name", FINAL)
def test_a_prompt_ends_within_a_message(name: str) -> None:
    source = FINAL[name]
    num_ended = 0
    with contextlib.closing(ChatTemplate(source, {})) as template:
        for message, fields in CONTINUED.items():
            messages = [USER, {"role": "assistant", **fields}]
            told = messages
            if isinstance(fields["content"], list) and name != "parts":
                # a template of text gets one
                text = "\n".join(part["text"] for part in fields["content"])
                told = [USER, {"role": "assistant", "content": text}]
            for field in (True, "reasoning_content"):
                want = by_transformers(source, told, field)
                try:
                    got = template.render(messages, False, continue_final_message=field)
                except RequestError as error:
                    assert error.found.startswith("continue_final_message=")  # noqa: PT017
                    got = None
                assert got == want, (message, field)
                num_ended += want is not None
        with pytest.raises(RequestError, match="add_generation_prompt=False"):
            template.render([USER], True, continue_final_message=True)
    assert (num_ended == 0) == name.startswith("not ")
