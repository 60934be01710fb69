"""Checkpoints with several chat templates, and templates that a caller brings."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from specc.errors import ConfigError, RequestError
from specc.runtime.processes.bounded_child import ChildLimits
from specc.runtime.requests.chat_template import ChatTemplate, load_template

# files of a checkpoint: how transformers >= 4.52 saves several templates, and how it did before
NAMED = [{"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]
SEVERAL: dict[str, dict[str, Any]] = {
    "files": {"chat_template.jinja": "D", "additional_chat_templates/tool_use.jinja": "T"},
    "no default in files": {"additional_chat_templates/tool_use.jinja": "T"},
    "another name": {"chat_template.jinja": "D", "additional_chat_templates/rag.jinja": "R"},
    "files go first": {
        "additional_chat_templates/rag.jinja": "R",
        "chat_template": [*NAMED, {"name": "default", "template": "D"}],
    },
    "list": {"chat_template": [*NAMED, {"name": "default", "template": "D"}]},
    "tool_use alone": {"chat_template": NAMED[:1]},
    "rag alone": {"chat_template": NAMED[1:]},
    "object": {"chat_template": {"default": "D", "tool_use": "T"}},
    "one": {"chat_template": "D"},
}


@pytest.mark.parametrize("files", SEVERAL)
def test_which_of_several_is_as_with_transformers(tmp_path: Path, files: str) -> None:
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer

    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, value in SEVERAL[files].items():
        if name == "chat_template":
            config[name] = value
            continue
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    template = load_template(tmp_path)
    assert template is not None
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = [{"role": "user", "content": "x"}]
    for tools in (None, [tool]):
        for name in (None, "default", "tool_use", "rag", "{{ messages[0].content }}"):
            if files == "one" and name == "default":
                # what the only one is called here
                continue
            try:
                want = tokenizer.apply_chat_template(
                    messages, tools=tools, chat_template=name, tokenize=False
                )
            except ValueError:
                want = None
            if name is not None and want == name:
                # a name that it has not got is a text to it
                want = None
            try:
                got = template.render(messages, False, {"tools": tools}, template=name)
            except RequestError as error:
                assert error.found.startswith("chat_template=")  # noqa: PT017
                got = None
            assert got == want, (tools, name)


def test_another_template_than_the_engines(tmp_path: Path) -> None:
    """Text, a file, or a name."""
    user = [{"role": "user", "content": "x"}]
    file = tmp_path / "mine.jinja"
    file.write_text("M{{ messages[0].content }}")
    limits = ChildLimits(cpu_seconds=0.3, memory_bytes=128 << 20)
    several = {"default": "D", "rag": "R"}
    with contextlib.closing(ChatTemplate(several, {}, limits)) as template:
        for given, want in ((file, "Mx"), (str(file), "Mx"), ("rag", "R"), (None, "D"),
                            ("{{ messages[0].role }}", "user"), ("a\nb", "a\nb")):  # fmt: skip
            assert template.render(user, template=template.read(given)) == want
        # many, of which a child keeps a few
        for number in range(20):
            source = "{# " + str(number) + " #}{{ messages[0].content }}" + str(number)
            assert template.render(user, template=source) == f"x{number}"
        with pytest.raises(ConfigError, match="No such file"):
            template.read("none.jinja")
        for bad, words in (
            ("{% for %}", "that Jinja does not take"),
            ("{{ 9**(9**9) }}", "takes too much"),
            ("{" * (1 << 20), "of 1048576|that Jinja"),
            ("a" * (1 << 20) + "\n", "of 1048577 characters"),
            ("none", "the name of one of the engine's: default, rag"),
        ):
            with pytest.raises(RequestError, match=words):
                template.render(user, template=bad)
        assert template.render(user) == "D"
    # the name of one of the engine's, for a server
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    chosen = load_template(tmp_path, Path("rag"))
    assert chosen is not None
    assert chosen.render(user) == "R"


def test_without_a_template() -> None:
    user = [{"role": "user", "content": "x"}]
    template = load_template(None, may_be_empty=True)
    assert template is not None
    with contextlib.closing(template):
        with pytest.raises(RequestError, match="an engine without a chat template"):
            template.render(user)
        assert template.render(user, template="{{ messages[0].content }}") == "x"
