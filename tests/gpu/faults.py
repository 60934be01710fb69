"""Faults of a device in a rehearsal: they come late, and they stay, as those of CUDA do."""

from __future__ import annotations

_pending: list[str] = []


def fail_later(message: str) -> None:
    """Let the device fail at what was just queued; whoever waits next learns of it."""
    _pending.append(message)


def synchronize() -> None:
    """Raises RuntimeError: something failed, now or earlier: a context does not recover."""
    if _pending:
        raise RuntimeError(f"CUDA error: {_pending[0]}")
