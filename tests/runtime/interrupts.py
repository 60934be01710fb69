"""Calls that end early, as an interrupt from the keyboard ends them, wherever it comes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from specc.runtime.core import EngineCore


def fail_once(
    patch: pytest.MonkeyPatch, owner: type, name: str, *, skip: int, is_done: bool
) -> None:
    """Interrupt the call after `skip` others: before its work, or when that is done."""
    original, calls = getattr(owner, name), itertools.count()

    def interrupted(*args: Any) -> Any:
        is_due = next(calls) == skip
        if is_due and not is_done:
            raise KeyboardInterrupt
        result = original(*args)
        if is_due:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, name, interrupted)


@dataclass
class Interrupts:
    """Those that came so far."""

    count: int = 0


def fail_now_and_then(
    patch: pytest.MonkeyPatch, owner: type, name: str, *, every: int, is_done: bool
) -> Interrupts:
    """Interrupt each call of this number, and let cores go on after it; none may lose a request.

    Args:
        every: calls from one to the next.
        is_done: it comes when the work of the call is done, else before it.
    """
    original, calls = getattr(owner, name), itertools.count(1)
    found = Interrupts()

    def interrupted(*args: Any) -> Any:
        is_due = next(calls) % every == 0
        result = original(*args) if is_done or not is_due else None
        if is_due:
            found.count += 1
            raise KeyboardInterrupt
        return result

    advance = EngineCore.advance

    def persistent(core: EngineCore) -> bool:
        while True:
            try:
                return advance(core)
            except KeyboardInterrupt:
                assert core.scheduler._torn == []
                if not core.scheduler.has_work:
                    # it came after the last of all was done
                    return True

    patch.setattr(EngineCore, "advance", persistent)
    patch.setattr(owner, name, interrupted)
    return found
