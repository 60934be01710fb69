"""An iteration: what it runs (spans of tokens, steps of groups of requests), and its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from specc.runtime.backends.step_io import StepResult
from specc.runtime.outputs.logprobs import TokenLogprobs
from specc.runtime.scheduling.request import Request
from specc.speculation.live_nodes import live_levels
from specc.speculation.plans import SpecPlan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Tokens start … end - 1 of a request, to be fed causally.

    Args:
        drafts: drafts that take the same tokens in the same iteration.
        checkpoint: where the states after them are kept for later requests; None: nowhere.
    """

    request: Request
    start: int
    end: int
    drafts: tuple[int, ...] = ()
    checkpoint: int | None = None

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


class Kept(NamedTuple):
    """What is kept of a step that may reach a place where states are kept.

    Args:
        checkpoint: that is reserved for it.
        length: rows of the request that they are the states after.
    """

    checkpoint: int
    length: int


@dataclass(frozen=True)
class StepGroup:
    """Requests that run one plan's step together.

    Args:
        extra: what the host brings to this step besides rows, see `StepInputs`.
        ahead: tokens that a step in flight may yet bring each request, at most; 0 where none is
            in flight, () where that holds for all.
        catches_up: a draft has to read tokens that its first level does not reach back to.
        live: of each request, the first nodes of its tree that the target verifies, root included;
            () is all of them. See `specc.speculation.live_nodes`.
        allowed: of each request, the nodes that could have been live, where its drafter has said
            how much of its tree is verified; () where drafters had no say.
        kept: of each request, which states are kept for later requests, if the step commits so
            many rows; () where none of any are.
        predicts: a request's prediction proposes in it: what is accepted says nothing of a draft.
    """

    plan: SpecPlan
    requests: list[Request]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    ahead: tuple[int, ...] = ()
    catches_up: bool = False
    live: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    kept: tuple[Kept | None, ...] = ()
    predicts: bool = False

    @property
    def num_nodes(self) -> int:
        """Tokens that it brings to the target's pass."""
        return sum(self.live) if self.live else self.plan.num_nodes * len(self.requests)

    def ended(self, live: Sequence[int]) -> StepGroup:
        """The group as its drafters have said: of each request no more nodes than it had.

        Args:
            live: [B] nodes, root included.
        """
        allowed = self.live or (self.plan.num_nodes,) * len(live)
        fewer = tuple(map(min, live, allowed))
        return replace(self, live=fewer, allowed=allowed)

    def levels(self, place: int) -> tuple[int, ...]:
        """Draft tokens of depth 1, 2, … that the target verifies for the request at a place."""
        return live_levels(self.plan, self.live[place]) if self.live else self.plan.level_sizes


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

    def note_verified(self, steps: Sequence[StepResult]) -> None:
        """What commits it, and who learns of it, counts what drafters had verified."""
        for place, step in enumerate(steps):
            if step.live:
                self.groups[place] = self.groups[place].ended(step.live)


class Vote(NamedTuple):
    """How much attention queries of a request gave its blocks.

    Args:
        mass: [n] float32 on the host, by column of its block table.
        num_voters: queries.
        length: committed rows of the request at that time.
    """

    request: Request
    mass: Tensor
    num_voters: int
    length: int


@dataclass
class RunResult:
    """Of its prompts and steps; `first_tokens` is None where a prompt is not finished yet."""

    first_tokens: list[int | None] = field(default_factory=list)
    prefill_s: float = 0.0
    steps: list[StepResult] = field(default_factory=list)
    # of first tokens, and of the prompt tokens after those of a span, by request; of each step's
    # tokens, for the steps in which a request asks
    first_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    logprobs: list[list[list[TokenLogprobs] | None] | None] = field(default_factory=list)
    # what self-drafts choose blocks by
    votes: list[Vote] = field(default_factory=list)
    # of the target's pass that everyone shared; stages and `prefill_s` have their parts of it
    pass_s: float = 0.0
    # since the iteration before ended, where this one came right after it and none was in flight;
    # of steps in a row the same share each. 0 is not known
    wall_s: float = 0.0


class PendingBatch(NamedTuple):
    """A batch that was begun.

    Args:
        results: waits for it, once; of each time that its steps ran.
        complete: queues what is left of it, once, before `results`; to be called when all that was
            queued before is committed.
        is_queued: other batches can be begun before its results are there; False is one that runs
            when they are asked for.
    """

    results: Callable[[], list[RunResult]]
    complete: Callable[[], object] = lambda: None
    is_queued: bool = True
