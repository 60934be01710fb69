"""Commands of `specc` in this process, and how they end."""

from __future__ import annotations

import sys

from click.testing import Result
from typer.testing import CliRunner

from specc.cli.main import app

# the first words of a process of its own
MAIN = [sys.executable, "-P", "-c", "from specc.cli.main import main; main()"]


def invoke(*args: object, stdin: str | bytes | None = None) -> Result:
    """Run `specc` with these words."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


def assert_refused(result: Result, *words: str) -> None:
    """Exit code 2 and three lines, after those of progress; `words` are in them."""
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if " … " not in line or ":" in line[:8]]
    assert [line.partition(":")[0] for line in lines] == ["found", "needed", "do"], result.stderr
    for word in words:
        assert word in result.stderr
