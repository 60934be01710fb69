"""What a step of one size is made of, whichever way it is bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, fx


class StepParts(NamedTuple):
    """Stages, and static tensors for B sequences.

    Args:
        stages: name → graph, on the device.
        constants: name → tensor of the plan's tree.
        inputs: name → static tensor: last_tokens, cache_len and block_table of B rows, slabs; where
            parts of trees are verified, `live` [B] int32, how many nodes a sequence may have.
        results: [B, 2 + P + drafts] int64, written by the last stage: num_accepted,
            output_tokens, next_cache_len, then the length of each draft.
        draft_lens: names of these lengths.
    """

    stages: Mapping[str, fx.GraphModule]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    results: Tensor
    draft_lens: tuple[str, ...] = ()
