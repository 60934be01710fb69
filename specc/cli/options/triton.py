"""Options of `specc triton`: what is written where, apart from the model's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specc.errors import ConfigError
from specc.option import option


@dataclass(frozen=True)
class RepositoryOptions:
    """A model repository, and how the engine gets into it."""

    output: Path = option(
        ...,
        "The model repository to write into; it is made if absent.",
        "-o",
        "--output",
        shows_default=False,
    )
    backends: Path | None = option(
        None, "Directory of the backends, for --layout backend; default OUTPUT/../backends."
    )
    copy: bool = option(False, "Copy the engine, which is the default.")
    link: bool = option(False, "Link the engine's files instead of copying.")
    reference: bool = option(False, "Only write down where the engine is.")
    on_fault: str | None = option(
        None, "What to do once the engine has failed: refuse requests, or stop the server."
    )
    force: bool = option(False, "Replace a model of this name, and the backend.")

    @property
    def files(self) -> str:
        """How the engine's files get there: `copy` without any of the three options.

        Raises:
            ConfigError: several.
        """
        places = {"copy": self.copy, "link": self.link, "reference": self.reference}
        given = [name for name, is_given in places.items() if is_given]
        if len(given) > 1:
            raise ConfigError(
                " and ".join(f"--{name}" for name in given), "one of the three", "pass one"
            )
        return given[0] if given else "copy"
