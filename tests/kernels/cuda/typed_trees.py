"""Batches of typed trees, as steps make them: rows of all kinds, drawn trees, merged trees."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specc.kernels.reference.accept import draft_children_reference
from specc.kernels.reference.sampling import merge_trees_reference
from specc.sampling.rows import Rule, Value, Word

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.cuda.interpreted_calls import patch_calls

    patch_calls()

PADDING = -(1 << 30)
GREEDY: dict[str, Any] = {"temperature": 0.0}


@dataclass(frozen=True)
class Row:
    """One sequence's sampling options; those that are not given change nothing."""

    rule: Rule = Rule.COUPLED
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0
    num_prompt: int = 0
    length: int = 9


MIXED = (
    Row(Rule.COUPLED, temperature=0.0, top_p=0.4, top_k=2),
    Row(Rule.COUPLED),
    Row(Rule.COUPLED, 0.7, top_p=0.8, repetition=1.4, frequency=0.3, num_prompt=5),
    Row(Rule.DELTA, 1.2, top_k=3, length=0),
    Row(Rule.MSS, length=23),
    Row(Rule.MSS, 0.8, top_p=0.9, min_p=0.02, top_k=20),
    Row(Rule.SWOR, 1.1),
    Row(Rule.SWOR, 0.9, min_p=0.05, presence=0.6, num_prompt=40, length=30),
    Row(Rule.MSS, length=PADDING),
    Row(Rule.SWOR, temperature=0.0, repetition=1.5, presence=0.4, num_prompt=10, length=12),
    Row(Rule.DELTA, top_p=0.6, frequency=-0.2, num_prompt=0, length=17),
    Row(Rule.SWOR, 1.3, top_p=0.85, top_k=40),
)
PLAIN = (Row(), Row(Rule.MSS, 0.9), Row(Rule.COUPLED, **GREEDY), Row(Rule.SWOR))


