"""Options of what only the operator of a server may ask it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specc.errors import ConfigError
from specc.option import option


@dataclass(frozen=True)
class Admin:
    """Who may put new weights into drafts, and let the engine sleep.

    Args:
        admin_keys: one of them is needed; none refuses everybody.
        draft_weights_dir: the folder that files of new weights lie in; None refuses all.
    Raises:
        ConfigError: a key that no header can hold, or no folder.
    """

    admin_keys: tuple[str, ...] = option(
        (),
        "Needed for /v1/drafts/reload, /sleep and /wake_up, which are refused without one;"
        " repeatable. Better in the environment: others see arguments.",
        "--admin-key",
        env="SPECC_ADMIN_KEY",
    )
    draft_weights_dir: Path | None = option(
        None,
        "Folder of the files that /v1/drafts/reload may name; no other file is opened.",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        # the value itself is a secret
        if not all(key and key.isascii() and key.isprintable() for key in self.admin_keys):
            raise ConfigError(
                "an admin key that is empty or not of printable ASCII characters",
                "keys that a header can hold",
                "choose another one",
            )
        folder = self.draft_weights_dir
        if folder is not None and not folder.is_dir():
            raise ConfigError(
                f"--draft-weights-dir {folder}", "a folder that is there", "make it first"
            )
