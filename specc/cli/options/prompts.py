"""Where a command takes its prompts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
