"""Chat templates render as transformers renders them, in a sandbox."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specc.errors import ConfigError, RequestError
from specc.runtime.requests.chat_template import ChatTemplate, load_template

CALL = {"id": "a", "type": "function", "function": {"name": "ü<", "arguments": {"x": [1]}}}
MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  héllo\n"},
    {"role": "assistant", "content": "hi", "tool_calls": [CALL]},
    {"role": "user", "content": "again"},
]
# of the kinds that models have: whitespace control, loops with break, tojson, generation, macros
TEMPLATES = {
    "chatml": "{% for m in messages %}\n{{ '<|im_start|>' + m['role'] + '\n' + m.content + "
    "'<|im_end|>' }}\n{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}",
    "bos": "{{ bos_token }}{% for m in messages %}[{{ loop.index0 }}]{{ m.content | trim }}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}",
    "tojson": "{% for m in messages %}{{ m.tool_calls | tojson(indent=2) if m.tool_calls }}"
    "{{ m | tojson }}{% endfor %}",
    "break": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}"
    "{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}({{ m.content }}){% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}{{ tools is none }}",
    "indented": "    {% for m in messages %}\n        {{- m.content }}\n    {% endfor %}\nend",
}


def render(source: str, messages: Any = MESSAGES, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages, **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    want, _ = render_jinja_template(
        conversations=[MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert render(TEMPLATES[name]) == want[0]


def test_variables_of_the_request() -> None:
    source = "{{ thinking }}{{ messages | length }}{{ add_generation_prompt }}"
    assert render(source, options={"thinking": "on", "messages": []}) == "on4True"
    assert render(source, add_generation_prompt=False) == "4False"
    # the year, as templates ask for it
    assert render("{{ strftime_now('%Y') }}").startswith("20")


def test_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": 1}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.default(
    "hello-type str",
    "messages2-no messages",
    "messages5-message 0 with a content of type int",
    "messages7-messages.0.content=",
)
@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "type str"),
        ({"role": "user", "content": "a"}, "type dict"),
        ([], "no messages"),
        (["hello"], "message 0 of type str"),
        ([{"content": "a"}], "message 0 without a role"),
        ([{"role": "user", "content": 5}], "message 0 with a content of type int"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\.0\.content=.*'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content="),
        ([{"role": "user", "content": [5]}], "messages.0.content="),
        ([{"role": "user", "content": [{"type": ["text"], "text": "a"}]}], "messages.0.content="),
    ],
)
def test_what_is_no_conversation(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        render("{{ messages[0].content }}", messages)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at.all }}", "fails on"),
        ("{{ 1 / 0 }}", "fails on"),
        ("{{ messages.append(1) }}", "fails on"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails on"),
        ("{{ messages[0].__init__.__globals__ }}", "fails on"),
        ("{% for i in range(10000000) %}{% endfor %}", "fails on"),
        ("{{ open('/etc/passwd').read() }}", "fails on"),
        ("{% include '/etc/passwd' %}", "fails on"),
    ],
)
def test_what_a_template_must_not_do(source: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert words in caught.value.found
    assert "/etc" not in str(caught.value)


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert load_template(None) is None
    assert load_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<B>"}, "eos_token": "<E>"}))
    assert load_template(tmp_path) is None

    def rendered(file: Path | None = None, **options: Any) -> str:
        template = load_template(tmp_path, file)
        assert template is not None
        assert template.names("tools") == ("T{{bos_token}}" in config.read_text())
        return template.render([{"role": "user", "content": "x"}], options=options)

    named = [
        {"name": "tool_use", "template": "T{{bos_token}}{{ tools[0] }}"},
        {"name": "default", "template": "D{{bos_token}}"},
    ]
    config.write_text(json.dumps({"bos_token": {"content": "<B>"}, "chat_template": named}))
    # transformers has a template of its own for tools, if there is one
    assert rendered() == rendered(tools=[]) == "D<B>"
    assert rendered(tools=["a"]) == "T<B>a"
    config.write_text(json.dumps({"bos_token": "<B>", "chat_template": "C{{ bos_token }}"}))
    assert rendered() == "C<B>"
    (tmp_path / "chat_template.jinja").write_text("J{{ bos_token }}")
    assert rendered() == "J<B>"
    (tmp_path / "mine").write_text("M{{ bos_token }}")
    assert rendered(tmp_path / "mine") == "M<B>"
    for bad in ("{% for %}", "{{ x"):
        (tmp_path / "mine").write_text(bad)
        with pytest.raises(ConfigError, match="--chat-template"):
            load_template(tmp_path, tmp_path / "mine")
    with pytest.raises(ConfigError, match="No such file"):
        load_template(tmp_path, tmp_path / "none")
    (tmp_path / "mine").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_template(None, tmp_path / "mine")
    config.write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        load_template(tmp_path)
    config.write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ConfigError, match="nested more than 64 levels"):
        load_template(tmp_path)


def test_without_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match="jinja2, which chat templates are written in"):
        ChatTemplate("a", {})
