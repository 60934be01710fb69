"""What becomes of jobs that have no answer."""

from __future__ import annotations

from typing import Any

from specc import errors


class ChildError(Exception):
    """A job has no answer; its text says why."""


class ChildTimeout(ChildError):
    """It took too much of the processor."""


class ChildStarved(ChildError):
    """It did not end in time, and not by its own fault: others had the processor."""


class ChildDied(ChildError):
    """The process has ended: a crash, or no memory."""


class AnswerTooLarge(ChildError):
    """The answer has more bytes than allowed."""


class JobFailed(ChildError):
    """The function raised something that is not a `SpeccError`.

    Args:
        kind: name of the exception's class.
        message: its text.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


def error_of(reply: dict[str, Any]) -> Exception:
    """What was raised in the other process, as its main module tells it."""
    kind = getattr(errors, reply["error"], None)
    has_parts = reply["parts"] is not None
    if has_parts and isinstance(kind, type) and issubclass(kind, errors.SpeccError):
        return kind(*reply["parts"])
    return JobFailed(reply["error"], reply["message"])
