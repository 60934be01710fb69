"""What passes are told of the states of layers that keep some: `states` [B, 2] int32.

Column 0 is the place of a sequence in all slabs of states. Column 1 is how many of its tokens in
the pass are committed in any case, from the first one on, and are folded into the states at once:
all of a prompt's, and of a tree the root.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.runtime.scheduling.batch import Span
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.state_slabs import NOWHERE

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


def states_of_one(cache: KVCache, count: int) -> list[Tensor]:
    """`states` of the only sequence of an engine, all of whose tokens count; [] without states.

    Args:
        cache: of the engine; no request has a place in it.
        count: tokens of the pass.
    """
    if cache.states is None:
        return []
    return [torch.tensor([[0, count]], dtype=torch.int32)]
