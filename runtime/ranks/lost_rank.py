"""What has become of a rank, in words."""

from __future__ import annotations

import signal
from pathlib import Path

from specc.errors import RankError

# of /proc/PID/stat, those that say why a process does nothing
_STATES = {"T": "it is stopped", "t": "a debugger holds it", "D": "it waits for the disk"}


def lost(found: str) -> RankError:
    """The error of every request from now on.

    Args:
        found: which rank, and what happened to it.
    """
    return RankError(
        found,
        "all ranks of the engine",
        "start it again; see what the rank wrote before, and the machine's memory",
    )


def ended(code: int | None) -> str:
    """How a process ended, by its exit code; None where it has only let go of its connection."""
    if code is None:
        return "has closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-code}{name}"


def state_of(pid: int) -> str:
    """Why a process of this machine does nothing, after a colon; empty where nothing tells."""
    found = _STATES.get(_letter_of(pid))
    return f": {found}" if found else ""


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine stands still until somebody lets it go on."""
    return _letter_of(pid) in ("T", "t")


def _letter_of(pid: int) -> str:
    """The state that /proc has of a process; empty where nothing tells."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # the name may hold anything, closing brackets too
    fields = text.rpartition(")")[2].split()
    return fields[0] if fields else ""
