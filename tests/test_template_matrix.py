"""The figures of docs/notebook/serving.md come of a comparison that sees what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import template_matrix
from tests.template_matrix import CONVERSATIONS, REASONS

OF_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | default('') }}{% for c in m.tool_calls or"
    " [] %}{{ c.function | tojson }}{% endfor %}{{ m.reasoning_content }}{% endfor %}"
    "{{ tools | tojson if tools }}{{ reasoning_effort }}{{ '=' if add_generation_prompt }}"
)
SUMS = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
OF_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content or [] %}{{ p.text }}{% endfor %}"
    "{% endfor %}"
)
REASONING = "{% for m in messages %}{{ m.content }}{{ m.reasoning }}{% endfor %}"


def cells(tmp_path: Path, source: str) -> dict[str, str]:
    (tmp_path / "one.jinja").write_text(source)
    (found,) = template_matrix.matrix(tmp_path).values()
    return found


def test_nothing_differs_without_a_reason(tmp_path: Path) -> None:
    assert len(CONVERSATIONS) == 24
    seen: set[str] = set()
    for source in (OF_TEXT, SUMS, OF_PARTS, REASONING):
        found = cells(tmp_path, source)
        assert list(found) == list(CONVERSATIONS)
        assert "different" not in found.values()
        seen |= set(found.values())
    assert seen <= {"equal", "refused"} | {name for name, _ in REASONS}
    assert seen >= {"equal", "empty content", "parts joined", "text as a part"}
    assert cells(tmp_path, "{% for %}") == dict.fromkeys(CONVERSATIONS, "refused")


def test_what_differs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        template_matrix, "render", lambda template, wanted: "x" + wanted.messages[0].role
    )
    assert set(cells(tmp_path, OF_TEXT).values()) == {"different"}


def test_the_command(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "sums.jinja").write_text(SUMS)
    monkeypatch.setattr("sys.argv", ["", str(tmp_path)])
    template_matrix.main()
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("sums ")
    assert "24 prompts of 1 templates and 24 conversations" in rest
