"""Options that several commands have: where prompts come from, and where a report goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specc.errors import OutputError
from specc.option import check_ranges, option


@dataclass(frozen=True)
class PromptSource:
    """One of these is a prompt, or a file of them; none is standard input."""

    prompt: str | None = None
    file: Path | None = option(None, "UTF-8 file: all of it is one prompt.")
    prompts: Path | None = option(
        None,
        'File of JSON lines, a batch: each {"prompt": "…"} or {"prompt_token_ids": […]}, and'
        " options of that prompt, such as max_tokens.",
    )
    prediction: Path | None = option(
        None,
        "UTF-8 file: what the output may be, such as a file that is to be edited. Lines of"
        " --prompts may have a prediction of their own.",
        metavar="FILE",
    )


@dataclass(frozen=True)
class PromptFile:
    """Prompts to measure with."""

    prompts: Path | None = option(
        None,
        'File of JSON lines, each {"prompt": "…"} or {"prompt_token_ids": […]}; without it,'
        " built-in prompts.",
    )
    num_prompts: int | None = option(None, "Use only the first N prompts of the file.", least=1)

    def __post_init__(self) -> None:
        check_ranges(self)


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
