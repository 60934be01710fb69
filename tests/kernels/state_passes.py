"""Passes over sequences whose layers keep states, as trees that are known by their parents.

Here nodes of a sequence are known by number; there is no flat token index, no slot and no word of
bits. What a pass must not read is NaN: inputs of dead tokens, rows that nothing has written, and
states of sequences that begin.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.attention_loops import to_words

NAN = float("nan")


@dataclass(frozen=True)
class Tree:
    """Region nodes of one sequence, and which of them a pass is fed.

    Args:
        length: committed tokens before them.
        parents: of each node, -1 of the first.
        certain: the first nodes, which follow one another.
        fed: nodes of the pass, in order; None is all.
        dead: dead tokens beside them.
    """

    length: int
    parents: tuple[int, ...]
    certain: int = 1
    fed: tuple[int, ...] | None = None
    dead: int = 0

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(range(len(self.parents))) if self.fed is None else self.fed

    @property
    def is_begun(self) -> bool:
        """Whether the state has seen nothing, and does not matter."""
        return self.length == 0 and 0 in self.nodes

    def path(self, node: int) -> list[int]:
        """From the first node on, parent by parent."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]


def chain(length: int, count: int, certain: int) -> Tree:
    return Tree(length, tuple(range(-1, count - 1)), certain)


def random_tree(rng: random.Random, size: int, length: int, certain: int = 1) -> Tree:
    """Nodes after the certain ones hang anywhere below the last of these."""
    first = max(certain, 1)
    parents = [j - 1 if j < first else rng.randrange(first - 1, j) for j in range(size)]
    return Tree(length, tuple(parents), certain, dead=rng.choice((0, 0, 1)))


def random_batch(rng: random.Random) -> list[Tree]:
    """Prompts, plain decoding, chains and trees, some of more nodes than a word has bits."""
    made = []
    for _ in range(rng.randint(1, 4)):
        length, count = rng.choice((0, 1, 7)), rng.choice((1, 2, 5, 12))
        kind = rng.randrange(5)
        if kind < 2:
            made.append(chain(length, count, certain=count))
        elif kind == 2:
            made.append(chain(length, count, certain=1))
        else:
            size = rng.choice((2, 6, 15, 15, 70))
            made.append(random_tree(rng, size, length, rng.choice((0, 1, 1, 2))))
    return made


class Pass:
    """Tokens of trees, as operators take them.

    Args:
        trees: of the sequences.
        causal: there are no words of ancestors: all are chains.
        places: of the sequences' states; drawn where None.
    """

    def __init__(
        self, trees: Sequence[Tree], *, causal: bool = False, places: Sequence[int] | None = None
    ) -> None:
        self.trees = trees
        rng = random.Random(len(trees))
        self.num_states = len(trees) + 2
        self.places = list(places or rng.sample(range(self.num_states), len(trees)))
        self.num_rows = max((len(tree.parents) for tree in trees), default=0) + 1
        # sequence and node of each token; None is dead
        self.tokens: list[tuple[int, int] | None] = []
        starts, slots, paths = [0], [], []
        for b, tree in enumerate(trees):
            fed = [(b, node) for node in tree.nodes]
            dead: list[tuple[int, int] | None] = [None] * tree.dead
            self.tokens += [*dead, *fed] if b % 2 else [*fed, *dead]
            starts.append(len(self.tokens))
        self.tokens.append(None)  # of nobody
        for token in self.tokens:
            slots.append(-1 if token is None else trees[token[0]].length + token[1])
            paths.append([] if token is None else trees[token[0]].path(token[1]))
        self.q_start = torch.tensor(starts, dtype=torch.int32)
        self.slot = torch.tensor(slots, dtype=torch.int32)
        self.cache_len = torch.tensor([tree.length for tree in trees], dtype=torch.int32)
        num_words = -(-self.num_rows // 64)
        # of dead tokens all bits are set
        words = [to_words(frozenset(p), num_words) if p else [-1] * num_words for p in paths]
        self.ancestors = None if causal else torch.tensor(words)
        self.states = torch.tensor(
            [[place, tree.certain] for place, tree in zip(self.places, trees, strict=True)],
            dtype=torch.int32,
        ).reshape(len(trees), 2)

    def of_tokens(self, of_nodes: Sequence[Tensor]) -> Tensor:
        """A row for each token, of those of each sequence's nodes; NaN where it is dead."""
        like = of_nodes[0][0]
        dead = torch.full_like(like, NAN)
        return torch.stack(
            [dead if token is None else of_nodes[token[0]][token[1]] for token in self.tokens]
        )

    def rows_before(self, of_nodes: Sequence[Tensor]) -> Tensor:
        """Replay rows before a pass: of nodes that are not fed, which earlier passes had."""
        rows = torch.full((self.num_states, self.num_rows, *of_nodes[0].shape[1:]), NAN)
        rows = rows.to(of_nodes[0].dtype)
        for place, tree, values in zip(self.places, self.trees, of_nodes, strict=True):
            for node in range(tree.certain, len(tree.parents)):
                if node not in tree.nodes:
                    rows[place, node] = values[node]
        return rows

    def rows_after(self, before: Tensor, of_nodes: Sequence[Tensor]) -> Tensor:
        """The same after it: nodes that are not certain have written theirs."""
        rows = before.clone()
        for b, node in filter(None, self.tokens):
            if node >= self.trees[b].certain:
                rows[self.places[b], node] = of_nodes[b][node]
        return rows

    def last_certain(self, b: int) -> int:
        """The last certain node of a sequence that is fed; -1 where none is."""
        tree = self.trees[b]
        return max((node for node in tree.nodes if node < tree.certain), default=-1)

    def path_of(self, b: int, node: int) -> list[int]:
        """Nodes that a node's state has seen beyond the one that the pass begins with."""
        tree = self.trees[b]
        first = 0 if self.last_certain(b) >= 0 else tree.certain
        return [each for each in tree.path(node) if each >= first]

    @property
    def where(self) -> tuple[Tensor | None, ...]:
        return self.q_start, self.slot, self.cache_len, self.ancestors, self.states
