"""Results of a load, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from specc.speculation.metrics import SpecStats


class Chunk(NamedTuple):
    """Tokens that arrived together.

    Args:
        time_s: seconds from the start of the load.
        num_tokens: one or more.
    """

    time_s: float
    num_tokens: int


@dataclass(frozen=True)
class RequestResult:
    """One request; times are seconds from the start of the load.

    Args:
        arrival_s: scheduled arrival.
        start_s: start of its latency: the arrival or, at the concurrency limit, when an open
            request ended.
        end_s: of its last token, or of its failure.
        chunks: tokens as they arrived; empty if only the first and the last token are timed.
        first_s: of its first token; None if there is none.
        num_prompt_tokens: 0 if unknown.
        finish_reason: None if it failed.
        queue_s: wait for a slot in the engine; None if unknown.
        late_s: from `start_s` to submission; None in simulated time.
        error: why it failed.
    """

    index: int
    arrival_s: float
    start_s: float
    end_s: float
    chunks: Sequence[Chunk] = ()
    first_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    queue_s: float | None = None
    late_s: float | None = None
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None and self.first_s is not None

    @property
    def latency_s(self) -> float:
        """Seconds to the last token."""
        return self.end_s - self.start_s

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        assert self.first_s is not None, "of a request with output"
        return self.first_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after the first; None of requests with one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between chunks, of any number of tokens each."""
        return [later.time_s - earlier.time_s for earlier, later in pairwise(self.chunks)]

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "arrival_s": self.arrival_s,
            "start_s": self.start_s,
            "first_token_s": self.first_s,
            "end_s": self.end_s,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "finish_reason": self.finish_reason,
            "queue_s": self.queue_s,
            "late_s": self.late_s,
            "error": self.error,
            "chunks": [[chunk.time_s, chunk.num_tokens] for chunk in self.chunks],
        }


@dataclass(frozen=True)
class LoadRun:
    """A served load.

    Args:
        results: in order of arrival.
        duration_s: from the start of the load to the last end.
        stats: speculation counters during the load; None if unknown.
        is_virtual: seconds are simulated.
    """

    results: Sequence[RequestResult]
    duration_s: float
    stats: SpecStats | None = None
    is_virtual: bool = False
    plan_shares: dict[str, float] = field(default_factory=dict)
