"""What a draft learns from: documents as they are, and what the target makes of prompts of them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.fit.documents import Document, Encoder, Row
from specc.fit.target import Target
from specc.fit.texts import Texts, TextStore
from specc.progress import Advance

# tokens of texts from which on the target writes none of its own
FEW_TOKENS = 1_000_000
# of what it writes: tokens of a prompt, and after it
PROMPT, CONTINUATION = 64, 160
# prompts that are continued at once; rows of documents that lie in one file
_AT_ONCE, _FILE_ROWS = 32, 8
# rows of a document, after which those of others come
_TURN = 8
# shorter ones teach nothing that is worth a pass
_LEAST, _LEAST_WRITTEN = 16, 4
# of prompts, after all of which the target has nothing to say
_MOST_TRIES = 4
GREEDY, SAMPLED, GIVEN = "greedy", "sampled", "given"


@dataclass(frozen=True)
class Budget:
    """When to stop.

    Args:
        seconds: that may go by.
        tokens: to learn to predict, or None.
        num_bytes: on disk.
    """

    seconds: float
    tokens: int | None
    num_bytes: int


class TrainingData:
    """Fills a store.

    Args:
        target: of the draft.
        boundaries: of the hidden states to keep.
        encoder: of its tokens.
        store: to be filled.
        length: tokens of a row, at most.
        seed: of all that is drawn.
    """

    def __init__(
        self,
        target: Target,
        boundaries: Sequence[int],
        encoder: Encoder,
        store: TextStore,
        length: int,
        seed: int,
    ) -> None:
        self._target, self._boundaries = target, boundaries
        self._encoder, self._store = encoder, store
        self._length, self._seed = length, seed

    def read(self, documents: Sequence[Document], budget: Budget, advance: Advance) -> None:
        """Keep what the target computes along documents, in an order that the seed draws."""
        order = list(documents)
        random.Random(self._seed).shuffle(order)
        rows = _in_turns([self._encoder.rows(document, self._length) for document in order])
        batches = _batches(rows, _FILE_ROWS)
        # of a run that was ended
        for _ in self._store.parts(GIVEN):
            next(batches, None)

        def more() -> Texts | None:
            batch = next(batches, None)
            return None if batch is None else self._texts(batch, is_greedy=False)

        self._fill((GIVEN,), lambda _: more(), budget, advance)

    def write(self, documents: Sequence[Document], budget: Budget, advance: Advance) -> None:
        """Keep what the target writes after prompts: greedily, and at temperature 1, in turns."""
        # of few tokens, half are greedy, too
        tokens = budget.tokens if budget.tokens is not None else _AT_ONCE * 2 * CONTINUATION
        count = max(1, min(_AT_ONCE, tokens // (2 * CONTINUATION)))

        def more(kind: str) -> Texts | None:
            # a run that goes on draws what comes next
            seed = self._seed + len(self._store.parts(GREEDY)) + len(self._store.parts(SAMPLED))
            generator = torch.Generator().manual_seed(seed)
            torch.manual_seed(seed)
            for _ in range(_MOST_TRIES):
                chosen = torch.randint(len(documents), (count,), generator=generator)
                prompts = [
                    self._encoder.prompt(documents[number], PROMPT, generator)
                    for number in chosen.tolist()
                ]
                temperature = 0.0 if kind == GREEDY else 1.0
                written = self._target.write(prompts, CONTINUATION, temperature, is_exact=False)
                pairs = zip(prompts, written, strict=True)
                rows = [Row(w, len(p)) for p, w in pairs if len(w) - len(p) >= _LEAST_WRITTEN]
                if rows:
                    return self._texts(rows, kind == GREEDY)
            return None

        self._fill((GREEDY, SAMPLED), more, budget, advance)

    def _fill(
        self,
        kinds: Sequence[str],
        more: Callable[[str], Texts | None],
        budget: Budget,
        advance: Advance,
    ) -> None:
        begin = time.monotonic()
        number = sum(len(self._store.parts(kind)) for kind in kinds)
        while True:
            elapsed, count = time.monotonic() - begin, sum(map(self._store.num_tokens, kinds))
            shares = [elapsed / max(budget.seconds, 1e-9)]
            if budget.tokens is not None:
                shares.append(count / max(budget.tokens, 1))
            advance(round(min(1.0, max(shares)) * 100), 100, f"{count:,} tokens")
            if max(shares) >= 1 or self._store.num_bytes >= budget.num_bytes:
                return
            kind = kinds[number % len(kinds)]
            if (texts := more(kind)) is None:
                return
            self._store.add(kind, texts)
            number += 1

    def _texts(self, rows: Sequence[Row], is_greedy: bool) -> Texts:
        tokens, begins, ends = padded(rows)
        return self._target.read(tokens, self._boundaries, begins, ends, is_greedy)


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [rows, length] of rows, filled up on the right; where each begins and ends."""
    longest = max(len(row.tokens) for row in rows)
    tokens = [row.tokens + [0] * (longest - len(row.tokens)) for row in rows]
    begins = torch.tensor([row.begin for row in rows])
    return torch.tensor(tokens), begins, torch.tensor([len(row.tokens) for row in rows])


def _in_turns(documents: Sequence[Iterator[Row]]) -> Iterator[Row]:
    """Rows of all documents, a few of each at a time: there may be more than are read."""
    left = list(documents)
    while left:
        going_on = []
        for rows in left:
            own = list(itertools.islice(rows, _TURN))
            yield from own
            going_on += [rows] if len(own) == _TURN else []
        left = going_on


def _batches(rows: Iterator[Row], count: int) -> Iterator[list[Row]]:
    """Rows in groups; a few hundred at a time are put in order, so that like ones are together."""
    pool: list[Row] = []
    for row in rows:
        if len(row.tokens) - row.begin >= _LEAST:
            pool.append(row)
        if len(pool) >= 8 * count:
            yield from _groups(pool, count)
            pool = []
    yield from _groups(pool, count)


def _groups(pool: list[Row], count: int) -> Iterator[list[Row]]:
    pool.sort(key=lambda row: len(row.tokens))
    for first in range(0, len(pool), count):
        yield pool[first : first + count]
