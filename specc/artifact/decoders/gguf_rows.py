"""Orders of rows: which row of a file's tensors a row of a model's parameter is.

llama.cpp's converter moves rows of projections, and stacks or takes apart what a model has fused.
Blocks of quantized weights lie in rows, so they move with them, and stay as they are.

An order maps numbers of the parameter's rows (vectors along its last dimension, in row-major order)
to numbers of stored rows, those of one tensor after those of the other.
Source: llama.cpp, conversion/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specc.artifact.decoders.stored_tensors import read_vectors
from specc.artifact.safetensors_io import TensorReader

RowOrder = Callable[[Tensor], Tensor]


def from_row(first: int) -> RowOrder:
    """Rows from `first` on, of a tensor that is several parameters one after the other."""
    return lambda rows: rows + first


def pairs(head: int) -> RowOrder:
    """Heads of `head` rows whose rotary halves are stored pair by pair: (half, i) at (i, half)."""

    def order(rows: Tensor) -> Tensor:
        place = rows % head
        return rows - place + place % (head // 2) * 2 + place // (head // 2)

    return order


def groups_of_heads(heads: int, kv_heads: int, head: int) -> RowOrder:
    """Queries, keys and values of one group of heads after the other, stored one kind after the
    other.

    Args:
        heads: of queries.
        kv_heads: groups; each has `heads / kv_heads` queries, a key and a value.
        head: rows of a head.
    """
    queries = heads // kv_heads

    def order(rows: Tensor) -> Tensor:
        group, place = rows // (head * (queries + 2)), rows % (head * (queries + 2))
        kind, row = place // head, place % head
        own = torch.where(kind < queries, group * queries + kind, heads + group)
        own += torch.where(kind == queries + 1, kv_heads, 0)
        return own * head + row

    return order


def tiled_heads(groups: int, heads: int, width: int, before: int = 0) -> RowOrder:
    """Heads side by side in their groups, stored as the first of each group, then the second, ….

    Args:
        groups: each has `heads / groups`.
        heads: all of them.
        width: rows of a head.
        before: rows that lie before them, in the same order in both.
    """
    each = heads // groups

    def order(rows: Tensor) -> Tensor:
        head, place = (rows - before) // width, (rows - before) % width
        own = (head % each * groups + head // each) * width + place + before
        return torch.where(rows < before, rows, own)

    return order


def grouped_states(groups: int, key_width: int, value_rows: int) -> RowOrder:
    """Of each key head a query, a key, its values and their gates, stored one kind after the other.

    Args:
        groups: key heads.
        key_width: rows of a query, and of a key.
        value_rows: rows of all values of one key head, and of their gates.
    """
    sizes = torch.tensor([key_width, key_width, value_rows, value_rows])
    ends = sizes.cumsum(0)

    def order(rows: Tensor) -> Tensor:
        group, place = rows // ends[-1], rows % ends[-1]
        kind = torch.searchsorted(ends, place, right=True)
        first = ends[kind] - sizes[kind]
        return first * groups + group * sizes[kind] + place - first

    return order


def stacked_halves(matrices: int, rows_of_half: int, is_interleaved: bool = False) -> RowOrder:
    """Matrices of two halves, stored as all first halves and all second ones.

    Args:
        matrices: experts.
        rows_of_half: of each matrix.
        is_interleaved: rows of the two alternate, in place of one half after the other.
    """
    size = rows_of_half

    def order(rows: Tensor) -> Tensor:
        matrix, place = rows // (2 * size), rows % (2 * size)
        half, row = (place % 2, place // 2) if is_interleaved else (place // size, place % size)
        return (half * matrices + matrix) * size + row

    return order


def then(first: RowOrder | None, second: RowOrder | None) -> RowOrder | None:
    """Of rows in the order `first`, whose numbers `second` orders again."""
    if first is None or second is None:
        return first or second
    return lambda rows: second(first(rows))


def read_in_order(
    reader: TensorReader, tensors: Sequence[str], order: RowOrder | None, start: int, stop: int
) -> Tensor:
    """Rows start … stop - 1 of a parameter as they are stored, [stop - start, width].

    Args:
        reader: of the file.
        tensors: what it consists of, all of one type and width.
        order: of its rows; None is that of the tensors.
        start: of the parameter's rows.
        stop: of them.
    """
    rows = torch.arange(start, stop)
    wanted, found, base = rows if order is None else order(rows), None, 0
    for name in tensors:
        count = math.prod(reader.shape(name)[:-1])
        own = (wanted >= base) & (wanted < base + count)
        if bool(own.any()):
            numbers, places = (wanted[own] - base).unique(return_inverse=True)
            values = read_vectors(reader, name, numbers)
            if len(tensors) == 1:
                return values if order is None else values[places]
            if found is None:
                found = values.new_empty(len(wanted), values.shape[1])
            found[own] = values[places]
        base += count
    assert found is not None
    return found
