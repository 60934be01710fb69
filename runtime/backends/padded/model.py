"""A model that runs padded batches, called with flat tokens as every model of a step is."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specc.artifact.cache_rows import CacheRows, Reach
from specc.errors import EngineError
from specc.runtime.backends.padded.padded_batch import PaddedBatch, padded_batch

# slot of a request that has no token in a pass
_NOWHERE = -(1 << 30)


class _Run(NamedTuple):
    """Sequences of a pass whose cache rows lie side by side.

    Args:
        order: places of the sequences in the pass, in the order of their blocks.
        first: the first block.
    """

    order: list[int]
    first: int


class PaddedModel(nn.Module):
    """Runs padded batches; inputs and result of a call are those of `ModelProgram.forward`.

    Requests whose blocks are neighbours are one padded batch: with the lowest free block given out
    first, that is nearly always the whole batch. Others take a run of the runtime each.

    Args:
        reaches: of the layers, each once.
        width: V of the logits.
        dtype: of the logits that the runtime makes.
    """

    def __init__(
        self, name: str, reaches: Sequence[Reach], rows: CacheRows, width: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.name = name
        # held by the runtime, not by torch
        self.weights: Mapping[str, Tensor] = {}
        self.width = width
        self.dtype = dtype
        self._reaches = reaches
        self._rows = rows

    @abstractmethod
    def run(self, first: int, batch: int, given: PaddedBatch) -> Tensor:
        """Logits [R, V] of a pass whose requests have cache rows first … first + batch - 1."""

    def reserve(self, num_slots: int) -> int | None:
        """Have cache rows for this many slots; returns L, None where it is always the same."""
        return None

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        q_start: Tensor,
        slot: Tensor,
        cache_len: Tensor,
        ancestors: Tensor | None,
        block_table: Tensor,
        logit_rows: Tensor,
    ) -> Tensor:
        """One pass over the flat tokens of all requests; writes their K and V to the caches.

        Raises:
            EngineError: the pass would write past the cache.
        """
        starts = q_start.tolist()
        # no words at all: causal, as compiled programs have it
        if ancestors is not None and ancestors.shape[1] == 0:
            ancestors = None
        inputs = (tokens, positions, slot, cache_len, ancestors)
        counts = [last - first for first, last in itertools.pairwise(starts)]
        blocks = block_table[:, 0].tolist()
        first_slots = _first_slots(slot, starts, counts)
        self._check_rows(first_slots, counts)
        runs = list(_runs(blocks, counts, first_slots, self._rows))
        if len(runs) == 1 and _is_whole(runs[0], counts):
            length = self.reserve(max(first_slots) + counts[0])
            return self.whole(inputs, logit_rows, runs[0].first, length)
        device = tokens.device
        wanted = logit_rows.tolist()
        logits = torch.empty(len(wanted), self.width, dtype=self.dtype, device=device)
        for run in runs:
            picked, longest = _gather(run, starts, counts, inputs)
            places, rows = [], []
            for b, request in enumerate(run.order):
                for place, row in enumerate(wanted):
                    if starts[request] <= row < starts[request + 1]:
                        places.append(place)
                        rows.append(b * longest + row - starts[request])
            asked = torch.tensor(rows, dtype=torch.int64, device=device)
            length = self.reserve(max(first_slots[b] for b in run.order) + longest)
            logits[places] = self.whole(picked, asked, run.first, length)
        return logits

    def whole(
        self,
        inputs: tuple[Any, ...],
        logit_rows: Tensor,
        first: int = 0,
        length: int | None = None,
    ) -> Tensor:
        """A pass of as many tokens for each of B requests; reads nothing on the host.

        Args:
            inputs: tokens, positions and slot [B * N], cache_len [B], ancestors [B * N, W] or None.
            logit_rows: [R] rows of B * N.
            first: cache row of the first request; the others follow.
            length: L, rows of the cache that there are; None is all of them.
        """
        tokens, positions, slot, cache_len, ancestors = inputs
        batch = cache_len.shape[0]
        tokens, positions, slot = (x.reshape(batch, -1) for x in (tokens, positions, slot))
        if ancestors is not None:
            ancestors = ancestors.reshape(*tokens.shape, -1)
        asked = logit_rows.shape[0]
        # a runtime need not take tensors without elements
        rows = logit_rows if asked else logit_rows.new_zeros(1)
        flat = (tokens, positions, slot, cache_len, ancestors, rows)
        given = padded_batch(self._rows, self._reaches, *flat, length)
        return self.run(first, batch, given)[:asked]

    def _check_rows(self, first_slots: Sequence[int], counts: Sequence[int]) -> None:
        ends = [first + count for first, count in zip(first_slots, counts, strict=True)]
        last = max(ends, default=0)
        if last > self._rows.slots:
            # runtimes drop such rows without a word
            raise EngineError(
                f"{self.name}: a pass that writes up to slot {last - 1}",
                f"slots up to {self._rows.slots - 1}",
                "end the request earlier, or compile with a larger --max-seq-len",
            )


class WholeBatch(nn.Module):
    """A padded model in a step whose request b has cache row b: nothing is looked at."""

    def __init__(self, model: PaddedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        q_start: Tensor,
        slot: Tensor,
        cache_len: Tensor,
        ancestors: Tensor | None,
        block_table: Tensor,
        logit_rows: Tensor,
    ) -> Tensor:
        return self.model.whole((tokens, positions, slot, cache_len, ancestors), logit_rows)


def _first_slots(slot: Tensor, starts: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Slot of each request's first token; far below zero where it has none."""
    if not slot.shape[0]:
        return [_NOWHERE] * len(counts)
    index = torch.tensor([min(start, slot.shape[0] - 1) for start in starts[:-1]])
    found = slot[index.to(slot.device)].tolist()
    return [x if count else _NOWHERE for x, count in zip(found, counts, strict=True)]


