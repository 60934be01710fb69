"""Oracles of the collectives of a sharded engine, for ranks that live in one process.

A group works on lists: a tensor of each of its ranks that this process has. `LockstepGroup` has
all of them, so a test or a tool that walks the graphs of N ranks node by node calls it with the N
values of a node. The operators are those of a process that is one rank, and take the group that
`use_group` has set; `LockstepGroup(1)` is the group of a process that is alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specc.errors import RankError

_HALF_TYPES = (torch.bfloat16, torch.float16)


class Ranks(Protocol):
    """A group; each list holds a tensor of each rank of this process, in their order."""

    def all_reduce(self, xs: Sequence[Tensor]) -> list[Tensor]: ...

    def gather_rows(self, xs: Sequence[Tensor]) -> list[Tensor]: ...

    def from_first(self, xs: Sequence[Tensor]) -> list[Tensor]: ...

    def best_of_ranks(self, scores: Sequence[Tensor], tokens: Sequence[Tensor]) -> list[Tensor]: ...


class Links(Protocol):
    """Ways from one rank to another, of a rank whose target has stages."""

    def over_link(self, x: Tensor, link: str) -> Tensor: ...


class LockstepGroup:
    """N ranks in one process.

    Args:
        num_ranks: N, 1 or more.
    """

    def __init__(self, num_ranks: int) -> None:
        assert num_ranks >= 1
        self.num_ranks = num_ranks

    def all_reduce(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Sum of rank 0's, rank 1's, … in this order, for each rank; half types in float32."""
        self._check(xs)
        first = xs[0]
        total = first.float() if first.dtype in _HALF_TYPES else first
        for x in xs[1:]:
            total = total + x
        return [total.to(first.dtype, copy=True) for _ in xs]

    def gather_rows(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """[R, C] of each → [R, N * C] for rank 0, [R, 0] for the others."""
        self._check(xs)
        return [torch.cat(list(xs), dim=1), *(x.new_empty(x.shape[0], 0) for x in xs[1:])]

    def from_first(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Rank 0's, for each rank; the others say with theirs what they expect."""
        self._check(xs)
        return [xs[0].clone() for _ in xs]

    def best_of_ranks(self, scores: Sequence[Tensor], tokens: Sequence[Tensor]) -> list[Tensor]:
        """Token of the largest score, for each rank; see `best_of_ranks_reference`."""
        self._check(scores)
        self._check(tokens)
        best_score, best = scores[0], tokens[0]
        for score, token in zip(scores[1:], tokens[1:], strict=True):
            is_above = (score > best_score) | (score.isnan() & ~best_score.isnan())
            is_below = (score < best_score) | (~score.isnan() & best_score.isnan())
            takes = is_above | (~is_below & (token < best))
            best_score = torch.where(takes, score, best_score)
            best = torch.where(takes, token, best)
        return [best.clone() for _ in tokens]

    def _check(self, xs: Sequence[Tensor]) -> None:
        if len(xs) != self.num_ranks:
            raise RankError(
                f"{len(xs)} tensors in a group of {self.num_ranks} ranks",
                "a tensor of each rank",
                "walk the graphs of all ranks together, or open a group of 1",
            )
        if len({(x.dtype, x.shape) for x in xs}) != 1:
            found = ", ".join(f"{x.dtype} {list(x.shape)}" for x in xs)
            raise RankError(
                f"ranks with different tensors: {found}",
                "one dtype and one shape",
                "report this",
            )


_group: Ranks | None = None
_links: Links | None = None


def use_group(group: Ranks | None) -> None:
    """Set the group whose one rank this process is; None: it is no rank."""
    global _group
    _group = group


def use_links(links: Links | None) -> None:
    """Set the links that this process is at an end of; None: it has none."""
    global _links
    _links = links


def has_group() -> bool:
    """Whether this process is a rank of a group that is open."""
    return _group is not None


def _of_this_process() -> Ranks:
    if _group is None:
        raise RankError(
            "a collective in a process that is no rank",
            "a group of ranks that this process opened",
            "run an engine that is cut for several ranks by specc run, serve or bench",
        )
    return _group


def all_reduce_reference(x: Tensor) -> Tensor:
    """Add up the tensors of all ranks, in the order of ranks.

    Args:
        x: float32, bfloat16 or float16, the same shape and dtype on every rank.
    Returns:
        the sum, in the dtype of x, with the same bits on every rank. Half types are added up in
        float32 and rounded once.
    Raises:
        RankError: this process is no rank, or another rank is gone, late or does not agree.
    """
    return _of_this_process().all_reduce([x])[0]


def gather_rows_reference(x: Tensor) -> Tensor:
    """Put the columns of all ranks side by side on rank 0.

    Args:
        x: [R, C], the same shape and dtype on every rank.
    Returns:
        [R, N * C] on rank 0, rank 0's columns first; [R, 0] on the others.
    Raises:
        RankError: as in `all_reduce_reference`.
    """
    return _of_this_process().gather_rows([x])[0]


def from_first_reference(x: Tensor) -> Tensor:
    """Give what rank 0 has to all ranks.

    Args:
        x: any shape and dtype, the same on every rank; only rank 0's values count.
    Returns:
        rank 0's x.
    Raises:
        RankError: as in `all_reduce_reference`.
    """
    return _of_this_process().from_first([x])[0]


def over_link_reference(x: Tensor, link: str) -> Tensor:
    """Give what one rank has to one other rank.

    Args:
        x: any shape and dtype, the same at both ends; only the sender's values count.
        link: name of it; a link goes one way.
    Returns:
        the sender's x.
    Raises:
        RankError: this process has no such link, or the rank at the other end is gone.
    """
    if _links is None:
        raise RankError(
            f"a value over the {link}, in a process that has no links",
            "a rank of an engine whose target has stages",
            "report this",
        )
    return _links.over_link(x, link)


def best_of_ranks_reference(score: Tensor, token: Tensor) -> Tensor:
    """Choose among the tokens that each rank found best in its part of the vocabulary.

    Args:
        score: float32, the same shape on every rank.
        token: int64 in the shape of score.
    Returns:
        in each place the token of the largest score, on every rank. NaN counts as the largest, as
        in argmax; among equal scores the smallest token wins.
    Raises:
        RankError: as in `all_reduce_reference`.
    """
    return _of_this_process().best_of_ranks([score], [token])[0]
