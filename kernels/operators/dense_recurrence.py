"""What models call for convolutions and recurrences over tokens, while they are traced."""

from __future__ import annotations

from torch import Tensor

from specc.kernels.operator import NoRule, Operator
from specc.kernels.reference import dense_recurrence

_TOKENS = NoRule("it mixes all rows: a pass rewrites it")
_CUT = NoRule("a pass rewrites it before the cut")


def _dense_conv_fake(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return x.new_empty(x.shape)


DENSE_CONV = Operator(
    'dense_conv(Tensor x, Tensor weight, Tensor? bias, *, str activation="") -> Tensor',
    reference=dense_recurrence.dense_conv_reference,
    fake=_dense_conv_fake,
    tokens=_TOKENS,
    cut=_CUT,
    stored=False,
)


def _dense_recurrence_fake(q: Tensor, k: Tensor, v: Tensor, *args: object) -> Tensor:
    return v.new_empty(v.shape)


DENSE_RECURRENCE = Operator(
    "dense_recurrence(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta) -> Tensor",
    reference=dense_recurrence.dense_recurrence_reference,
    fake=_dense_recurrence_fake,
    tokens=_TOKENS,
    cut=_CUT,
    stored=False,
)
