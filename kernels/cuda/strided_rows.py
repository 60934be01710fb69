"""Tensors [..., D] as rows that a kernel addresses by two strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def row_strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """From a row of each tensor to its next; 0 of one that is absent."""
    return tuple(0 if x is None else x.stride(0) for x in tensors)


def check(condition: bool, operator: str, found: str, needed: str) -> None:
    """Raises ValueError: of an operator, with what was found and what is needed."""
    if not condition:
        raise ValueError(f"{operator}: found {found}; needed {needed}")


def said(name: str, x: Tensor) -> str:
    """A tensor as errors name it."""
    return f"{name} {list(x.shape)} of {x.dtype}, strides {x.stride()}"


def check_tensors(
    operator: str,
    dtype: torch.dtype,
    shape: Sequence[int | str],
    *,
    is_contiguous: Any = False,
    **tensors: Tensor,
) -> None:
    """Raises ValueError: tensors of another dtype or shape, and rows that are not of one piece.

    Args:
        shape: sizes; a name is any size.
        is_contiguous: whether rows lie side by side, too.
    """
    sizes = f"[{', '.join(map(str, shape))}]"
    needed = f"{sizes} of {dtype}, {'contiguous' if is_contiguous else 'rows of one piece'}"
    for name, x in tensors.items():
        fits = x.dtype == dtype and x.dim() == len(shape)
        fits = fits and all(a in (b, str(a)) for a, b in zip(shape, x.shape, strict=True))
        is_dense = x.is_contiguous() if is_contiguous else are_rows_dense(x)
        check(fits and is_dense, operator, said(name, x), needed)


def are_rows_dense(x: Tensor) -> bool:
    """Whether neighbors of a row are neighbors in memory."""
    return x.dim() < 2 or x.shape[-1] < 2 or x.stride(-1) == 1


def check_dense(operator: str, **tensors: Tensor | None) -> None:
    """Raises ValueError: tensors whose last dimension has another stride than 1."""
    for name, x in tensors.items():
        if x is not None:
            is_dense = x.shape[-1] < 2 or x.stride(-1) == 1
            found = f"strides {x.stride()} of {name}"
            check(is_dense, operator, found, "1 in the last dimension")


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
