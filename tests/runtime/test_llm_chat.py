"""`LLM.chat`: templates by text, file and name, and what their contents are handed as."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from specc import LLM, AsyncLLM
from specc.errors import ConfigError, RequestError
from specc.sampling.params import SamplingParams

TWO = SamplingParams(max_tokens=2, temperature=0)
USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "it"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
TEXT = "{% for m in messages %}{{ m.content }};{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %};{% endfor %}"
)


@pytest.fixture
def named(tiny_engine: Path, tmp_path: Path) -> Path:
    """The tiny engine, with templates for tools and documents, and none for chats."""
    for file in tiny_engine.iterdir():
        (tmp_path / file.name).symlink_to(file)
    others = tmp_path / "additional_chat_templates"
    others.mkdir()
    for name in ("tool_use", "rag"):
        (others / f"{name}.jinja").write_text(name[0] + "{{ tools | length if tools }}")
    return tmp_path


IN_TEXT: list[tuple[Any, dict[str, Any], str]] = [
    ([USER], {"chat_template": TEXT}, "hi;"),
    ([PARTS], {"chat_template": TEXT}, "a\nb;"),
    ([PARTS], {"chat_template": EITHER}, "ab;"),
    ([PARTS], {"chat_template": EITHER, "chat_template_content_format": "string"}, "a\nb;"),
    ([USER], {"chat_template": EITHER, "chat_template_content_format": "openai"}, "hi;"),
    ([USER, BEGUN], {"chat_template": TEXT, "continue_final_message": True}, "hi;it"),
]


def test_a_template_in_text(tiny_engine: Path) -> None:
    def options_of(given: dict[str, Any]) -> dict[str, Any]:
        return given | {"add_generation_prompt": not given.get("continue_final_message")}

    with LLM(tiny_engine) as llm:
        for messages, given, prompt in IN_TEXT:
            options = options_of(given)
            assert llm.chat(messages, TWO, **options)[0].prompt == prompt
            if "chat_template_content_format" not in options:
                tokenizer = llm.get_tokenizer()
                text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
                assert text == prompt

    async def run() -> list[str]:
        async with AsyncLLM(tiny_engine) as llm:
            return [
                [output async for output in llm.chat(messages, TWO, "a", **options_of(given))][-1]
                .prompt
                for messages, given, _ in IN_TEXT
            ]  # fmt: skip

    assert asyncio.run(run()) == [prompt for *_, prompt in IN_TEXT]


def test_templates_by_name(named: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with LLM(named) as llm:
        assert llm.chat([USER], TWO, tools=[tool])[0].prompt == "t1"
        assert llm.chat([USER], TWO, chat_template="rag")[0].prompt == "r"
        with pytest.raises(RequestError, match="rag, tool_use, none of which is the default"):
            llm.chat([USER], TWO)
        with pytest.raises(ConfigError, match="No such file"):
            llm.chat([USER], TWO, chat_template="default")


def test_options_of_chats_alone(tiny_engine: Path) -> None:
    with LLM(tiny_engine) as llm:
        for options in ({"chat_template": TEXT}, {"continue_final_message": True},
                        {"chat_template_content_format": "openai"}):  # fmt: skip
            with pytest.raises(RequestError, match="pass it to chat"):
                llm.generate("a", TWO, **options)
        llm.generate("a", TWO, continue_final_message=False, chat_template_content_format="auto")
        with pytest.raises(RequestError, match="add_generation_prompt=False"):
            llm.chat([USER, BEGUN], TWO, chat_template=TEXT, continue_final_message=True)
        with pytest.raises(RequestError, match="one of auto, string, openai"):
            llm.chat([USER], TWO, chat_template=TEXT, chat_template_content_format="json")
