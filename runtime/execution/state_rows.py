"""What passes are told of the states of layers that keep some: `states` [B, 2] int32.

Column 0 is the place of a sequence in all slabs of states. Column 1 is how many of its tokens in
the pass are committed in any case, from the first one on, and are folded into the states at once:
all of a prompt's, and of a tree the root.

The states of a draft are those of what it has read, which may be less than what is committed. The
first level of its next step reads the rest: so that nothing is folded twice, it is told how much
they have seen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from specc.runtime.backends.step_io import DRAFT_STATES, seen_by
from specc.runtime.scheduling.batch import Span, StepGroup
from specc.runtime.scheduling.state_slabs import NOWHERE, StateSlabs

# nodes of a tree that are committed in any case
_ROOT = 1


def states_of_spans(spans: Sequence[Span]) -> Tensor | None:
    """`states` of chunks of prompts; None where no layer keeps states."""
    if spans[0].request.state_place == NOWHERE:
        return None
    rows = [(span.request.state_place, span.end - span.start) for span in spans]
    return torch.tensor(rows, dtype=torch.int32)


def state_rows(places: Sequence[int]) -> Tensor:
    """`states` of trees whose sequences have these places."""
    return torch.tensor([(place, _ROOT) for place in places], dtype=torch.int32)


def read_before(group: StepGroup, draft: int, keeps_states: bool) -> list[int]:
    """Tokens of each request that a draft has read before its step begins.

    They may be fewer than are committed, as far as its first level reads the others. Where states
    after a part of the step are kept for later requests, a draft that has some has read all.
    """
    found, reached = [], group.plan.catch_up - 1
    none = [None] * len(group.requests)
    for request, kept in zip(group.requests, group.kept or none, strict=True):
        length = request.draft_lens[draft]
        is_behind = length < request.cache_len - reached
        found.append(request.cache_len if is_behind or (kept and keeps_states) else length)
    return found


def states_of_drafts(group: StepGroup, stateful: Collection[int]) -> dict[str, Tensor]:
    """What a step is told of the states of its drafts, once they have caught up.

    Args:
        group: of the step.
        stateful: drafts whose layers keep states.
    """
    plan, found = group.plan, dict[str, Tensor]()
    for number, drafter in ((x.number, x) for x in plan.models):
        if number is None or number not in stateful:
            continue
        seen = read_before(group, number, True)
        found[seen_by(drafter.name)] = torch.tensor(seen, dtype=torch.int32)
    if found:
        found[DRAFT_STATES] = state_rows([x.state_place for x in group.requests])
    return found


def states_of_one(slabs: StateSlabs | None, count: int) -> list[Tensor]:
    """`states` of the only sequence of an engine, all of whose tokens count; [] without states.

    Args:
        slabs: of the model; no request has a place in them.
        count: tokens of the pass.
    """
    if slabs is None:
        return []
    return [torch.tensor([[0, count]], dtype=torch.int32)]
