"""Commands in README.md and docs, as a reader finds them.

A fenced block of `sh` is commands; one of `console` is a transcript, whose lines with `$ ` are
commands, with those that a backslash continues, and whose other lines are what they print. A
comment on the line before the fence keeps a block from being run, and says what it takes:

    <!-- not run by tests: a GPU -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# docs/results holds the commands of measurements: hours of them
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "results"),
]
LANGUAGES = {"sh", "console", "python", "text"}
# what a block may take that a test has not got, or that a reader may do only once
REASONS = {
    "a GPU",
    "a server",
    "a Triton Inference Server",
    "Docker",
    "installs",
    "minutes",
    "models of your own",
    "root",
}
_FENCE = re.compile(r" *```(\S*)")
_REASON = re.compile(r"<!-- not run by tests: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        line: of its fence, from 1.
        reason: why no test runs it; None where tests do.
    """

    page: Path
    line: int
    language: str
    lines: tuple[str, ...]
    reason: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[tuple[str, list[str]]]:
        """Commands and what each prints; all of a block of `sh` are one script."""
        if self.language != "console":
            return [("\n".join(self.lines), [])]
        found: list[tuple[str, list[str]]] = []
        is_continued = False
        for line in self.lines:
            if line.startswith("$ "):
                found.append((line[2:], []))
                is_continued = line.endswith("\\")
            elif is_continued:
                command, printed = found[-1]
                found[-1] = (f"{command}\n{line}", printed)
                is_continued = line.endswith("\\")
            else:
                found[-1][1].append(line)
        return found


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").split("\n")
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        end = next(i for i in range(number, len(lines)) if _FENCE.match(lines[i]))
        reason = _REASON.fullmatch(lines[number - 2]) if number > 1 else None
        yield Block(page, number, fence[1], tuple(lines[number:end]), reason and reason[1])
        number = end + 1


def shell_blocks() -> list[Block]:
    found = [block for page in PAGES for block in blocks_of(page)]
    return [block for block in found if block.language in ("sh", "console")]
