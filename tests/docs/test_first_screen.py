"""The picture of README's first screen shows what README says."""

from __future__ import annotations

import re

import pytest

from tests.docs.first_screen import CUT, PICTURE, ROOT, commands, cut, draw, shown

SCREEN = "\n".join(
    [
        "$ specc compile -o 'a & b'", "\x1b[38;5;70m━━━━\x1b[0m  0.3 s", "\x1b[1mengine",
        f"{CUT[0]}  dtype\x1b[0m", "target  6.8 M", f"{CUT[1]} of 9 tokens", "", "time: 9.5 s",
    ]
)  # fmt: skip


def test_the_commands_are_those_of_readme() -> None:
    lines = shown(PICTURE.read_text(encoding="utf-8"))
    assert [line[2:] for line in lines if line.startswith("$ ")] == commands()
    assert len(commands()) == 2


def test_the_figures_that_readme_says_of_it_are_in_it() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"!\[([^]]*)\]\(docs/first-screen\.svg\)", readme)
    lines = "\n".join(shown(PICTURE.read_text(encoding="utf-8")))
    length, saved, passes = re.findall(r"\d+\.\d+|\d+(?= of)|(?<= of )\d+", text)
    assert f"mean acceptance length  {length} " in lines
    assert re.search(rf"target passes saved +{saved} ", lines)
    assert re.search(rf"target passes +\d+ for {passes} tokens", lines)
    for plan in re.findall(r"chain-\d+|off", text):
        assert f"plan {plan}" in lines


def test_a_picture_is_text_and_asks_no_server() -> None:
    picture = PICTURE.read_text(encoding="utf-8")
    assert len(picture) < 40_000
    assert "url(http" not in picture
    assert "@import" not in picture


def test_what_is_drawn_is_read_again() -> None:
    lines = shown(draw(cut(SCREEN)))
    wanted = ["$ specc compile -o 'a & b'", "━━━━  0.3 s", "engine", "[…]", "time: 9.5 s"]
    assert [line for line in lines if line] == wanted


def test_a_screen_without_the_tables_is_not_cut() -> None:
    with pytest.raises((RuntimeError, StopIteration)):
        cut("time: 9.5 s")
