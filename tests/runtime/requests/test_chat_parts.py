"""Contents of chats as templates read them: texts, and lists of parts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from specc.errors import ConfigError, RequestError
from specc.runtime.requests.chat_template import ChatTemplate
from tests.template_matrix import transformers_tokenizer

TOKENIZER = transformers_tokenizer()
PARTS = [{"type": "text", "text": " one"}, {"type": "text", "text": "two", "more": 1}]
TEXT = " one\ntwo"
ITEMS = "{% for p in CONTENT %}({{ p.text }}){% endfor %}"
EITHER = "{% if CONTENT is string %}{{ CONTENT }}{% else %}" + ITEMS + "{% endif %}"


def of_each(body: str, content: str = "m.content") -> str:
    inner = body.replace("CONTENT", content)
    return "{% for m in messages %}[{{ m.role }}]" + inner + "{% endfor %}"


# templates that go through parts, in the ways that models' templates do
BY_PART = {
    "loop": of_each(ITEMS),
    "item": of_each(ITEMS, "m['content']"),
    "get": of_each(ITEMS, "m.get('content')"),
    "either": of_each(EITHER),
    "set": of_each("{% set c = m.content %}" + ITEMS.replace("CONTENT", "c")),
    "set twice": of_each("{% set a = m['content'] %}{% set c = a or [] %}" + ITEMS, "c"),
    "macro": "{% macro show(c) %}" + EITHER.replace("CONTENT", "c") + "{% endmacro %}"
    + of_each("{{ show(m.content) }}"),
    "macro by name": "{% macro show(a, c) %}" + ITEMS.replace("CONTENT", "c") + "{% endmacro %}"
    + of_each("{{ show(1, c=m.content) }}"),
    "macros": "{% macro f(c) %}" + ITEMS.replace("CONTENT", "c") + "{% endmacro %}"
    "{% macro g(x) %}{{ f(x) }}{% endmacro %}" + of_each("{{ g(m.content) }}"),
    "filter": of_each(ITEMS, "m.content | selectattr('type', 'equalto', 'text')"),
    "no loop": of_each("{{ CONTENT | map(attribute='text') | join('+') }}"),
    "slice": of_each(ITEMS, "m.content[:]"),
    "condition": of_each(ITEMS, "(m.content if m.content else [])"),
    "loop over some": "{% set all = messages[:] %}{% for x in all %}"
    + ITEMS.replace("CONTENT", "x.content") + "{% endfor %}",
    "index": of_each("{{ m.content[0]['text'] }}|{{ m['content'][-1].text }}"),
}  # fmt: skip
# templates that know nothing but text
BY_TEXT = {
    "sum": of_each("{{ '<' + m.content + '>' }}"),
    "shown": of_each("{{ m.content }}"),
    "trim": of_each("{{ m['content'] | trim }}"),
    "split": of_each("{% for p in m.content.split('o') %}({{ p }}){% endfor %}"),
    "lines": of_each("{% for p in m.content.splitlines() %}({{ p }}){% endfor %}"),
    # what is no text would vanish
    "guard": of_each("{% if m.content is string %}{{ m.content }}{% endif %}"),
    "documents": "{% for d in documents or [] %}{{ d.x }}{% endfor %}" + of_each("{{ m.content }}"),
}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def by_specc(source: str, messages: Any, **options: Any) -> str:
    with contextlib.closing(ChatTemplate(source, {})) as template:
        return template.render(messages, **options)


def by_transformers(source: str, messages: Any) -> Any:
    return TOKENIZER.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.default("loop", "item", "either", "set twice", "macro", "filter", "condition")
@pytest.mark.parametrize("name", BY_PART)
def test_templates_that_read_parts(name: str) -> None:
    """Lists are handed as they are; a text is as transformers has it, where it is shown at all."""
    source = BY_PART[name]
    want = by_transformers(source, user(PARTS))
    assert " one" in want
    assert "two" in want
    assert by_specc(source, user(PARTS)) == want
    alone = [{"type": "text", "text": TEXT}]
    reads_text = name in ("either", "macro")
    want = by_transformers(source, user(TEXT if reads_text else alone))
    assert TEXT in want
    assert by_specc(source, user(TEXT)) == want


@pytest.mark.default("sum", "trim", "lines")
@pytest.mark.parametrize("name", BY_TEXT)
def test_templates_that_read_text(name: str) -> None:
    source = BY_TEXT[name]
    want = by_transformers(source, user(TEXT))
    assert "tw" in want
    assert by_specc(source, user(PARTS)) == by_specc(source, user(TEXT)) == want


def test_parts_of_one_role_and_text_of_another() -> None:
    """Where a text is wanted, parts are one: in a sum, in a filter, by the methods of texts."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}" + ITEMS.replace("CONTENT", "m.content")
        + "{% else %}{{ m.role + m.content }}{{ m.content + '!' }}{{ m.content ~ '?' }}"
        "{{ m.content | upper }}{{ m.content.split('o') }}{{ 'ne' in m.content }}"
        "{{ m.content == ' one\ntwo' }}{{ m.content.startswith(' o') }}{% endif %}{% endfor %}"
    )  # fmt: skip
    system = {"role": "system", "content": PARTS}
    want = by_transformers(source, [system | {"content": TEXT}, *user(PARTS)])
    assert by_specc(source, [system, *user(PARTS)]) == want
    # and a text of the user is a part
    want = by_transformers(source, [system | {"content": TEXT}, *user(PARTS[1:])])
    assert by_specc(source, [system | {"content": TEXT}, *user("two")]) == want


