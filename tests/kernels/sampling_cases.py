"""Random cases of `specc::draft_children` and `specc::accept`: all options mixed in one batch.

Where sums of exponentials meet a threshold, implementations may differ by the last bit; numbers are
drawn from continuous ranges, so that such a tie does not happen. Ties of logits are wanted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specc.kernels.reference.accept import draft_children_reference
from specc.kernels.reference.sampling import merge_trees_reference
from specc.sampling.rows import RULES, Rule, Value, Word

PADDING = -(1 << 30)
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16)
# a register holds 4, 8 or 16 floats, and 512 tokens share counters
VOCABS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 129, 257, 512, 513, 700, 1025, 2048, 2049)
BLOCK_SIZES = (1, 3, 16)
CAPACITY = 48


def int32(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def options(
    rule: Rule = Rule.COUPLED, batch: int = 1, seed: int = 5, **changes: float
) -> tuple[Tensor, Tensor]:
    """`sampling_values` and `sampling_words` of equal rows, by names of columns."""
    values = torch.tensor([[1.0, 1, 0, 1, 0, 0]]).repeat(batch, 1)
    words = torch.tensor([[seed, 0, int(rule), 0]]).repeat(batch, 1)
    for name, value in changes.items():
        if name.upper() in Value.__members__:
            values[:, Value[name.upper()]] = value
        else:
            words[:, Word[name.upper()]] = int(value)
    return values, words


def make_logits(
    chooser: random.Random, rows: int, vocab: int, dtype: torch.dtype, padding: int
) -> Tensor:
    """Rows of one kind each, as a view of a wider tensor of NaNs, which would win if read."""
    values = torch.empty(rows, vocab)
    for row in values:
        kind = chooser.choice(["random", "random", "random", "peaked", "ties", "masked", "flat"])
        torch.randn(vocab, out=row)
        if kind == "peaked":
            row *= 2.5
            row[chooser.randrange(vocab)] += chooser.uniform(2, 12)
        elif kind == "ties":
            row.mul_(1.5).round_()
        elif kind == "masked":
            dead = torch.rand(vocab) < chooser.choice([0.1, 0.9])
            dead[chooser.randrange(vocab)] = False
            row[dead] = -INF
        elif kind == "flat":
            row *= 0.1
    wide = torch.full((rows + 2, vocab + padding), NAN, dtype=dtype)
    view = wide[1 : rows + 1, padding // 2 : padding // 2 + vocab]
    return view.copy_(values)


def make_options(chooser: random.Random, batch: int, vocab: int) -> tuple[Tensor, Tensor]:
    """`sampling_values` and `sampling_words`."""
    values, words = torch.zeros(batch, len(Value)), torch.zeros(batch, len(Word)).long()
    for b in range(batch):
        temperature = chooser.choice(
            [
                0.0,
                9e-6,
                chooser.uniform(2e-5, 0.05),
                chooser.uniform(0.3, 2.0),
                1.0,
                1.0,
                1.0,
                900.0,
            ]
        )
        penalties = (
            (chooser.uniform(0.5, 3), chooser.uniform(-1, 2), chooser.uniform(-0.5, 1))
            if chooser.random() < 0.4
            else (1.0, 0.0, 0.0)
        )
        if chooser.random() < 0.2:  # one alone
            kept = chooser.randrange(3)
            penalties = tuple(p if i == kept else float(i == 0) for i, p in enumerate(penalties))
        values[b] = torch.tensor(
            [
                temperature,
                chooser.choice([1.0, 1.0, chooser.uniform(0.02, 0.999), 0.0]),
                chooser.choice([0.0, 0.0, chooser.uniform(0.0005, 0.9)]),
                *penalties,
            ]
        )
        top_k = chooser.choice([0, 0, 1, 2, 7, chooser.randint(1, vocab), vocab, vocab + 3])
        seed = chooser.choice([0, chooser.randrange(-(2**63), 2**63), 2**63 - 1, -1])
        num_prompt = chooser.choice([0, chooser.randrange(CAPACITY), CAPACITY])
        words[b] = torch.tensor([seed, top_k, chooser.randrange(len(RULES)), num_prompt])
    return values, words


def make_lengths(chooser: random.Random, batch: int) -> Tensor:
    choices = [0, 1, PADDING, -1, CAPACITY]
    lengths = [
        chooser.choice(choices) if chooser.random() < 0.25 else chooser.randrange(CAPACITY)
        for _ in range(batch)
    ]
    return torch.tensor(lengths, dtype=torch.int32)


@dataclass(frozen=True)
class Draft:
    """Arguments of `draft_children`."""

    seed: int
    batch: int
    frontier: int
    vocab: int
    num_children: int
    dtype: torch.dtype
    padding: int
    scored: bool

    def make(self) -> tuple:
        chooser = random.Random(self.seed)
        torch.manual_seed(self.seed)
        rows = self.batch * self.frontier
        logits = make_logits(chooser, rows, self.vocab, self.dtype, self.padding)
        columns = [chooser.randrange(200) for _ in range(self.frontier)]
        return (
            logits,
            min(self.num_children, self.vocab),
            make_lengths(chooser, self.batch),
            torch.tensor(columns, dtype=torch.int32),
            chooser.randrange(6),
            *make_options(chooser, self.batch, self.vocab),
            self.scored,
        )


drafts = st.builds(
    Draft,
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 4),
    frontier=st.integers(1, 3) | st.just(1),
    vocab=st.sampled_from(VOCABS),
    num_children=st.integers(1, 5) | st.sampled_from([8, 17, 33]),
    dtype=st.sampled_from(DTYPES),
    padding=st.sampled_from([0, 0, 1, 5, 16]),
    scored=st.booleans(),
)


@dataclass(frozen=True)
class Verified:
    """Arguments of `accept`: proposals drawn level by level, and a target that is near the draft.

    Levels say how many nodes of a level get children, and how many each. `noise` is how far the
    target's logits are from those that the children were drawn from.
    """

    seed: int
    batch: int
    vocab: int
    levels: tuple[tuple[int, int], ...]
    noise: float
    dtypes: tuple[torch.dtype, torch.dtype]
    padding: int
    dead: float
    undrawn: float  # share of columns with a token that nobody drew
    strange: float  # share of columns that say another row of draft logits than their own
    merged: bool
    shared: bool  # one tree for all: parents are a view with stride 0
    missing_levels: int

    def make(self) -> tuple:
        chooser = random.Random(self.seed)
        torch.manual_seed(self.seed)
        values, words = make_options(chooser, self.batch, self.vocab)
        lengths = make_lengths(chooser, self.batch)
        root = torch.randint(self.vocab, (self.batch, 1))
        tokens, parents, q_rows, sources = [root], [-1], [-1], {}
        draft_logits, first_row, level = [], 0, [0]
        for depth, (width, num_children) in enumerate(self.levels):
            frontier = sorted(chooser.sample(level, min(width, len(level))))
            num_children = min(num_children, self.vocab)
            rows = make_logits(
                chooser, self.batch * len(frontier), self.vocab, self.dtypes[1], self.padding
            )
            columns = torch.arange(len(frontier)) * num_children + len(parents)
            children, _ = draft_children_reference(
                rows, num_children, lengths, columns.int(), depth, values, words
            )
            tokens.append(children.view(self.batch, -1))
            level = list(range(len(parents), len(parents) + len(frontier) * num_children))
            for f, node in enumerate(frontier):
                sources[node] = rows.view(self.batch, len(frontier), self.vocab)[:, f]
                parents += [node] * num_children
                q_rows += [first_row + f] * num_children
            draft_logits.append(rows)
            first_row += len(frontier)
        proposed = torch.cat(tokens, dim=1)
        for column in range(1, len(parents)):
            if chooser.random() < self.undrawn:
                q_rows[column] = -1
                proposed[:, column] = torch.randint(self.vocab, (self.batch,))
            elif chooser.random() < self.strange:
                q_rows[column] = chooser.randrange(first_row)
        own = torch.tensor(parents, dtype=torch.int32).expand(self.batch, -1)
        if not self.shared:
            own = own.clone()
            own[:, 1:][torch.rand(self.batch, len(parents) - 1) < self.dead] = -1
        image = None
        if self.merged:
            start = torch.tensor([0, len(parents)], dtype=torch.int32)
            proposed, own, image, _ = merge_trees_reference(proposed, own, start)
        target = self._target(chooser, image, len(parents), sources)
        history, table = self._history(chooser)
        return (
            target,
            self._place(proposed),
            own if self.shared and not self.merged else self._place(own),
            max(0, len(self.levels) - self.missing_levels),
            image,
            None if chooser.random() < 0.05 else torch.tensor(q_rows, dtype=torch.int32),
            draft_logits,
            values,
            words,
            lengths,
            history,
            table,
        )

    def _target(
        self, chooser: random.Random, image: Tensor | None, num_nodes: int, sources: dict
    ) -> Tensor:
        rows = self.batch * num_nodes
        target = make_logits(chooser, rows, self.vocab, self.dtypes[0], self.padding)
        by_node = target.view(self.batch, num_nodes, self.vocab)
        for column, logits in sources.items():
            for b in range(self.batch):
                node = column if image is None else int(image[b, column])
                if node >= 0 and chooser.random() < 0.85:
                    by_node[b, node] = logits[b] + self.noise * torch.randn(self.vocab)
        return target

    def _history(self, chooser: random.Random) -> tuple[Tensor, Tensor]:
        block_size = chooser.choice(BLOCK_SIZES)
        count = -(-CAPACITY // block_size)
        blocks = list(range(self.batch * count + 1))
        chooser.shuffle(blocks)
        # some of the tokens are none
        history = torch.randint(-2, self.vocab + 2, (len(blocks), block_size), dtype=torch.int32)
        table = torch.tensor(blocks[: self.batch * count], dtype=torch.int32)
        return history, table.view(self.batch, count)

    def _place(self, rows: Tensor) -> Tensor:
        if not self.padding:
            return rows.contiguous()
        wide = torch.full((rows.shape[0], rows.shape[1] + 3), 1, dtype=rows.dtype)
        return wide[:, 1:-2].copy_(rows)


verified = st.builds(
    Verified,
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 4) | st.just(3),
    vocab=st.sampled_from([vocab for vocab in VOCABS if vocab < 600] + [2049]),
    levels=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=0, max_size=4).map(
        tuple
    ),
    noise=st.sampled_from([0.0, 0.1, 0.7, 2.0]),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    padding=st.sampled_from([0, 0, 1, 5, 16]),
    dead=st.sampled_from([0.0, 0.0, 0.15]),
    undrawn=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    strange=st.sampled_from([0.0, 0.0, 0.5]),
    merged=st.booleans(),
    shared=st.booleans(),
    missing_levels=st.sampled_from([-1, 0, 0, 0, 1]),
)
