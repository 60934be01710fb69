"""Where the report of a measurement goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specc.errors import OutputError
from specc.option import option


@dataclass(frozen=True)
class ReportOptions:
    """Files for the report and its picture; the json `-` is standard output."""

    json: str | None = option(None, "Write the report; - is standard output.", metavar="OUT")
    plot: Path | None = option(None, "Draw the figures.", metavar="OUT.svg")

    def check_outputs(self) -> None:
        """Find what can be found before anything is measured.

        Raises:
            ConfigError: a picture that cannot be drawn.
            OutputError: the directory of an output is absent.
        """
        if self.json not in (None, "-"):
            _check_output(Path(str(self.json)))
        if self.plot is not None:
            from specc.draw.svg import check_picture

            check_picture(self.plot, "--plot")
            _check_output(self.plot)


def _check_output(path: Path) -> None:
    parent = path.resolve().parent
    if not parent.is_dir() or path.is_dir():
        found = f"{path} is a directory" if path.is_dir() else f"no directory {parent}"
        raise OutputError(found, "a file in a directory that exists", "choose another output")
