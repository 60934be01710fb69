"""Oracles of the operators that do a layer's products together with what stands around them.

A residual addition and a norm before a product, and what a layer does with its result. All of
them compute in float32 and round once; but the sum, which later layers read, is rounded before it
is normalized.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.weight_layout import BLOCK
from specc.kernels.reference.fused import ACTIVATIONS, CLAMPED, gated, rope_write_reference


def add_norm_linear_reference(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    layout: str = "",
) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream, normalize the sum, and multiply.

    Args:
        x: [..., K] output of a block.
        residual: [..., K].
        gamma: [K] of the norm.
        eps: added to the mean square.
        unit_offset: the factor of the norm is 1 + gamma.
        weight: [N, K]; or uint8 [blocks, bytes] with N = 32 · blocks outputs.
        bias: [N] or None.
        layout: name of the layout of a weight in blocks, see `specc.artifact.quantized_layout`.
    Returns:
        [..., N] and the sum [..., K], both in the dtype of x and contiguous.
    """
    weight = _floats(weight, x.shape[-1], layout)
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
    layout: str = "",
) -> tuple[Tensor, Tensor]:
    """The first half of a feed-forward layer: `add_norm_linear`, then `act_and_mul`.

    Args:
        x: [..., K]; the first five are those of `add_norm_linear_reference`.
        residual: [..., K].
        gamma: [K].
        eps: of the norm.
        weight: [2 I, K]; the first I rows are the gate's.
        activation: `silu`, `gelu`, `gelu_tanh` or `relu`.
        layout: as of `add_norm_linear_reference`; a gate's outputs and those that it multiplies
            share blocks.
    Returns:
        [..., I] and the sum [..., K].
    """
    weight = _floats(weight, x.shape[-1], layout)
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
    layout: str = "",
) -> tuple[Tensor, Tensor]:
    """A layer up to its attention: `add_norm_linear` of q, k and v, then `rope_write`.

    Args:
        x: [..., K], Nt rows; the first five are those of `add_norm_linear_reference`.
        residual: [..., K].
        gamma: [K].
        eps: of the norm.
        weight: [(H + 2 HK) · D, K]: the heads of q, of k, of v.
        bias: [(H + 2 HK) · D] or None.
        cos: [Nt, D]; all of a head is rotated. From here on as of `rope_write_reference`.
        sin: [Nt, D].
        k_cache: [blocks, block_size, HK, D], mutated.
        v_cache: [blocks, block_size, HK, D], mutated.
        q_start: [B + 1] int32.
        slot: [Nt] int32.
        block_table: [B, n] int32.
        layout: as of `add_norm_linear_reference`; both halves of a head share blocks.
    Returns:
        [H, Nt, D] rotated queries, laid out as [Nt, H, D], and the sum like x.
    """
    weight = _floats(weight, x.shape[-1], layout)
    y, total = _add_norm_linear(x, residual, gamma, eps, unit_offset, weight, bias)
    places = (k_cache, v_cache, q_start, slot, block_table)
    return _rope_write(y, x.dtype, cos, sin, *places), total


def embed_norm_rope_write_reference(
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
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
) -> tuple[Tensor, Tensor]:
    """The first layer up to its attention: rows of the embedding, norm, q, k and v, `rope_write`.

    Args:
        tokens: [...] int64, Nt of them.
        embedding: [V, K].
        gamma: [K]; from here on as of `add_norm_rope_write_reference`.
        eps: of the norm.
        weight: [(H + 2 HK) · D, K].
        bias: [(H + 2 HK) · D] or None.
        cos: [Nt, D].
        sin: [Nt, D].
        k_cache: [blocks, block_size, HK, D], mutated.
        v_cache: [blocks, block_size, HK, D], mutated.
        q_start: [B + 1] int32.
        slot: [Nt] int32.
        block_table: [B, n] int32.
    Returns:
        [H, Nt, D] rotated queries, laid out as [Nt, H, D], and the rows [..., K].
    """
    x = functional.embedding(tokens, embedding)
    y = _norm_linear(x, gamma, eps, unit_offset, weight, bias)
    places = (k_cache, v_cache, q_start, slot, block_table)
    return _rope_write(y, x.dtype, cos, sin, *places), x


def add_norm_head_reference(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
) -> Tensor:
    """`add_norm_linear` of some rows, whose sum nobody reads.

    Args:
        x: [1, Nt, K] or [Nt, K].
        residual: like x.
        gamma: [K].
        eps: of the norm.
        weight: [N, K].
        bias: [N] or None.
        rows: [R] int64 of x.
    Returns:
        [1, R, N] or [R, N].
    """
    x, residual = x.index_select(-2, rows), residual.index_select(-2, rows)
    return _add_norm_linear(x, residual, gamma, eps, unit_offset, weight, bias)[0].to(x.dtype)


