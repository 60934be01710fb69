"""Layers that keep a state: convolutions and recurrences over trees, and what folds paths in."""

from __future__ import annotations

from torch import Tensor

from specc.artifact.backends import NATIVE, PARTS
from specc.kernels.operator import NoRule, OfHeads, Operand, Operator, PassLimits, nothing
from specc.kernels.operators.acceptance import OF_STEPS
from specc.kernels.reference import recurrence

_FLOAT_BYTES = 4
# what threads of the C++ hold of a head's state: columns at a time, and threads that a machine may
# have
_COLUMNS, _THREADS = 32, 64
_WHOLE = NoRule("ranks do not cut layers that keep states")


def _tree_conv_fake(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return x.new_empty(x.shape)


TREE_CONV = Operator(
    "tree_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor(b!) rows,"
    " Tensor q_start, Tensor slot, Tensor cache_len, Tensor? ancestors, Tensor states, *,"
    ' str activation="") -> Tensor',
    reference=recurrence.tree_conv_reference,
    fake=_tree_conv_fake,
    tokens=OfHeads(tables=("x",), parameters=("weight", "bias")),
    cut=_WHOLE,
    cuda="tree_conv:tree_conv",
    cpu=True,
)


def _tree_recurrence_fake(q: Tensor, k: Tensor, v: Tensor, *args: object) -> Tensor:
    return v.new_empty(v.shape)


def _states_at_once(limits: PassLimits) -> int:
    """States that exist at one time while a tree is walked, the larger of two branches last."""
    return limits.longest.bit_length() + 2


def _tree_recurrence_scratch(limits: PassLimits, k: Operand, v: Operand, **_: object) -> int:
    """In C++: columns of the states of a path, of each thread. In torch: states, and products.

    On a GPU states are in registers.
    """
    if limits.attention == PARTS:
        return 0
    heads, value_dim = map(int, v.shape[1:])
    key_dim = int(k.shape[2])
    if limits.attention == NATIVE:
        # and what a token is to each row
        state = key_dim * (_COLUMNS + 5)
        return _FLOAT_BYTES * _THREADS * _states_at_once(limits) * state
    return 4 * _FLOAT_BYTES * heads * key_dim * value_dim


TREE_RECURRENCE = Operator(
    "tree_recurrence(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor(a!) state,"
    " Tensor(b!) rows, Tensor q_start, Tensor slot, Tensor cache_len, Tensor? ancestors,"
    " Tensor states) -> Tensor",
    reference=recurrence.tree_recurrence_reference,
    fake=_tree_recurrence_fake,
    tokens=OfHeads(of_tokens=("q", "k", "v", "g", "beta")),
    cut=_WHOLE,
    scratch=_tree_recurrence_scratch,
    cuda="tree_recurrence:tree_recurrence",
    cpu=True,
)

FOLD_CONV = Operator(
    "fold_conv(Tensor(a!) state, Tensor rows, Tensor source, Tensor cache_len, Tensor states)"
    " -> ()",
    reference=recurrence.fold_conv_reference,
    fake=nothing,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="tree_conv:fold_conv",
    cpu=True,
)

FOLD_RECURRENCE = Operator(
    "fold_recurrence(Tensor(a!) state, Tensor rows, Tensor source, Tensor cache_len,"
    " Tensor states, *, int key_heads, bool has_beta) -> ()",
    reference=recurrence.fold_recurrence_reference,
    fake=nothing,
    tokens=OF_STEPS,
    cut=OF_STEPS,
    cuda="tree_recurrence:fold_recurrence",
    cpu=True,
)
