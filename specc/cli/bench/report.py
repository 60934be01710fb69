"""A report on its way out: what was run, a picture, a file, the terminal."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.system.files import output_error

if TYPE_CHECKING:
    from specc.cli.options.common import ReportOptions


def put_out(
    report: dict[str, Any], options: ReportOptions, show: Callable[[dict[str, Any]], None]
) -> None:
    """Draw, write and print a report, as the options ask for.

    Raises:
        OutputError: a file cannot be written.
    """
    if options.plot is not None:
        from specc.draw.charts import draw_bench

        draw_bench(report, options.plot)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if options.json == "-":
        print(text)
        return
    if options.json is not None:
        path = Path(options.json)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise output_error(path, error) from error
    show(report)


def command_line() -> str:
    """This process's command, without a server's key."""
    words = ["specc", *sys.argv[1:]]
    for place, word in enumerate(words):
        if word == "--api-key" and place + 1 < len(words):
            words[place + 1] = "…"
        elif word.startswith("--api-key="):
            words[place] = "--api-key=…"
    return shlex.join(words)
