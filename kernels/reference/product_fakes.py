"""Shapes of what the operators of `products` return."""

from __future__ import annotations

from torch import Tensor


def add_norm_linear_fake(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], weight.shape[0]), x.new_empty(x.shape)


def add_norm_gate_up_fake(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2), x.new_empty(x.shape)


def add_norm_rope_write_fake(
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
    *args: object,
) -> tuple[Tensor, Tensor]:
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = weight.shape[0] // head_dim - 2 * kv_heads
    q = x.new_empty(cos.shape[0], num_heads, head_dim)
    return q.transpose(0, 1), x.new_empty(x.shape)


def embed_norm_rope_write_fake(
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
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = weight.shape[0] // head_dim - 2 * kv_heads
    q = embedding.new_empty(cos.shape[0], num_heads, head_dim)
    return q.transpose(0, 1), embedding.new_empty(*tokens.shape, embedding.shape[1])


def add_norm_head_fake(
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
