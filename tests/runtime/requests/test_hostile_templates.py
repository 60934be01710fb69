"""Chat templates that come with a checkpoint cost neither this process nor its memory anything."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

import pytest

from specc.errors import ConfigError, RequestError
from specc.runtime.processes.bounded_child import ChildLimits
from specc.runtime.requests.chat_template import MAX_CHARACTERS, ChatTemplate, load_template

LIMITS = ChildLimits(
    cpu_seconds=0.3, memory_bytes=128 << 20, answer_bytes=48 << 20, stack_bytes=16 << 20
)
USER = [{"role": "user", "content": "hello"}]
ENDLESS = (
    "{% set ns = namespace(s='a') %}"
    + "{% for i in range(9999) %}{% for j in range(9999) %}" * 2
    + "{% set ns.s = ns.s[:5] + 'b' %}"
    + "{% endfor %}{% endfor %}" * 2
)
# source → what is said about it, at the start or with the first messages
HOSTILE = {
    "constant": ('{{ "x" * 3000000000 }}', "too much memory"),
    "power": ("{{ 9**(9**9) }}", "more than"),
    "loops": (ENDLESS, "more than"),
    "output": (
        "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        f"room: more than {MAX_CHARACTERS}",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on"),
}
MORE = {
    "range": ("{% for i in range(10**9) %}{% endfor %}", "fails on"),
    "nested": ("{% if true %}" * 3000 + "{% endif %}" * 3000, "Jinja does not take"),
    "parentheses": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "Jinja does not take"),
    "many lists": ("{{ " + "[" * 300 + "]" * 300 + " }}", "Jinja does not take"),
    "old formats": ("{{ '%1000000000d' % 1 }}", "too much memory"),
    "formats": ("{{ '{:1000000000d}'.format(1) }}", "too much memory"),
    "center": ("{{ messages[0].content.center(3000000000) }}", "too much memory"),
    "center filter": ("{{ 'a' | center(3000000000) }}", "too much memory"),
    "indent": ("{{ messages | tojson(indent=10**9) }}", "too much memory"),
    "indent filter": ("{{ 'a\\na' | indent(10**9) }}", "too much memory"),
    "replace": ("{{ ('a' * 9999) | replace('a', 'b' * 999999) }}", "too much memory"),
    "doubling": (
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}{{ ns.s }}",
        "too much",
    ),
    "doubled lists": (
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
        "{% endfor %}{{ ns.s }}",
        "too much",
    ),
    "time": ("{{ strftime_now('%Y' * 100000000) }}", "too much memory"),
    "refusal": ("{{ raise_exception('x' * 100000000) }}", "refuses|too much memory"),
    "sorting": ("{{ (range(99999) | list) * 9999 | sort }}", "too much|fails on"),
    "source": ("a" * 2_000_000, "2000000 characters"),
}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def render(source: str) -> str:
    with contextlib.closing(ChatTemplate(source, {}, LIMITS)) as template:
        return template.render(USER)


def rejects(source: str, words: str) -> None:
    """At the start or with the first messages, and with no memory of this process.

    What would not end at all: how soon it ends is up to limits of the processor's time.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ConfigError, RequestError), match=words) as caught:
        render(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert len(caught.value.found) < 1200
    assert all((caught.value.found, caught.value.needed, caught.value.do))


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(ENDLESS, id="any chat"),
        pytest.param("{% if tools %}" + ENDLESS + "{% endif %}", id="tools"),
        pytest.param("{{ 'x' * 3000000000 }}{{ messages }}", id="memory"),
        pytest.param(HOSTILE["output"][0], id="characters"),
    ],
)
def test_what_fails_every_chat_is_refused_at_the_start(source: str) -> None:
    """And not with each of them."""
    with pytest.raises(ConfigError, match="a chat template that takes too much"):
        ChatTemplate(source, {}, LIMITS)
    with pytest.raises(ConfigError, match=r"a chat template \(tool_use\) that takes too much"):
        ChatTemplate({"default": "D", "tool_use": source}, {}, LIMITS)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_takes_too_much_is_refused(name: str) -> None:
    rejects(*HOSTILE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_and_so_is_more_of_it(name: str) -> None:
    rejects(*MORE[name])


def test_the_next_messages_are_rendered_again() -> None:
    """Some messages cost the process that renders them its life, and others nothing."""
    source = (
        "{% if messages[0].content == 'die' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    )
    with contextlib.closing(ChatTemplate(source, {}, LIMITS)) as template:
        assert template.render(USER) == "hello"
        first = template._pool.pids
        with pytest.raises(RequestError, match="takes too much to render: it took more than"):
            template.render([{"role": "user", "content": "die"}])
        assert template.render(USER) == "hello"
        assert template._pool.pids != first
        with pytest.raises(RequestError, match="no plain data"):
            template.render([{"role": "user", "content": "a", "more": object()}])
        assert template.render(USER, options={"more": {"a": [1, None, 2.5]}}) == "hello"
        pids = template._pool.pids
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "children go on"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_long_template_is_no_large_job_each_time() -> None:
    """60 KB take longer to compile than small jobs may; rendering them takes a millisecond."""
    part = "{% if message.x %}{{ 'a' + message.role + message.content }}{% endif %}\n"
    source = "{% for message in messages %}" + part * (60_000 // len(part)) + "{% endfor %}D"
    template = ChatTemplate(source, {})
    try:
        assert template._pool.small_cpu_s > 0.1
        assert template.render(USER).endswith("D")
        first = template._pool.pids
        assert template.render(USER).endswith("D")
        assert first
        assert template._pool.pids == first
    finally:
        template.close()


def test_side_files_that_are_no_help(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": ["a", {"name": "default", "template": "D{{bos_token}}"}],'
                      ' "bos_token": {"lstrip": true}}')  # fmt: skip
    template = load_template(tmp_path)
    assert template is not None
    assert template.render(USER) == "D"
    template.close()
    os.truncate(config, (64 << 20) + 1)
    with pytest.raises(ConfigError, match="67108865 bytes"):
        load_template(tmp_path)
