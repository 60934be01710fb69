"""What docs show is found by the tests that run it, and names options and targets that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from specc.cli.main import app
from tests.docs.blocks import LANGUAGES, PAGES, REASONS, ROOT, Block, blocks_of, shell_blocks

# how lines of commands begin
_COMMAND = re.compile(
    r" *(?:\$ )?(?:\w+=\S+ )?(?:\.venv/bin/)?(?:specc|make|python3?|pip|curl|docker) "
)
GROUP: Any = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def words_of(block: Block) -> list[list[str]]:
    """Words of every command of a block, without what a shell does with them."""
    found = []
    for script, _ in block.commands():
        for line in script.replace("\\\n", " ").replace(",\n", ",").split("\n"):
            words = shlex.split(line, comments=True)
            while words and re.match(r"\w+=", words[0]):
                del words[0]
            if words:
                found.append(words)
    return found


def options_of(words: list[str]) -> set[str]:
    """Of the command that the words begin with, built as the program builds it."""
    _, command, _ = GROUP.resolve_command(typer.Context(GROUP), words)
    return {name for item in command.params for name in (*item.opts, *item.secondary_opts)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_row_of_a_table_is_a_line(page: Path) -> None:
    """With as many cells as its header: a row that was wrapped is drawn as text."""
    inside = {
        n for block in blocks_of(page) for n in range(block.line, block.line + len(block.lines))
    }
    cells, broken = None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n")):
        if number in inside or not line.strip() or not (line.startswith("|") or cells):
            cells = None
            continue
        found = len(re.findall(r"(?<!\\)\|", line))
        cells = cells or found
        if not (line.startswith("|") and line.endswith("|") and found == cells):
            broken.append(f"{page.name}:{number + 1}: {line}")
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    """So that no command hides in a block without a language, or in an indented one."""
    lines = page.read_text(encoding="utf-8").split("\n")
    inside: set[int] = set()
    for block in blocks_of(page):
        assert block.language in LANGUAGES, block.name
        assert block.reason is None or block.reason in REASONS, block.name
        inside |= set(range(block.line, block.line + len(block.lines)))
        if block.language in ("text", "python"):
            assert block.reason is None, block.name
            assert not [line for line in block.lines if _COMMAND.match(line)], block.name
    indented = [
        line
        for number, line in enumerate(lines)
        if number not in inside and line.startswith("    ") and _COMMAND.match(line)
    ]
    assert indented == []


def text_of(script: Path) -> str:
    """Of a script and of the modules beside it that it takes names from: some have options."""
    text = script.read_text(encoding="utf-8")
    found = [script.with_name(f"{name}.py") for name in re.findall(r"(?m)^from (\w+) import", text)]
    others = [path.read_text(encoding="utf-8") for path in found if path.is_file()]
    return "\n".join([text, *others])


@pytest.mark.parametrize("block", shell_blocks(), ids=lambda block: block.name)
def test_commands_and_options_exist(block: Block) -> None:
    """Of blocks, too, that no test runs."""
    for words in words_of(block):
        program = words[0].removeprefix(".venv/bin/")
        if program == "make":
            assert words[1] in TARGETS
        elif program.startswith("python"):
            module = words[words.index("-m") + 1] if "-m" in words else ""
            files = [word for word in words if word.endswith(".py")]
            script = files[0] if files else module.replace(".", "/") + ".py"
            text = text_of(ROOT / script)
            for option in (word for word in words if word.startswith("--")):
                # of argparse, or a parameter that typer makes one
                parameter = rf"[( ]{option[2:].replace('-', '_')}: \w"
                assert f'"{option}"' in text or re.search(parameter, text), option
        elif program == "specc":
            options = options_of(words[1:])
            given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert given <= options, block.name


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run by tests: a GPU -->\n```sh\nspecc run a\n```\n"
        "```console\n$ specc run a \\\n    b\nfound\n$ specc c\n```\n"
    )
    first, second = blocks_of(page)
    assert (first.reason, first.commands()) == ("a GPU", [("specc run a", [])])
    assert second.reason is None
    assert second.commands() == [("specc run a \\\n    b", ["found"]), ("specc c", [])]
    assert words_of(second) == [["specc", "run", "a", "b"], ["specc", "c"]]