def _runs(
    blocks: Sequence[int], counts: Sequence[int], first_slots: Sequence[int], rows: CacheRows
) -> Iterator[_Run]:
    """Cut the sequences of a pass into runs of neighbouring blocks, in the order of the blocks.

    Shorter sequences of a run are filled up to the longest one, and what filling writes must fit
    after them.
    """
    order = sorted((b for b, count in enumerate(counts) if count), key=blocks.__getitem__)
    run: list[int] = []
    longest = largest = 0
    for b in order:
        is_next = run and blocks[b] == blocks[run[-1]] + 1
        width, start = max(longest, counts[b]), max(largest, first_slots[b])
        if not is_next or start + width > rows.slots + rows.scratch:
            if run:
                yield _Run(run, blocks[run[0]])
            run, width, start = [], counts[b], first_slots[b]
        run.append(b)
        longest, largest = width, start
    if run:
        yield _Run(run, blocks[run[0]])


def _is_whole(run: _Run, counts: Sequence[int]) -> bool:
    """All sequences of the pass in their order, with as many tokens each."""
    return run.order == list(range(len(counts))) and len(set(counts)) == 1


def _gather(
    run: _Run, starts: Sequence[int], counts: Sequence[int], inputs: tuple[Any, ...]
) -> tuple[tuple[Any, ...], int]:
    """Tokens of a run as [B * N, …], short requests filled up; also N.

    What fills up follows in slots, and nothing looks at it: a causal token sees what is in front
    of it, and one of a tree its ancestors. Its position is that of the last token, since a model
    may have no position after that.
    """
    tokens, positions, slot, cache_len, ancestors = inputs
    device = tokens.device
    longest = max(counts[b] for b in run.order)
    firsts = torch.tensor([starts[b] for b in run.order], device=device)[:, None]
    lasts = torch.tensor([counts[b] - 1 for b in run.order], device=device)[:, None]
    places = torch.arange(longest, device=device)
    index = (firsts + torch.minimum(places, lasts)).flatten()
    beyond = (places - lasts).clamp(min=0).flatten()
    requests = torch.tensor(run.order, device=device)
    return (
        tokens[index],
        positions[index],
        slot[index] + beyond.int(),
        cache_len[requests],
        None if ancestors is None else ancestors[index],
    ), longest
