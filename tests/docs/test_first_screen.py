"""The picture of README's first screen shows what README says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specc import api
from specc.artifact.directory import open_engine
from specc.compiler.build import Compilation
from specc.config import CompileConfig
from tests import engines
from tests.command_line import invoke
from tests.docs.first_screen import COLUMNS, CUT, PICTURE, ROOT, commands, cut, draw, shown

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


def told(lines: Sequence[str]) -> list[str]:
    """What does not depend on the machine: without progress, times, speeds and verdicts."""
    kept = [line.rstrip() for line in lines if line.strip() and "━" not in line]
    kept = [re.sub(": this is slower, .*", "", line) for line in kept]
    names = "time:|tokens/s|plain decoding  |speed-up|time to first token|ms per step"
    timed = re.compile(rf"((?:{names}) ?)(.*)")
    return [timed.sub(lambda m: m[1] + re.sub(r"[\d.]+", "0", m[2]), line) for line in kept]


def test_the_commands_print_what_the_picture_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word for word, figures too; the engine is one that compiles no code, and kept."""
    # whatever the terminal is that the tests run in
    monkeypatch.setenv("COLUMNS", str(COLUMNS))

    def build(target: Path, drafts: Any, output: Path, config: CompileConfig, **_: Any) -> Any:
        engines.build(Path(target), [Path(x) for x in drafts], output, config, is_probed=True)
        return Compilation(open_engine(output), [])

    monkeypatch.setattr(api, "build", build)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    screen = []
    for command in commands():
        result = invoke(*shlex.split(command)[1:])
        assert result.exit_code == 0, result.output
        screen += [f"$ {command}", *result.output.split("\n")]
    wanted = shown(PICTURE.read_text(encoding="utf-8"))
    assert told(cut("\n".join(screen)).replace("\x1b[0m", "").split("\n")) == told(wanted)


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
