"""The token tree: nodes, parents, and everything that derives from them.

Node 0 is the root, the sequence's last token, which has no K and V row yet. `parents[0] == -1` and
`parents[i] < i`, so node order is topological. Source: SpecInfer, arXiv:2305.09781 §3 and §4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specc.errors import TreeError

MAX_NODES = 1024
WORD_BITS = 64


@dataclass(frozen=True)
class TokenTree:
    """A static token tree.

    Args:
        parents: node ids, `parents[0] == -1`, `parents[i] < i`; level by level, siblings adjacent.
        widths: children per frontier node and level, if the tree is an expansion; else empty.
    Raises:
        TreeError: a parent does not precede its child, or the tree has more than 1024 nodes.
    """

    parents: tuple[int, ...]
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise TreeError(
                f"parents {self.parents[:8]}",
                "parents[0] == -1 (the root has no parent)",
                "put the root first",
            )
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise TreeError(
                    f"node {node} has parent {parent}",
                    f"a parent in 0 … {node - 1}",
                    "order the nodes so that every parent precedes its children",
                )
        if len(self.parents) > MAX_NODES:
            raise TreeError(
                f"a tree of {len(self.parents)} nodes",
                f"at most {MAX_NODES} nodes",
                "choose smaller widths or fewer levels",
            )

    @classmethod
    def from_widths(cls, widths: tuple[int, ...] | list[int]) -> TokenTree:
        """Static expansion ⟨k1 … km⟩: every node of level i - 1 gets k_i children (SpecInfer §3).

        Raises:
            TreeError: no level, a width below 1, or more than 1024 nodes.
        """
        if not widths or any(width < 1 for width in widths):
            raise TreeError(
                f"tree widths {_listed(widths) or '(none)'}",
                "one or more levels, each of width 1 or more",
                "for example --tree 3,2,1",
            )
        num_nodes, level_nodes = 1, 1
        for width in widths:
            level_nodes *= width
            num_nodes += level_nodes
            if num_nodes > MAX_NODES:
                raise TreeError(
                    f"tree widths {_listed(widths)}: more than {MAX_NODES} nodes",
                    f"at most {MAX_NODES} nodes",
                    "choose smaller widths or fewer levels",
                )
        parents, frontier = [-1], [0]
        for width in widths:
            children = []
            for node in frontier:
                for _ in range(width):
                    children.append(len(parents))
                    parents.append(node)
            frontier = children
        return cls(tuple(parents), tuple(widths))

    @classmethod
    def chain(cls, num_speculative_tokens: int) -> TokenTree:
        """A chain of draft tokens; 0 gives the root alone (plain decoding)."""
        if num_speculative_tokens == 0:
            return cls((-1,), ())
        return cls.from_widths((1,) * num_speculative_tokens)

    @classmethod
    def side_by_side(cls, trees: Sequence[TokenTree]) -> TokenTree:
        """Trees below one root, level by level, those of the first tree first."""
        parents, numbers = [-1], [[0] * tree.num_nodes for tree in trees]
        for depth in range(1, max(tree.max_depth for tree in trees) + 1):
            for tree, number in zip(trees, numbers, strict=True):
                for node in tree.levels[depth] if depth <= tree.max_depth else ():
                    number[node] = len(parents)
                    parents.append(number[tree.parents[node]])
        return cls(tuple(parents))

    @property
    def num_nodes(self) -> int:
        """Nodes, root included: the width of the verification pass."""
        return len(self.parents)

    @property
    def num_draft_tokens(self) -> int:
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Node ids of each depth; `levels[0] == (0,)`."""
        levels: list[list[int]] = [[] for _ in range(self.max_depth + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return tuple(tuple(level) for level in levels)

    @cached_property
    def leaves(self) -> frozenset[int]:
        return frozenset(range(self.num_nodes)) - frozenset(self.parents)

    def children(self, node: int) -> tuple[int, ...]:
        return tuple(i for i, parent in enumerate(self.parents) if parent == node)

    def ancestor_mask(self) -> Tensor:
        """[N, N] bool; `mask[i, j]` is True when j is an ancestor of i, or i itself."""
        mask = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def ancestor_words(self) -> Tensor:
        """[N, W] int64; bit j of word w is set when node 64w + j is an ancestor-or-self."""
        return pack_bits(self.ancestor_mask())


def _listed(widths: tuple[int, ...] | list[int]) -> str:
    text = ",".join(map(str, widths[:12]))
    return text if len(widths) <= 12 else f"{text},… ({len(widths)} levels)"


def pack_bits(mask: Tensor) -> Tensor:
    """Pack [R, N] bool into [R, ceil(N / 64)] int64; bit j of word w is column 64w + j."""
    rows, columns = mask.shape
    num_words = -(-columns // WORD_BITS)
    padded = torch.zeros(rows, num_words * WORD_BITS, dtype=torch.int64)
    padded[:, :columns] = mask
    # bit 63 is the sign bit: summing 1 << 63 wraps to the right word in two's complement
    weights = torch.ones(WORD_BITS, dtype=torch.int64) << torch.arange(WORD_BITS)
    return (padded.view(rows, num_words, WORD_BITS) * weights).sum(-1)
