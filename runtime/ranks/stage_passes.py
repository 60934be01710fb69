"""A rank's part of a pass, where the target has stages: take, compute, give on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from specc.artifact.manifest_entries import StageEntry
from specc.runtime.execution.draws import Draws
from specc.runtime.ranks.rank_group import drawn_tokens, whole_logits
from specc.runtime.ranks.stage_groups import StageGroups

# of the inputs of a pass: `tokens` [Nt] and `logit_rows` [R]
_TOKENS, _ROWS = 0, 7


class StagePasses:
    """What a rank does in each pass of the target.

    Passes that yield nothing, as those of a long prompt before its last part, give no results.

    Args:
        vocab_size: V of the target.
        operators: namespace of the `specc::` operators.
    """

    def __init__(
        self,
        groups: StageGroups,
        stages: Sequence[StageEntry],
        vocab_size: int,
        operators: Any = torch.ops.specc,
    ) -> None:
        self._groups = groups
        self._stages = stages
        self._vocab_size = vocab_size
        self._operators = operators

    @property
    def num_stages(self) -> int:
        """Of the target."""
        return len(self._stages)

    def follow(
        self, run: Callable[..., Tensor], inputs: Sequence[Tensor | None], draws: Draws | None
    ) -> None:
        """The part of a rank that follows.

        Args:
            draws: where tokens are wanted instead of logits.
        Raises:
            RankError: a rank that it waits for is lost.
        """
        groups, where = self._groups, self._groups.where
        hidden = {}
        if where.stage > 0:
            before = self._stages[where.stage - 1]
            tokens = inputs[_TOKENS]
            assert tokens is not None
            shape = tuple(len(tokens) if size is None else size for size in before.shape)
            hidden = {"hidden": groups.take(shape, getattr(torch, before.dtype))}
        found = run(*inputs, **hidden)
        if not where.is_last:
            groups.give_on(found)
            return
        if draws is None:
            found = whole_logits(groups, found, self._vocab_size)
        else:
            found = drawn_tokens(groups, found, draws, self._vocab_size, self._operators)
        if where.gives_results and len(found):
            groups.give_results(found)

    def begin(
        self, run: Callable[..., Tensor], inputs: Sequence[Tensor | None], is_drawn: bool
    ) -> Future[Tensor]:
        """Rank 0's part of a pass: its own stage.

        Args:
            is_drawn: tokens are wanted instead of logits.
        Returns:
            what the pass yields, when it comes: [R, V] logits, or [R] int64 tokens. Passes may be
            begun before those of the passes before them are there.
        Raises:
            RankError: a rank is lost.
        """
        rows = inputs[_ROWS]
        assert rows is not None
        dtype = torch.int64 if is_drawn else getattr(torch, self._stages[-1].dtype)
        shape = (len(rows),) if is_drawn else (len(rows), self._vocab_size)
        self._groups.give_on(run(*inputs))
        if len(rows):
            return self._groups.expect_results(shape, dtype)
        nothing: Future[Tensor] = Future()
        nothing.set_result(torch.empty(shape, dtype=dtype))
        return nothing
