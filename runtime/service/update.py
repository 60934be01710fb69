"""What a caller is told about a request, again and again until it ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specc.errors import SpeccError
from specc.speculation.metrics import SpecStats

if TYPE_CHECKING:
    from specc.runtime.outputs.logprobs import TokenLogprobs
    from specc.runtime.scheduling.request import Request


@dataclass(frozen=True)
class Update:
    """What is new about a request; the texts of all its updates, joined, are the final text.

    Args:
        token_ids: new tokens, none or more.
        text: characters that became certain; never a part of a stop string.
        logprobs: of each new token, where asked for.
        finish_reason: `stop`, `length`, `timeout` or `abort` with the last update; else None.
        stop_reason: the stop token id or stop string that ended it.
        metrics: of the whole request, with the last update; nothing changes them any more.
        error: why the request ended without a finish reason; such an update is the last one.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: SpecStats | None = None
    error: SpeccError | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def followed_by(self, other: Update) -> Update:
        """Both as one, for a reader that is slower than the engine."""
        logprobs = None
        if self.logprobs is not None or other.logprobs is not None:
            logprobs = [*(self.logprobs or []), *(other.logprobs or [])]
        token_ids = [*self.token_ids, *other.token_ids]
        return replace(other, token_ids=token_ids, text=self.text + other.text, logprobs=logprobs)


def update_of(request: Request) -> Update:
    """What is new about a request since the last one; its events are taken."""
    events = list(request.events)
    request.events.clear()
    tokens = [event.token_id for event in events if event.token_id is not None]
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = [event.logprobs for event in events if event.logprobs is not None]
    return Update(
        tokens,
        "".join(event.text for event in events),
        logprobs,
        request.finish_reason,
        request.stop_reason,
        request.stats if request.is_finished else None,
    )
