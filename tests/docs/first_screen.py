"""The picture in README.md: what a terminal shows when its first commands run.

    python -P tests/docs/first_screen.py

runs them in tmux, as they are written, and writes `docs/first-screen.svg` anew. A test compares the
commands in the picture with those of README.md; its figures are of the machine that drew it.
"""

from __future__ import annotations

import html
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.docs.blocks import ROOT, Block, shell_blocks

PICTURE = ROOT / "docs" / "first-screen.svg"
COLUMNS, LINES = 100, 90
# what is left out: tables of the compiler, between these lines
CUT = ("model    architecture", "for 8 sequences")
_LIMIT_S = 300.0
# a terminal's white on black, in both of GitHub's themes
_BACKGROUND, _FOREGROUND = (18, 20, 24), (222, 226, 230)


def first_block() -> Block:
    """What a reader sees of README.md before anything else."""
    return next(block for block in shell_blocks() if block.reason is None)


def commands() -> list[str]:
    """As they are typed, each in one line."""
    return [command.replace("\\\n", "") for command, _ in first_block().commands()]


def shown(svg: str) -> list[str]:
    """Lines of a picture that `draw` made."""
    lines: dict[int, str] = {}
    for number, text in re.findall(r'clip-path="url\(#\S+-line-(\d+)\)">(.*?)</text>', svg):
        lines[int(number)] = lines.get(int(number), "") + html.unescape(text).replace("\xa0", " ")
    return [lines[number].rstrip() for number in sorted(lines)]


def record(directory: Path) -> str:
    """The terminal's last screen, with colours as escape sequences."""
    (directory / "examples").symlink_to(ROOT / "examples")
    done = directory / "done"
    # the commands at the prompt of a shell of nobody's own
    script = "".join(f"echo {shlex.quote('$ ' + c)}\n{c} || exit\necho\n" for c in commands())
    (directory / "script").write_text(f"{script}touch {done}\nsleep 60\n", encoding="utf-8")
    tmux = ["tmux", "-L", f"specc-{os.getpid()}", "-f", os.devnull]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    size = ["-x", str(COLUMNS), "-y", str(LINES)]
    subprocess.run(
        [*tmux, "new-session", "-d", *size, "-c", str(directory), "bash --norc script"],
        check=True,
        # one thread, which other processes keep waiting less than several that wait for each other
        env={
            "OMP_NUM_THREADS": "1",
            "PATH": path,
            "HOME": os.environ["HOME"],
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
        },
    )
    try:
        end_s = time.monotonic() + _LIMIT_S
        while not done.exists():
            if time.monotonic() > end_s:
                raise TimeoutError("the commands do not end")
            time.sleep(0.2)
        said = subprocess.run(
            [*tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True
        )
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    return said.stdout.rstrip() + "\n"


def cut(screen: str) -> str:
    """The screen without the lines between those of `CUT`, which are one `[…]`."""
    lines = screen.split("\n")
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    first, last = (next(i for i, x in enumerate(plain) if x.startswith(start)) for start in CUT)
    return "\n".join([*lines[:first], "\x1b[0m[…]", *lines[last + 1 :]])


def draw(screen: str) -> str:
    """An SVG of a screen."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, TerminalTheme
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen.rstrip("\n")), soft_wrap=True)
    # whoever looks at it has a monospaced font, and need not ask a server for one
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    colors = DEFAULT_TERMINAL_THEME.ansi_colors._colors
    theme = TerminalTheme(_BACKGROUND, _FOREGROUND, colors[:8], colors[8:])
    return console.export_svg(
        title="specc", theme=theme, code_format=template, unique_id="first-screen"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        PICTURE.write_text(draw(cut(record(Path(place)))), encoding="utf-8")
