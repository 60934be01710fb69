"""Oracles of the operators that do a layer's products together with what stands around them.

A residual addition and a norm before a product, and what a layer does with its result. All of
them compute in float32 and round once; but the sum, which later layers read, is rounded before it
is normalized.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from specc.kernels.reference_fused import ACTIVATIONS, rope_write_reference


def add_norm_linear_reference(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream, normalize the sum, and multiply.

    Args:
        x: [..., K] output of a block.
        residual: [..., K].
        gamma: [K] of the norm.
        eps: added to the mean square.
        unit_offset: the factor of the norm is 1 + gamma.
        weight: [N, K].
        bias: [N] or None.
    Returns:
        [..., N] and the sum [..., K], both in the dtype of x and contiguous.
    """
    y, total = _add_norm_linear(x, residual, gamma, eps, unit_offset, weight, bias)
    return y.to(x.dtype), total


def add_norm_gate_up_reference(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """The first half of a feed-forward layer: `add_norm_linear`, then `act_and_mul`.

    Args:
        x: [..., K]; the first five are those of `add_norm_linear_reference`.
        residual: [..., K].
        gamma: [K].
        eps: of the norm.
        unit_offset: of the norm.
        weight: [2 I, K]; the first I rows are the gate's.
        activation: `silu`, `gelu`, `gelu_tanh` or `relu`.
    Returns:
        [..., I] and the sum [..., K].
    """
    y, total = _add_norm_linear(x, residual, gamma, eps, unit_offset, weight, None)
    gate, up = y.chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(x.dtype), total


def add_norm_rope_write_reference(
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
) -> tuple[Tensor, Tensor]:
    """A layer up to its attention: `add_norm_linear` of q, k and v, then `rope_write`.

    Args:
        x: [..., K], Nt rows; the first five are those of `add_norm_linear_reference`.
        residual: [..., K].
        gamma: [K].
        eps: of the norm.
        unit_offset: of the norm.
        weight: [(H + 2 HK) · D, K]: the heads of q, of k, of v.
        bias: [(H + 2 HK) · D] or None.
        cos: [Nt, D]; all of a head is rotated. From here on as of `rope_write_reference`.
        sin: [Nt, D].
        k_cache: [blocks, block_size, HK, D], mutated.
        v_cache: [blocks, block_size, HK, D], mutated.
        q_start: [B + 1] int32.
        slot: [Nt] int32.
        block_table: [B, n] int32.
    Returns:
        [H, Nt, D] rotated queries, laid out as [Nt, H, D], and the sum like x.
    """
    y, total = _add_norm_linear(x, residual, gamma, eps, unit_offset, weight, bias)
    kv_heads, head_dim = k_cache.shape[2:]
    heads = y.view(slot.shape[0], -1, head_dim).transpose(0, 1)
    q, k, v = heads.split([heads.shape[0] - 2 * kv_heads, kv_heads, kv_heads])
    args = (cos.float(), sin.float(), k_cache, v_cache, q_start, slot, block_table)
    return rope_write_reference(q, k, v.to(x.dtype), *args).to(x.dtype), total


def _add_norm_linear(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The product in float32, and the rounded sum."""
    total = (x + residual).contiguous()
    wide = total.float()
    factor = gamma.float() + 1.0 if unit_offset else gamma.float()
    normed = wide * (wide.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt() * factor
    return functional.linear(normed, weight.float(), None if bias is None else bias.float()), total
