"""What the ranks of a sharded engine do together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specc.kernels.operator import Elementwise, NoRule, Operator
from specc.kernels.reference import ranks

_AROUND = NoRule("the runtime calls it around graphs")


def _like(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


def _all_reduce_onnx(emit: Any) -> Any:
    def all_reduce(x: Any) -> Any:
        return emit.sum_over_ranks(x)

    return all_reduce


ALL_REDUCE = Operator(
    "all_reduce(Tensor x) -> Tensor",
    reference=ranks.all_reduce_reference,
    fake=_like,
    # the same element of every rank
    tokens=Elementwise(),
    cut=Elementwise(),
    onnx=_all_reduce_onnx,
    cpu=True,
)


def _gather_rows_fake(x: Tensor) -> Tensor:
    # how many ranks there are, and which one this is, is known where it runs
    return x.new_empty(x.shape[0], torch.library.get_ctx().new_dynamic_size(min=0))


GATHER_ROWS = Operator(
    "gather_rows(Tensor x) -> Tensor",
    reference=ranks.gather_rows_reference,
    fake=_gather_rows_fake,
    tokens=_AROUND,
    cut=_AROUND,
    cpu=True,
    stored=False,
)

FROM_FIRST = Operator(
    "from_first(Tensor x) -> Tensor",
    reference=ranks.from_first_reference,
    fake=_like,
    tokens=_AROUND,
    cut=_AROUND,
    cpu=True,
    stored=False,
)

OVER_LINK = Operator(
    "over_link(Tensor x, str link) -> Tensor",
    reference=ranks.over_link_reference,
    fake=_like,
    tokens=_AROUND,
    cut=_AROUND,
    stored=False,
)


def _best_of_ranks_fake(score: Tensor, token: Tensor) -> Tensor:
    return token.new_empty(token.shape)


BEST_OF_RANKS = Operator(
    "best_of_ranks(Tensor score, Tensor token) -> Tensor",
    reference=ranks.best_of_ranks_reference,
    fake=_best_of_ranks_fake,
    tokens=_AROUND,
    cut=_AROUND,
    cpu=True,
    stored=False,
)
