"""Inputs of lookups, votes and what a step records, and what follows from them in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PADDING = -(1 << 30)
# entries of block tables that nothing may follow
WRONG_BLOCKS = (-1, -(2**31), 10**6, 2**31 - 1)
CONTEXTS = ("random", "periodic", "one-token", "broken", "late", "distinct")


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Pages:
    """A history of several sequences, in blocks of any order inside of a wider memory.

    Args:
        lengths: rows of each sequence; those below 0 are padding and own nothing.
        block_size: rows of a block.
        num_columns: of the block table.
        fill: draws what stands in rows that no sequence owns, so that reading one is noticed.
    """

    chooser: random.Random
    lengths: list[int]
    block_size: int
    num_columns: int
    fill: list[int]

    def __post_init__(self) -> None:
        size = self.block_size
        counts = [max(0, -(-length // size)) for length in self.lengths]
        num_blocks = sum(counts) + 2
        blocks = self.chooser.sample(range(num_blocks), num_blocks)
        rows = self.chooser.choices(self.fill, k=(num_blocks + 2) * size)
        self.memory = int32(rows).view(-1, size)
        self.history = self.memory[1:-1]
        table = []
        for count in counts:
            spare = self.chooser.choices(WRONG_BLOCKS, k=self.num_columns - count)
            table.append([*(blocks.pop() for _ in range(count)), *spare])
        self.block_table = int32(table).view(len(counts), self.num_columns)
        self.cache_len = int32(self.lengths)

    def write(self, b: int, tokens: list[int]) -> None:
        """Let a sequence begin with these tokens."""
        size = self.block_size
        places = torch.arange(len(tokens))
        blocks = self.block_table[b][places // size].long()
        self.history[blocks, places % size] = int32(tokens)


def context(chooser: random.Random, kind: str, length: int, ngram: int) -> list[int]:
    """Tokens of one sequence, the root last."""
    alphabet = range(chooser.randint(1, 4))
    count = length + 1
    tokens = chooser.choices(alphabet, k=count)
    if kind == "periodic":
        period = chooser.choices(alphabet, k=chooser.randint(1, 9))
        tokens = (period * (count // len(period) + 1))[:count]
        if chooser.random() < 0.5:
            tokens[chooser.randrange(count)] = 7
    elif kind == "one-token":
        tokens = [5] * count
    elif kind == "broken":
        # every place ends some of the suffix, no place all of it
        tokens = [5] * count
        for back in (chooser.randint(2, ngram + 1), chooser.randint(2, ngram + 1)):
            tokens[max(0, count - back)] = chooser.choice([6, 7])
    elif kind == "late":
        tokens = [chooser.randrange(1000, 10**9) for _ in range(count)]
        size = min(chooser.randint(1, ngram + 1), count // 2)
        for _ in range(chooser.randint(1, 3)):
            end = chooser.randint(size, count)
            tokens[end - size : end] = tokens[count - size :]
    elif kind == "distinct":
        tokens = chooser.sample(range(10**6), count)
    return tokens


@dataclass(frozen=True)
class Lookup:
    """Contexts of a batch in pages; lengths of -1 are padding rows."""

    kind: str
    lengths: tuple[int, ...]
    block_size: int  # 0: one block a sequence
    ngram: int
    num_tokens: int
    num_last: int  # columns of last_tokens
    seed: int

    def make(self) -> tuple[tuple[Any, ...], list[list[int]]]:
        """Arguments of `lookup`, and the context of each sequence: of padding, the root alone."""
        chooser = random.Random(self.seed)
        block_size = self.block_size or max(1, 1, *self.lengths) + chooser.randint(0, 5)
        most = max(-(-max(length, 1) // block_size) for length in (1, *self.lengths))
        lengths = [PADDING if length < 0 else length for length in self.lengths]
        columns = most + chooser.randint(0, 2)
        pages = Pages(chooser, lengths, block_size, columns, [0, 1, 2, 5, 6, 7])
        contexts = []
        for b, length in enumerate(self.lengths):
            tokens = context(chooser, self.kind, max(length, 0), self.ngram)
            pages.write(b, tokens[:-1])
            contexts.append(tokens)
        last = torch.randint(0, 3, (len(lengths), self.num_last))
        last[:, -1] = torch.tensor([tokens[-1] for tokens in contexts])
        arguments = (pages.history, pages.block_table, pages.cache_len, last)
        return (*arguments, self.ngram, self.num_tokens), contexts


def look_up(tokens: list[int], ngram: int, num_tokens: int) -> list[int] | None:
    """What a context proposes, one suffix after the other."""
    for size in range(min(ngram, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                grown = list(tokens)
                for place in range(end, end + num_tokens):
                    grown.append(grown[place])
                return grown[len(tokens) :]
    return None


def lookup_wanted(
    contexts: list[list[int]], ngram: int, num_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and parents of `lookup`."""
    tokens, parents = [], []
    for one in contexts:
        found = look_up(one, ngram, num_tokens)
        tokens.append([one[-1], *(found or [0] * num_tokens)])
        parents.append(list(range(-1, num_tokens)) if found else [-1] * (num_tokens + 1))
    return tokens, parents


