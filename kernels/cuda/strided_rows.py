"""Tensors [..., D] as rows that a kernel addresses by two strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rows:
    """Row r of each tensor starts at (r // num_inner) · outer + (r % num_inner) · inner.

    Args:
        tensors: the tensors, copied where two strides could not express them.
        strides: (outer, inner) of each, in elements.
        num_rows: rows of each.
        num_inner: rows of the inner dimension; 1 where one stride is enough.
    """

    tensors: tuple[Tensor, ...]
    strides: tuple[tuple[int, int], ...]
    num_rows: int
    num_inner: int


def rows_of(*tensors: Tensor) -> Rows:
    """Rows of tensors of one shape; heads [1, Nt, H, D] of a wider projection need no copy."""
    shape = tensors[0].shape[:-1]
    num_rows = shape.numel()
    merged = _merged(tensors)
    if len(merged) > 2 or any(x.stride(-1) != 1 for x in tensors if x.shape[-1] > 1):
        # no graph that specc compiles has such a tensor; a copy keeps the operator general
        tensors = tuple(x.contiguous() for x in tensors)
        merged = _merged(tensors)
    merged = [(1, (0,) * len(tensors))] * (2 - len(merged)) + merged
    (_, outer), (num_inner, inner) = merged
    if num_inner == num_rows:  # one stride is enough: rows are the outer dimension
        num_inner, outer, inner = 1, inner, (0,) * len(tensors)
    return Rows(tensors, tuple(zip(outer, inner, strict=True)), num_rows, num_inner)


def check(condition: bool, operator: str, found: str, needed: str) -> None:
    if not condition:
        raise ValueError(f"{operator}: found {found}; needed {needed}")


def _merged(tensors: tuple[Tensor, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """(size, stride of each tensor) of the fewest dimensions that address all rows."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in reversed(range(tensors[0].dim() - 1)):
        size = tensors[0].shape[dim]
        if size == 1:
            continue
        strides = tuple(x.stride(dim) for x in tensors)
        if merged and all(
            a == b * merged[0][0] for a, b in zip(strides, merged[0][1], strict=True)
        ):
            merged[0] = (size * merged[0][0], merged[0][1])
        else:
            merged.insert(0, (size, strides))
    return merged
