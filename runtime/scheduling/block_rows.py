"""Block tables of requests on the host: rows that are written as requests grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.runtime.scheduling.kv_cache import CacheShape
from specc.runtime.scheduling.request import Request

# rows for each request that may run: one that waits again after a preemption often comes back
_SPARE = 2


class BlockRows:
    """A row for each request that was seen lately; a step gathers the rows of its batch.

    A row changes where the blocks of its request have: only those after `num_kept_blocks` are
    written. So a step costs the copy of its rows, and no Python list as long as they are.

    Args:
        shape: of the cache that the blocks are of.
    """

    def __init__(self, shape: CacheShape) -> None:
        num_rows = _SPARE * shape.max_num_seqs
        self._table = torch.zeros(num_rows, shape.blocks_per_sequence, dtype=torch.int32)
        self._rows: dict[Request, int] = {}
        self._free = list(range(num_rows))
        # blocks in each row
        self._lengths = [0] * num_rows

    def write(self, requests: Sequence[Request]) -> bool:
        """Bring the rows of these requests up to date; returns whether one has changed."""
        has_changed = False
        for request in requests:
            row = self._rows.get(request)
            if row is None:
                row = self._new_row(request, requests)
            count, length = len(request.blocks), self._lengths[row]
            if request.num_kept_blocks == count == length:
                continue
            kept = min(request.num_kept_blocks, count, length)
            self._table[row, kept:count] = torch.tensor(request.blocks[kept:], dtype=torch.int32)
            self._table[row, count:length] = 0
            request.num_kept_blocks = self._lengths[row] = count
            has_changed = True
        return has_changed

    def select(self, requests: Sequence[Request]) -> Tensor:
        """[B, n] int32 as of the last `write`; entries after a request's own blocks are 0."""
        rows = torch.tensor([self._rows[request] for request in requests], dtype=torch.int64)
        return self._table.index_select(0, rows)

    def _new_row(self, request: Request, wanted: Sequence[Request]) -> int:
        if not self._free:
            needed = set(wanted)
            for other in [s for s in self._rows if s not in needed]:
                self._free.append(self._rows.pop(other))
        if not self._free:
            # a batch of another cache's size: only tests have one
            self._free.append(len(self._table))
            self._table = torch.cat([self._table, torch.zeros_like(self._table[:1])])
            self._lengths.append(0)
        row = self._rows[request] = self._free.pop()
        request.num_kept_blocks = 0
        return row