def options_of(rows: Sequence[Row], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sampling values [B, 6], words [B, 4] and cache_len [B]; seeds use all 64 bits."""
    values, words = torch.zeros(len(rows), len(Value)), []
    for b, row in enumerate(rows):
        for column in Value:
            values[b, column] = getattr(row, column.name.lower())
        word = {Word.SEED: hash((seed, b)), Word.TOP_K: row.top_k, Word.RULE: row.rule}
        word[Word.NUM_PROMPT] = row.num_prompt
        words.append([int(word[column]) for column in Word])
    lengths = [row.length for row in rows]
    return values, torch.tensor(words), torch.tensor(lengths, dtype=torch.int32)


@dataclass
class Forest:
    """Inputs of `accept`, on the CPU."""

    logits: Tensor
    tokens: Tensor
    parents: Tensor
    max_depth: int
    image: Tensor | None
    q_rows: Tensor | None
    draft_logits: list[Tensor]
    values: Tensor
    words: Tensor
    cache_len: Tensor
    history: Tensor
    block_table: Tensor

    def arguments(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())


def tree_of(widths: Sequence[int]) -> list[list[int]]:
    """Parents of the nodes of each level below the root, in the order of ids."""
    levels, frontier, first = [], [0], 1
    for width in widths:
        levels.append([node for node in frontier for _ in range(width)])
        frontier = list(range(first, first + len(levels[-1])))
        first += len(levels[-1])
    return levels


def peaked(generator: torch.Generator, rows: int, vocab: int) -> Tensor:
    """Logits with a few likely tokens all over the vocabulary."""
    logits = torch.randn(rows, vocab, generator=generator)
    likely = torch.randint(0, vocab, (rows, 12), generator=generator)
    return logits.scatter_add(1, likely, 4 + torch.randn(rows, 12, generator=generator))


def forest(
    rows: Sequence[Row],
    widths: Sequence[int],
    vocab: int,
    dtype: torch.dtype,
    *,
    num_sources: int = 1,
    kind: str = "drawn",
    max_depth: int | None = None,
    noise: float = 1.0,
    seed: int = 0,
) -> Forest:
    """Trees that each row's rule has drawn, and a target that resembles the drafts.

    Args:
        widths: children of each node of a level.
        vocab: tokens.
        num_sources: drafts; the trees of several are merged.
        kind: `drawn`; `given` where no column has logits that it was drawn from; `some` where
            every third column has not; `holes` where some nodes are dead.
        max_depth: of the walk; None is the tree's.
        noise: of the target around the drafts.
        seed: of all choices.
    """
    generator = torch.Generator().manual_seed(seed)
    values, words, cache_len = options_of(rows, seed)
    batch, levels = len(rows), tree_of(widths)
    size = 1 + sum(map(len, levels))
    root = torch.randint(0, vocab, (batch, 1), generator=generator)
    sources, draft_logits, q_rows = [], [], []
    # logits of the target at each proposal's node, as far as a draft has some
    wanted = peaked(generator, batch * num_sources * size, vocab).view(batch, -1, vocab)
    for source in range(num_sources):
        tokens, parents = root, [-1]
        q_rows.append(-1)
        for depth, above in enumerate(levels):
            frontier = sorted(set(above))
            first_column = source * size + len(parents)
            row = sum(len(level) // batch for level in draft_logits)
            base = wanted[:, [source * size + node for node in frontier]]
            shaped = base + noise * torch.randn(base.shape, generator=generator)
            level = shaped.flatten(0, 1).to(dtype)
            draft_logits.append(level)
            k = len(above) // len(frontier)
            columns = first_column + k * torch.arange(len(frontier), dtype=torch.int32)
            children, _ = draft_children_reference(
                level, min(k, vocab), cache_len.clamp(min=0), columns, depth, values, words
            )
            children = children.view(batch, len(frontier), -1)
            # a vocabulary of few tokens has them more than once
            children = children.repeat(1, 1, -(-k // children.shape[2]))[:, :, :k]
            tokens = torch.cat([tokens, children.flatten(1)], dim=1)
            parents += above
            q_rows += [row + frontier.index(node) for node in above]
        sources.append((tokens, torch.tensor(parents, dtype=torch.int32).expand(batch, -1)))
    image = None
    tokens, parents_ = (torch.cat(parts, dim=1) for parts in zip(*sources, strict=True))
    if num_sources > 1:
        start = torch.arange(num_sources + 1, dtype=torch.int32) * size
        tokens, parents_, image, _ = merge_trees_reference(tokens, parents_, start)
        first = torch.zeros(batch, tokens.shape[1], dtype=torch.int64)
        for column in reversed(range(image.shape[1])):
            first.scatter_(1, image[:, column, None].long().clamp(min=0), column)
        wanted = wanted.gather(1, first[:, :, None].expand(-1, -1, vocab))
    else:
        parents_ = parents_[:1].expand(batch, -1)
    chooser = random.Random(seed)
    if kind == "some":
        q_rows = [-1 if column % 3 == 2 else row for column, row in enumerate(q_rows)]
    if kind == "holes":
        parents_ = parents_.clone()
        for row in parents_:
            row[chooser.sample(range(1, size), size // 4)] = -1
    history, block_table = pages(chooser, cache_len.tolist(), tokens, vocab)
    return Forest(
        wanted.flatten(0, 1).to(dtype),
        tokens,
        parents_,
        len(widths) if max_depth is None else max_depth,
        image,
        None if kind == "given" else torch.tensor(q_rows, dtype=torch.int32),
        [] if kind == "given" else draft_logits,
        values, words, cache_len, history, block_table,
    )  # fmt: skip


def pages(
    chooser: random.Random, lengths: list[int], tokens: Tensor, vocab: int, block_size: int = 4
) -> tuple[Tensor, Tensor]:
    """History of tokens that trees have, too; blocks and rows that no sequence owns say others."""
    counts = [-(-max(length, 0) // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    blocks = chooser.sample(range(num_blocks), num_blocks)
    fill = [chooser.choice([-1, vocab, 2**31 - 1, 0, 1]) for _ in range(num_blocks * block_size)]
    history = torch.tensor(fill, dtype=torch.int32).view(num_blocks, block_size)
    table = torch.full((len(lengths), max(counts, default=0) + 1), 10**8, dtype=torch.int32)
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = [blocks.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(own, dtype=torch.int32)
        likely = [*tokens[b].tolist(), chooser.randrange(vocab), -1, vocab]
        for place in range(max(length, 0)):
            token = chooser.choice(likely)
            history[own[place // block_size], place % block_size] = token
    return history, table


def spoil_padding(inputs: Forest) -> None:
    """Let rows of padding hold what must not be read: every index of theirs is out of range."""
    batch, num_nodes = inputs.tokens.shape
    for b, length in enumerate(inputs.cache_len.tolist()):
        if length >= 0:
            continue
        inputs.tokens[b] = 1 << 40
        inputs.parents = inputs.parents.clone()
        inputs.parents[b] = 1 << 30
        inputs.logits.view(batch, num_nodes, -1)[b] = float("nan")
        inputs.block_table[b] = 1 << 30
        inputs.values[b], inputs.words[b] = 2.0, 1
        if inputs.image is not None:
            inputs.image[b] = 1 << 30


def inside(tensor: Tensor, canary: float, device: torch.device) -> Tensor:
    """The same rows, inside of wider ones."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 16), canary, dtype=tensor.dtype)
    wide[:, : tensor.shape[1]] = tensor
    return wide.to(device)[:, : tensor.shape[1]]


@contextlib.contextmanager
def sizes(**changes: tuple[ModuleType, int]) -> Iterator[None]:
    """Other block sizes: name → module and value."""
    before = {name: getattr(module, name) for name, (module, _) in changes.items()}
    try:
        for name, (module, value) in changes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, (module, _) in changes.items():
            setattr(module, name, before[name])