def test_parts_stay_within_the_sandbox() -> None:
    for attack in ("__class__.__mro__", "append(1)", "__getattr__('strip')", "pop()"):
        with pytest.raises(RequestError, match="fails on"):
            by_specc(of_each(EITHER) + "{{ messages[0].content." + attack + " }}", user(PARTS))
    hidden = [{"type": "text", "text": "{0.__class__}"}]
    assert by_specc(BY_TEXT["shown"].replace("m.content", "m.content.format(1)"), user(hidden)) == (
        "[user]"
    )


def test_a_format_that_is_asked_for() -> None:
    either, text = BY_PART["either"], BY_TEXT["shown"]
    assert by_specc(either, user(PARTS), content_format="string") == f"[user]{TEXT}"
    assert by_specc(either, user("a"), content_format="openai") == "[user](a)"
    assert by_specc(text, user(PARTS), content_format="openai") == f"[user]{TEXT}"
    with contextlib.closing(ChatTemplate(either, {}, content_format="string")) as template:
        assert template.render(user(PARTS)) == f"[user]{TEXT}"
        assert template.render(user(PARTS), content_format="auto") == "[user]( one)(two)"
        with pytest.raises(RequestError, match="one of auto, string, openai"):
            template.render(user(PARTS), content_format="list")
    with pytest.raises(ConfigError, match="one of auto, string, openai"):
        ChatTemplate(either, {}, content_format="list")


@pytest.mark.parametrize("name", ["sum", "loop", "either"])
def test_a_message_without_content(name: str) -> None:
    """Its content is empty where the template fails without one, as transformers would then."""
    source = (BY_PART | BY_TEXT)[name]
    parts = [{"type": "text", "text": "a"}]
    first = {"role": "user", "content": parts if name == "loop" else "a"}
    empty = [first, {"role": "assistant", "content": [] if name == "loop" else ""}]
    messages = [first, {"role": "assistant", "content": None}]
    assert by_specc(source, messages) == by_transformers(source, empty)


def test_no_content_is_not_an_empty_one() -> None:
    source = "{{ 'content' in messages[0] }}{{ messages[0].content is defined }}"
    assert by_specc(source, [{"role": "assistant", "content": None}]) == "FalseFalse"
