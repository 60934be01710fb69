"""What a batch brings to a step: tensors that are made anew only where the batch has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from specc.runtime.backends.step_io import StepInputs
from specc.runtime.scheduling.block_rows import BlockRows
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan


class BatchRows:
    """Rows of the batches of one engine.

    Args:
        cache: that block tables point into.
        num_last: last tokens of a request that a step reads.
    """

    def __init__(self, cache: KVCache, num_last: int) -> None:
        self._num_last = num_last
        self._requests: list[Request] = []
        self._blocks = BlockRows(cache.shape)
        self._table = self._blocks.select([])
        self._sampling = sampling_rows([])

    def inputs(
        self,
        requests: list[Request],
        extra: Mapping[str, Tensor],
        ahead: Sequence[int] = (),
    ) -> StepInputs:
        """A step's inputs; requests keep their blocks and options, so these mostly are known.

        The same table is the same tensor.

        Args:
            requests: of the step.
            extra: see `StepInputs`.
            ahead: rows that steps in flight may yet commit, of each request; they count as
                committed. () is none.
        """
        has_changed = self._blocks.write(requests)
        is_other = requests != self._requests
        if has_changed or is_other:
            self._table = self._blocks.select(requests)
        if is_other:
            self._requests = list(requests)
            self._sampling = sampling_rows(requests)
        rows = self.committed(requests, ahead)
        return StepInputs(rows, self._table, *self._sampling, extra)

    def committed(
        self, requests: Sequence[Request], ahead: Sequence[int] = ()
    ) -> list[tuple[int, ...]]:
        """`rows` of a step's inputs; see `inputs`."""
        count = self._num_last
        return [
            (*_last(request.token_ids, count), request.cache_len + more)
            for request, more in zip(requests, ahead or [0] * len(requests), strict=True)
        ]


def sampling_rows(requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """`sampling_values` [B, 6] and `sampling_words` [B, 4], see `specc.sampling.rows`."""
    values = [request.sampling_values for request in requests]
    words = [request.sampling_words for request in requests]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(words, dtype=torch.int64)


def last_tokens_of(plans: Iterable[SpecPlan]) -> int:
    """Last tokens of a request that the steps of an engine read."""
    return max(1, *(plan.catch_up for plan in plans))


def _last(tokens: list[int], count: int) -> list[int]:
    """The last tokens; zeros before a request that is shorter."""
    last = tokens[-count:]
    return last if len(last) == count else [0] * (count - len(last)) + last