@dataclass(frozen=True)
class Record:
    """A step's output and the pages that it goes to; lengths of -1 are padding rows."""

    lengths: tuple[int, ...]
    width: int  # P, columns of output_tokens
    block_size: int
    missing: int  # how many rows the last sequence's table is short of
    num_last: int
    seed: int

    def make(self) -> tuple[Pages, tuple[Tensor, ...], dict[tuple[int, int], int]]:
        """Pages, the other arguments of `record_tokens`, and (block, row) → token written."""
        chooser = random.Random(self.seed)
        lengths = [PADDING if length < 0 else length for length in self.lengths]
        accepted = [chooser.randrange(self.width) for _ in lengths]
        if accepted:
            accepted[chooser.randrange(len(accepted))] = self.width - 1
        # rows of the sequences after the step, the bonus token's among them
        needed = [max(-1, n) + count + 2 for n, count in zip(self.lengths, accepted, strict=True)]
        needed = [0 if n < 0 else rows for n, rows in zip(lengths, needed, strict=True)]
        columns = -(-max(1, 1, *needed) // self.block_size)
        pages = Pages(chooser, needed, self.block_size, columns, [70, 71])
        pages.cache_len = int32(lengths)
        last = torch.randint(100, 200, (len(lengths), self.num_last))
        output = torch.randint(200, 300, (len(lengths), self.width))
        written = {}
        for b, (length, count) in enumerate(zip(lengths, accepted, strict=True)):
            output[b, count + 1 :] = -1
            if length < 0:
                accepted[b] = chooser.choice([-5, 0, 10**6])
                continue
            run = [int(last[b, -1]), *output[b, : count + 1].tolist()]
            if self.missing and chooser.random() < 0.5:
                # the bonus token's block is none
                column = (length + count + 1) // self.block_size
                if (length + count) // self.block_size < column:
                    pages.block_table[b, column] = chooser.choice(WRONG_BLOCKS)
            for place, token in enumerate(run, start=length):
                block = int(pages.block_table[b, place // self.block_size])
                if 0 <= block < len(pages.history):
                    written[block, place % self.block_size] = token
        return pages, (last, output, int32(accepted)), written


def vote(chains: list[list[int]], weights: list[float]) -> list[int]:
    """The majority's chain of one sequence, as a walk down a trie; weights are added exactly."""
    length = len(chains[0])
    if length == 0:
        return []
    sums: dict[int, float] = {}
    for chain, weight in zip(chains, weights, strict=True):
        if chain[0] >= 0:
            sums[chain[0]] = sums.get(chain[0], 0.0) + weight
    if not sums:
        return [-1] * length
    # dictionaries keep the order in which keys came, and max takes the first
    best = max(sums, key=lambda token: sums[token])
    agree = [s for s, chain in enumerate(chains) if chain[0] == best]
    below = vote([chains[s][1:] for s in agree], [weights[s] for s in agree])
    return [best, *below]


def vote_inputs(
    chooser: random.Random, batch: int, num_drafts: int, length: int
) -> tuple[Tensor, Tensor]:
    """Chains of few tokens that often agree; weights that add up exactly, and often alike."""
    alphabet = range(chooser.randint(1, 3))
    rows = []
    for _ in range(batch):
        first = chooser.choices(alphabet, k=length)
        chains = []
        for _ in range(num_drafts):
            chain = list(first)
            for place in range(chooser.randint(0, length), length):
                chain[place] = chooser.choice(alphabet)
            if length and chooser.random() < 0.4:
                # what stands after an end does not count
                chain[chooser.randrange(length)] = -1
            chains.append(chain)
        rows.append(chains)
    tokens = torch.tensor(rows).view(batch, num_drafts, length).long()
    weights = [[chooser.randrange(4) / 4 for _ in range(num_drafts)] for _ in range(batch)]
    return tokens, torch.tensor(weights).view(batch, num_drafts)


# (chains, weights, chain): sums in the order of the drafts, in float32
ROUNDED_VOTE = (
    [[3], [3], [4], [3]],
    [2.0**24, 1.0, 2.0**24 + 2, 1.0],
    [4],
)


def image_slots(image: list[int], slots: list[int], num_nodes: int) -> list[int]:
    """Rows of merged nodes of one sequence."""
    found = []
    for node in range(num_nodes):
        fed = [slot for own, slot in zip(image, slots, strict=True) if own == node and slot >= 0]
        found.append(fed[0] if fed else -1)
    return found


def image_inputs(
    chooser: random.Random, batch: int, num_own: int, num_nodes: int, shared: bool
) -> tuple[Tensor, Tensor]:
    """Images with nodes that several own nodes share, some dead, some beyond the merged tree."""
    choices = [*range(num_nodes), *range(num_nodes), -1, -1, num_nodes, 10**9, -(2**31)]
    image = [chooser.choices(choices, k=num_own) for _ in range(batch)]
    slots = [
        [chooser.choice([-1, -7, *chooser.choices(range(500), k=2)]) for _ in range(num_own)]
        for _ in range(1 if shared else batch)
    ]
    rows = int32(slots).view(-1, num_own)
    return int32(image).view(batch, num_own), rows[0] if shared else rows
