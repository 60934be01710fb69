"""What an iteration runs: spans of tokens to be fed, and steps of groups of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Tokens start … end - 1 of a request, to be fed causally.

    Args:
        drafts: drafts that take the same tokens in the same iteration.
    """

    request: Request
    start: int
    end: int
    drafts: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        """Ends the prompt, so that its last row yields the first output token."""
        return self.end == self.request.num_prompt_tokens and not self.request.has_output

    @property
    def num_scored(self) -> int:
        """Tokens from the first one on whose logits say how likely the next prompt token was."""
        if not self.request.is_scored:
            return 0
        return min(self.end, self.request.num_prompt_tokens - 1) - self.start

    @property
    def logit_places(self) -> list[int]:
        """Tokens of the span that get logits: those that are scored, and the last of a prompt."""
        last = [self.end - self.start - 1] if self.is_last else []
        return [*range(self.num_scored), *last]


@dataclass(frozen=True)
class StepGroup:
    """Requests that run one plan's step together.

    Args:
        extra: what the host brings to this step besides rows, see `StepInputs`.
        ahead: tokens that a step in flight may yet bring each request, at most; 0 where none is
            in flight, () where that holds for all.
        catches_up: a draft has to read tokens that its first level does not reach back to.
    """

    plan: SpecPlan
    requests: list[Request]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    ahead: tuple[int, ...] = ()
    catches_up: bool = False


@dataclass(frozen=True)
class Batch:
    """One iteration: spans of prompts, and a step for each plan in use.

    Args:
        num_unfinished: requests in the engine, those included that have no part in it.
    """

    prefill: list[Span] = field(default_factory=list)
    groups: list[StepGroup] = field(default_factory=list)
    num_unfinished: int = 0

    @property
    def requests(self) -> list[Request]:
        """All that have a part in it."""
        stepped = [request for group in self.groups for request in group.requests]
        return [*(span.request for span in self.prefill), *stepped]
