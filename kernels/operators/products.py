"""Products with what stands before and after them: one call each.

With many rows they run the operators that they were made of.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specc.artifact.weight_layout import BLOCK
from specc.kernels.operator import (
    NoRule,
    OfHeads,
    OfRows,
    Operand,
    Operator,
    PassLimits,
    Reads,
    count,
)
from specc.kernels.operators.linear_q import decoded_bytes
from specc.kernels.reference import fused, products

_FUSED = NoRule("fused after the cut")


def _inside(
    limits: PassLimits, rows: int, x: Operand, weight: Operand, is_last: bool, layout: str = ""
) -> int:
    """Of many rows: what the norm makes of them, a product before what follows it, and as much of
    a weight in blocks as is decoded at a time.

    Args:
        x: whose last dimension the product contracts.
        layout: of a weight in blocks.
    """
    outputs, size = _outputs(weight, layout), int(x.shape[-1])
    inside = int(rows * (size + (0 if is_last else outputs)) * x.itemsize)
    return inside + (decoded_bytes(limits, rows, size, outputs, x.itemsize) if layout else 0)


def _outputs(weight: Any, layout: str) -> int:
    """N of a weight [N, K], or of one in whole blocks."""
    return int(weight.shape[0]) * (BLOCK if layout else 1)


def _rope_write_fake(q: Tensor, *args: object) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)


ROPE_WRITE = Operator(
    "rope_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache,"
    " Tensor(b!) v_cache, Tensor q_start, Tensor slot, Tensor block_table, bool hadamard=False)"
    " -> Tensor",
    reference=fused.rope_write_reference,
    fake=_rope_write_fake,
    tokens=OfHeads(("q", "k", "v"), ("cos", "sin")),
    cut=_FUSED,
    cuda="rope_write:rope_write",
    cpu=True,
)


NORM_ROPE_WRITE = Operator(
    "norm_rope_write(Tensor q, Tensor k, Tensor v, Tensor q_gamma, Tensor k_gamma, float eps,"
    " bool unit_offset, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor q_start, Tensor slot, Tensor block_table, bool hadamard=False) -> Tensor",
    reference=fused.norm_rope_write_reference,
    fake=_rope_write_fake,
    tokens=OfHeads(("q", "k", "v"), ("cos", "sin"), parameters=("q_gamma", "k_gamma")),
    cut=_FUSED,
    cuda="rope_write:norm_rope_write",
)


def _add_norm_linear_fake(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    layout: str = "",
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], _outputs(weight, layout)), x.new_empty(x.shape)


def _row_flops(x: Operand, weight: Operand, layout: str = "", **_: object) -> int:
    return 2 * count(x.shape) * _outputs(weight, layout)


ADD_NORM_LINEAR = Operator(
    "add_norm_linear(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, Tensor? bias, str layout='') -> (Tensor y, Tensor total)",
    reference=products.add_norm_linear_reference,
    fake=_add_norm_linear_fake,
    tokens=OfRows(("x", "residual"), parameters=("gamma", "weight", "bias")),
    cut=_FUSED,
    flops=_row_flops,
    scratch=lambda limits, x, weight, layout="", **_: _inside(
        limits, count(x.shape[:-1]), x, weight, True, layout
    ),
    cuda="add_norm_linear:add_norm_linear",
)


def _add_norm_gate_up_fake(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    activation: str,
    layout: str = "",
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], _outputs(weight, layout) // 2), x.new_empty(x.shape)


ADD_NORM_GATE_UP = Operator(
    "add_norm_gate_up(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, str activation, str layout='') -> (Tensor y, Tensor total)",
    reference=products.add_norm_gate_up_reference,
    fake=_add_norm_gate_up_fake,
    tokens=OfRows(("x", "residual"), parameters=("gamma", "weight")),
    cut=_FUSED,
    flops=_row_flops,
    scratch=lambda limits, x, weight, layout="", **_: _inside(
        limits, count(x.shape[:-1]), x, weight, False, layout
    ),
    cuda="add_norm_gate_up:add_norm_gate_up",
)


def _heads_of(
    rows: Tensor, weight: Tensor, cos: Tensor, k_cache: Tensor, layout: str = ""
) -> Tensor:
    """Queries [H, Nt, D], of a projection to queries, keys and values."""
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = _outputs(weight, layout) // head_dim - 2 * kv_heads
    return rows.new_empty(cos.shape[0], num_heads, head_dim).transpose(0, 1)


def _add_norm_rope_write_fake(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
    layout: str = "",
) -> tuple[Tensor, Tensor]:
    return _heads_of(x, weight, cos, k_cache, layout), x.new_empty(x.shape)


ADD_NORM_ROPE_WRITE = Operator(
    "add_norm_rope_write(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, Tensor? bias, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor q_start, Tensor slot, Tensor block_table, str layout='')"
    " -> (Tensor q, Tensor total)",
    reference=products.add_norm_rope_write_reference,
    fake=_add_norm_rope_write_fake,
    tokens=OfRows(("x", "residual"), ("cos", "sin"), ("gamma", "weight", "bias")),
    cut=_FUSED,
    flops=_row_flops,
    scratch=lambda limits, x, weight, layout="", **_: _inside(
        limits, count(x.shape[:-1]), x, weight, False, layout
    ),
    cuda="add_norm_rope_fragments:add_norm_rope_write",
)


def _embed_norm_rope_write_fake(
    tokens: Tensor,
    embedding: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    *args: object,
) -> tuple[Tensor, Tensor]:
    total = embedding.new_empty(*tokens.shape, embedding.shape[1])
    return _heads_of(embedding, weight, cos, k_cache), total


EMBED_NORM_ROPE_WRITE = Operator(
    "embed_norm_rope_write(Tensor tokens, Tensor embedding, Tensor gamma, float eps,"
    " bool unit_offset, Tensor weight, Tensor? bias, Tensor cos, Tensor sin,"
    " Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor q_start, Tensor slot, Tensor block_table)"
    " -> (Tensor q, Tensor total)",
    reference=products.embed_norm_rope_write_reference,
    fake=_embed_norm_rope_write_fake,
    tokens=OfRows(
        ("tokens",), ("cos", "sin"), ("embedding", "gamma", "weight", "bias"), are_ids=True
    ),
    cut=_FUSED,
    flops=lambda tokens, weight, **_: 2 * count(tokens.shape) * count(weight.shape),
    scratch=lambda limits, tokens, embedding, weight, **_: _inside(
        limits, count(tokens.shape), embedding, weight, False
    ),
    reads=Reads(rows="embedding"),
    cuda="embed_norm_rope_write:embed_norm_rope_write",
)


def _add_norm_head_fake(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
) -> Tensor:
    return x.new_empty(*x.shape[:-2], rows.shape[0], weight.shape[0])


ADD_NORM_HEAD = Operator(
    "add_norm_head(Tensor x, Tensor residual, Tensor gamma, float eps, bool unit_offset,"
    " Tensor weight, Tensor? bias, Tensor rows) -> Tensor",
    reference=products.add_norm_head_reference,
    fake=_add_norm_head_fake,
    tokens=OfRows(("x", "residual"), (), ("gamma", "weight", "bias"), chosen="rows"),
    cut=_FUSED,
    flops=lambda x, rows, weight, **_: (
        2 * count(x.shape[:-2]) * count(rows.shape) * count(weight.shape)
    ),
    scratch=lambda limits, x, rows, weight, **_: _inside(
        limits, count(rows.shape), x, weight, True
    ),
    cuda="add_norm_head:add_norm_head",
)
