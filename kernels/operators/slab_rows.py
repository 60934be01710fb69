"""Rows of any width, paged as keys and values are: hidden states that drafts read."""

from __future__ import annotations

from torch import Tensor

from specc.kernels.operator import NamedRows, NoRule, OfHeads, Operator, nothing
from specc.kernels.reference import slab_rows

_WHOLE = NoRule("hidden states are kept whole, for drafts that one rank has")

WRITE_ROWS = Operator(
    "write_rows(Tensor x, Tensor(a!) slab, Tensor q_start, Tensor slot, Tensor block_table) -> ()",
    reference=slab_rows.write_rows_reference,
    fake=nothing,
    tokens=OfHeads(tables=("x",)),
    cut=_WHOLE,
    cuda="slab_rows:write_rows",
    cpu=True,
)


def _take_rows_fake(slab: Tensor, slots: Tensor, *args: object) -> Tensor:
    return slab.new_empty(*slots.shape, slab.shape[2])


TAKE_ROWS = Operator(
    "take_rows(Tensor slab, Tensor slots, Tensor q_start, Tensor block_table) -> Tensor",
    reference=slab_rows.take_rows_reference,
    fake=_take_rows_fake,
    tokens=NamedRows("slots"),
    cut=_WHOLE,
    cuda="slab_rows:take_rows",
    cpu=True,
)
