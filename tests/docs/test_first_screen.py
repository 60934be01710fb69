"""What README's first commands print, and its figures, are what a reader gets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from specc import api
from specc.artifact.directory import open_engine
from specc.compiler.build import Compilation
from specc.config import CompileConfig
from tests import engines
from tests.command_line import invoke
from tests.docs.blocks import ROOT, shell_blocks
from tests.docs.peers_chart import PAGE, PICTURE, best_of_each, draw

README = (ROOT / "README.md").read_text(encoding="utf-8")
# what depends on the machine
_TIMED = re.compile(r"^((?:time:|tokens/s|speed-up) +)[\d.]+.*")


def timeless(lines: Iterable[str]) -> list[str]:
    return [_TIMED.sub(r"\g<1>0", line.rstrip()) for line in lines if line.strip()]


def test_the_first_commands_print_what_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line by line in a terminal of 80 columns, but for `[…]`; no code is compiled."""
    monkeypatch.setenv("COLUMNS", "80")

    def build(target: Path, drafts: Any, output: Path, config: CompileConfig, **_: Any) -> Any:
        engines.build(Path(target), [Path(x) for x in drafts], output, config, is_probed=True)
        return Compilation(open_engine(output), [])

    monkeypatch.setattr(api, "build", build)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    block = next(b for b in shell_blocks() if b.page.name == "README.md" and b.reason is None)
    assert block.language == "console"
    for command, shown in block.commands():
        result = invoke(*shlex.split(command.replace("\\\n", ""))[1:])
        assert result.exit_code == 0, result.output
        printed = iter(timeless(result.output.split("\n")))
        missing = [x for x in timeless(shown) if x != "[…]" and x not in printed]
        assert missing == []


def test_a_readme_is_read_in_one_sitting() -> None:
    assert len(README.split("\n")) <= 151


def test_the_table_of_peers_is_that_of_the_notebook() -> None:
    head, _, *rows = re.findall(r"^\| .*\|$|^\|-.*\|$", README, re.MULTILINE)[:6]
    names = head.strip("| ").split(" | ")[1:]
    engines_of = best_of_each(PAGE.read_text(encoding="utf-8"))
    assert names == list(engines_of)
    for row in rows:
        kind, *cells = row.strip("| ").split(" | ")
        found = [float(x.strip("*").replace("–", "0")) for x in cells]
        assert found == [speeds[kind] for speeds in engines_of.values()]


def test_the_chart_is_drawn_from_that_table(tmp_path: Path) -> None:
    draw(best_of_each(PAGE.read_text(encoding="utf-8")), tmp_path / "peers.svg")
    texts = re.compile(r">([^<>\s][^<>]*)</text>")
    now, then = (texts.findall(p.read_text("utf-8")) for p in (tmp_path / "peers.svg", PICTURE))
    assert now == then
    assert "url(http" not in PICTURE.read_text(encoding="utf-8")
