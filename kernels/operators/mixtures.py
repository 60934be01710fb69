"""Mixtures of experts: the choice of experts, and what they make of tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specc.kernels.operator import NoRule, OfRows, Operand, Operator, PassLimits, Reads, count
from specc.kernels.reference import products, routing

_FUSED = NoRule("fused after the cut")
_INT_BYTES = _FLOAT_BYTES = 4
# programs that share the sum of a logit (specc.kernels.cuda.route)
ROUTE_SPLITS = 4
# experts of a mixture, and of a token, that CUDA has kernels of few launches for
MOST_EXPERTS, MOST_CHOSEN = 512, 16


def _route_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    scores: str,
    top_k: int,
    normalize: bool,
    eps: float,
    scale: float,
    groups: int,
    top_groups: int,
    group_best: int,
    shared: int = 0,
    shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], top_k + shared
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)


ROUTE = Operator(
    "route(Tensor x, Tensor weight, Tensor? bias, Tensor? correction, str scores, int top_k,"
    " bool normalize, float eps, float scale, int groups, int top_groups, int group_best,"
    " int shared=0, Tensor? shared_gate=None) -> (Tensor ids, Tensor weights)",
    reference=routing.route_reference,
    fake=_route_fake,
    tokens=OfRows(("x",), parameters=("weight", "bias", "correction", "shared_gate")),
    cut=_FUSED,
    flops=lambda x, weight, shared_gate=None, **_: (
        2 * count(x.shape) * (weight.shape[0] + (shared_gate is not None))
    ),
    scratch=lambda limits, x, weight, **_: (
        _FLOAT_BYTES * ROUTE_SPLITS * (int(weight.shape[0]) + 1) * x.shape[0]
    ),
    reads=Reads(whole="weight"),
    cuda="route:route",
)


def _experts_fake(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


def _experts_flops(x: Operand, ids: Operand, down: Operand, size: int = 0, **_: object) -> int:
    """Of three matrices for each pair of a token and one of its experts."""
    return 6 * count(ids.shape) * int(x.shape[1]) * (size or int(down.shape[-1]))


def _experts_scratch(
    limits: PassLimits, x: Operand, ids: Operand, gate_up: Operand, down: Operand, size: int = 0,
    **_: object,
) -> int:  # fmt: skip
    """A row of each product for every pair of a token and one of its experts, and their order."""
    num_pairs = ids.shape[0] * int(ids.shape[1])
    inner = (size or int(down.shape[-1])) * x.itemsize
    # of quantized experts more than there are
    return num_pairs * (inner + int(x.shape[1]) * _FLOAT_BYTES + _INT_BYTES) + (
        int(gate_up.shape[0]) * _INT_BYTES
    )


EXPERTS = Operator(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, str activation,"
    " Tensor? gate_up_bias=None, Tensor? down_bias=None, int size=0, str gate_up_layout='',"
    " str down_layout='', Tensor? shared_gate_up=None, Tensor? shared_down=None) -> Tensor",
    reference=products.experts_reference,
    fake=_experts_fake,
    tokens=OfRows(
        ("x",),
        ("ids", "weights"),
        ("gate_up", "down", "gate_up_bias", "down_bias", "shared_gate_up", "shared_down"),
    ),
    cut=_FUSED,
    flops=_experts_flops,
    scratch=_experts_scratch,
    reads=Reads(experts="ids", shared=("shared_gate_up", "shared_down")),
    cuda="experts:experts",
)

# a token has the same bits however many there are
INVARIANT_EXPERTS = replace(
    EXPERTS, schema=f"invariant_{EXPERTS.schema}", cuda="experts:invariant_experts"
)
