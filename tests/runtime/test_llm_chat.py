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


@pytest.mark.parametrize(
    ("messages", "options", "prompt"),
    [
        ([USER], {"chat_template": TEXT}, "hi;"),
        ([PARTS], {"chat_template": TEXT}, "a\nb;"),
        ([PARTS], {"chat_template": EITHER}, "ab;"),
        ([PARTS], {"chat_template": EITHER, "chat_template_content_format": "string"}, "a\nb;"),
        ([USER], {"chat_template": EITHER, "chat_template_content_format": "openai"}, "hi;"),
        ([USER, BEGUN], {"chat_template": TEXT, "continue_final_message": True}, "hi;it"),
    ],
)
def test_a_template_in_text(tiny_engine: Path, messages: Any, options: Any, prompt: str) -> None:
    options["add_generation_prompt"] = not options.get("continue_final_message")
    with LLM(tiny_engine) as llm:
        assert llm.chat(messages, TWO, **options)[0].prompt == prompt
        if "chat_template_content_format" not in options:
            text = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, **options)
            assert text == prompt

    async def run() -> Any:
        async with AsyncLLM(tiny_engine) as llm:
            return [output async for output in llm.chat(messages, TWO, "a", **options)][-1]

    assert asyncio.run(run()).prompt == prompt


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
