"""What a batch brings to a step: tensors that are made anew only where the batch has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequence_

import torch
from torch import Tensor

from specc.runtime.backends.program import StepInputs
from specc.runtime.scheduling.block_rows import BlockRows
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.sequence import Sequence
from specc.speculation.plans import SpecPlan


class BatchRows:
    """Rows of the batches of one engine.

    Args:
        cache: that block tables point into.
        num_last: last tokens of a sequence that a step reads.
    """

    def __init__(self, cache: KVCache, num_last: int) -> None:
        self._num_last = num_last
        self._sequences: list[Sequence] = []
        self._blocks = BlockRows(cache.shape)
        self._table = self._blocks.select([])
        self._sampling = sampling_rows([])

    def inputs(
        self,
        sequences: list[Sequence],
        extra: Mapping[str, Tensor],
        ahead: Sequence_[int] = (),
    ) -> StepInputs:
        """A step's inputs; sequences keep their blocks and options, so these mostly are known.

        The same table is the same tensor.

        Args:
            sequences: of the step.
            extra: see `StepInputs`.
            ahead: rows that steps in flight may yet commit, of each sequence; they count as
                committed. () is none.
        """
        has_changed = self._blocks.write(sequences)
        is_other = sequences != self._sequences
        if has_changed or is_other:
            self._table = self._blocks.select(sequences)
        if is_other:
            self._sequences = list(sequences)
            self._sampling = sampling_rows(sequences)
        count = self._num_last
        rows = [
            (*_last(sequence.token_ids, count), sequence.cache_len + more)
            for sequence, more in zip(sequences, ahead or [0] * len(sequences), strict=True)
        ]
        return StepInputs(rows, self._table, *self._sampling, extra)


def sampling_rows(sequences: Sequence_[Sequence]) -> tuple[Tensor, Tensor]:
    """`sampling_values` [B, 6] and `sampling_words` [B, 4], see `specc.sampling.rows`."""
    values = [sequence.sampling_values for sequence in sequences]
    words = [sequence.sampling_words for sequence in sequences]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(words, dtype=torch.int64)


def last_tokens_of(plans: Iterable[SpecPlan]) -> int:
    """Last tokens of a sequence that the steps of an engine read."""
    return max(1, *(plan.catch_up for plan in plans))


def _last(tokens: list[int], count: int) -> list[int]:
    """The last tokens; zeros before a sequence that is shorter."""
    last = tokens[-count:]
    return last if len(last) == count else [0] * (count - len(last)) + last