def skinny_linear_reference(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product that nothing stands around, of few rows or many.

    Args:
        input: [..., K].
        weight: [N, K].
        bias: [N] or None.
    Returns:
        [..., N] in the dtype of the input, summed in float32 and rounded once.
    """
    wide = functional.linear(input.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(input.dtype)


def bmm_by_token_reference(x: Tensor, weight: Tensor) -> Tensor:
    """A product of each head, whose rows of one token lie together.

    Args:
        x: [H, Nt, K].
        weight: [H, K, N].
    Returns:
        [H, Nt, N], laid out as [Nt, H, N]: what follows reads a token's heads as one row.
    """
    return torch.bmm(x, weight).transpose(0, 1).contiguous().transpose(0, 1)


def _rope_write(
    y: Tensor,
    dtype: torch.dtype,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
) -> Tensor:
    """`rope_write` of a product in float32: heads of q, of k, of v."""
    kv_heads, head_dim = k_cache.shape[2:]
    heads = y.view(slot.shape[0], -1, head_dim).transpose(0, 1)
    q, k, v = heads.split([heads.shape[0] - 2 * kv_heads, kv_heads, kv_heads])
    args = (cos.float(), sin.float(), k_cache, v_cache, q_start, slot, block_table)
    return rope_write_reference(q, k, v.to(dtype), *args).to(dtype)


def _floats(weight: Tensor, columns: int, layout: str) -> Tensor:
    """A weight [N, K] of whole blocks in float32, where it is in some."""
    if not layout:
        return weight
    shape = BLOCK * weight.shape[0], columns
    return dequantize(weight, shape, QuantizedLayout.named(layout))


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
    return _norm_linear(total, gamma, eps, unit_offset, weight, bias), total


def _norm_linear(
    x: Tensor, gamma: Tensor, eps: float, unit_offset: bool, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The product of the norm of x, in float32."""
    wide = x.float()
    factor = gamma.float() + 1.0 if unit_offset else gamma.float()
    normed = wide * (wide.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt() * factor
    return functional.linear(normed, weight.float(), None if bias is None else bias.float())


def experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    size: int = 0,
    gate_up_layout: str = "",
    down_layout: str = "",
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    """Add up what the chosen experts make of each token, each with its weight.

    Args:
        x: [N, H] tokens.
        ids: [N, K] int64, experts of each token, which differ; one outside of 0 … E - 1 adds
            nothing.
        weights: [N, K] of these experts, in float32 or the dtype of x.
        gate_up: [E, 2 I, H] in the dtype of x; the first I rows of an expert are the gate's.
        down: [E, H, I] in the dtype of x.
        activation: `silu`, `gelu`, `gelu_tanh`, `relu`; `clamped` of rows that are a gate's and
            another's in turn, see `gated`.
        gate_up_bias: [E, 2 I] in the dtype of x, or None.
        down_bias: [E, H], likewise; its share of a token's sum has the expert's weight, too.
        size: I, where a stack is quantized.
        gate_up_layout: name of a layout (`specc.artifact.quantized_layout`) that `gate_up` has,
            uint8 [blocks, bytes]; empty of floats. Rows stay floats.
        down_layout: likewise.
        shared_gate_up: [2 S I, H] in the dtype of x, of S more experts E, E + 1, …: rows of all
            their gates, then those that these multiply. Or None.
        shared_down: [H, S I], likewise.
    Returns:
        [N, H] in the dtype of x. Products and sums are in float32; rounded are what the second
        product reads, which has the dtype of its weights, and the result.
    Source: mixtures of experts as of Mixtral, arXiv:2401.04088 §2.1.
    """
    (num_tokens, top_k), hidden = ids.shape, x.shape[1]
    if gate_up_layout:
        gate_up = _unpacked(gate_up, (2 * size, hidden), gate_up_layout)
    if down_layout:
        down = _unpacked(down, (hidden, size), down_layout)
    if shared_gate_up is not None and shared_down is not None:
        own = shared_gate_up.unflatten(0, (2, -1, down.shape[2])).transpose(0, 1).flatten(1, 2)
        gate_up = torch.cat([gate_up, own])
        down = torch.cat([down, shared_down.unflatten(1, (len(own), -1)).transpose(0, 1)])
    flat = ids.reshape(-1)
    found = x.new_zeros(flat.shape[0], down.shape[1], dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        pairs = (flat == expert).nonzero()[:, 0]
        if not len(pairs):
            continue
        biases = (None if b is None else b[expert].float() for b in (gate_up_bias, down_bias))
        rows = functional.linear(x[pairs // top_k].float(), gate_up[expert].float(), next(biases))
        inner = gated(rows, activation).to(x.dtype)
        found[pairs] = functional.linear(inner.float(), down[expert].float(), next(biases))
    weighted = found.view(num_tokens, top_k, -1) * weights.float()[:, :, None]
    is_expert = (ids >= 0) & (ids < gate_up.shape[0])
    return weighted.masked_fill(~is_expert[:, :, None], 0.0).sum(dim=1).to(x.dtype)


def gate_distance(activation: str, size: int) -> int:
    """Rows of `gate_up` from one of a gate to what it multiplies, see `experts_reference`."""
    return 1 if activation == CLAMPED else size


def _unpacked(stack: Tensor, shape: tuple[int, int], name: str) -> Tensor:
    """[E, *shape] float32."""
    layout = QuantizedLayout.named(name)
    return dequantize(stack, (num_matrices(stack, shape, layout), *shape), layout)


def num_matrices(stack: Tensor, shape: tuple[int, int], layout: QuantizedLayout | None) -> int:
    """How many matrices of a shape a stack has that is quantized, or [E, *shape]."""
    if layout is None:
        return stack.shape[0] if stack.dim() else 0
    return stack.shape[0] // max(1, layout.stored_shape(shape)[0])
