"""Oracles of the operators that fusion passes put in place of several of a model's own.

All of them compute in float32 and round once, so a fused graph is at least as exact as the graph
that it came from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from specc.kernels.reference.core import write_kv_reference
from specc.kernels.reference.kv_rows import hadamard_reference

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}

# the gate of gpt-oss's experts, whose first product has gate and up in turn
CLAMPED = "clamped"
GATE_LIMIT, GATE_SHARPNESS = 7.0, 1.702


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """What an expert makes [..., I] of its first product [..., 2 I], in float32.

    Args:
        activation: one of `ACTIVATIONS`, of halves, or `CLAMPED`: of a gate g and an up u in turn
            min(g, 7) · sigmoid(1.702 · min(g, 7)) · (clamp(u, -7, 7) + 1).
    Source: gpt-oss, arXiv:2508.10925 §2.1.
    """
    if activation == CLAMPED:
        gate = gate_up[..., ::2].clamp(max=GATE_LIMIT)
        up = gate_up[..., 1::2].clamp(-GATE_LIMIT, GATE_LIMIT)
        return gate * torch.sigmoid(GATE_SHARPNESS * gate) * (up + 1)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def rope_write_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
    hadamard: bool = False,
) -> Tensor:
    """Rotate q and k by their positions and write k and v to the cache.

    Args:
        q: [H, Nt, D] queries, any strides with a contiguous last dimension; so are k and v.
        k: [HK, Nt, D].
        v: [HK, Nt, DV].
        cos: [Nt, R], R even and at most D; the first R elements of a head are rotated, in two
            halves: (a, b) → (a · cos - b · sin, b · cos + a · sin), each half with its own columns.
        sin: [Nt, R].
        k_cache: [blocks, block_size, HK, D], mutated.
        v_cache: [blocks, block_size, HK, DV], mutated.
        q_start: [B + 1] int32, as of `tree_attention_reference`; so are the last two.
        slot: [Nt] int32; dead tokens are rotated and not written.
        block_table: [B, n] int32.
        hadamard: q and k are multiplied as of `hadamard_reference` once they are rotated.
    Returns:
        [H, Nt, D] rotated queries, laid out as [Nt, H, D].
    Source: rotary embedding of RoFormer, arXiv:2104.09864 §3, in the layout of GPT-NeoX.
    """
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    if hadamard:
        q, k = hadamard_reference(q), hadamard_reference(k)
    write_kv_reference(k, v, k_cache, v_cache, q_start, slot, block_table)
    return q.transpose(0, 1).contiguous().transpose(0, 1)


def norm_rope_write_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_gamma: Tensor,
    k_gamma: Tensor,
    eps: float,
    unit_offset: bool,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
    hadamard: bool = False,
) -> Tensor:
    """`rms_norm` of each head of q and of k, rounded, then `rope_write`.

    Args:
        q: [H, Nt, D], as of `rope_write_reference`; so are k and v.
        q_gamma: [D], for all heads of q.
        k_gamma: [D], likewise of k.
        eps: added to the mean square; so is `unit_offset` that of `rms_norm_reference`.
        cos: [Nt, R]; from here on as of `rope_write_reference`.
    Returns:
        [H, Nt, D] rotated queries, laid out as [Nt, H, D].
    Source: QK norm of heads, as in Qwen3 (arXiv:2505.09388 §2).
    """
    q, k = (
        rms_norm_reference(x, gamma, eps, unit_offset) for x, gamma in ((q, q_gamma), (k, k_gamma))
    )
    places = k_cache, v_cache, q_start, slot, block_table
    return rope_write_reference(q, k, v, cos, sin, *places, hadamard)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    rotated, rest = x[..., :size].float(), x[..., size:]
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * cos.float() + torch.cat([-second, first], dim=-1) * sin.float()
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Scale rows to a root mean square of one.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean square.
        unit_offset: the factor is 1 + weight, as in Gemma.
    Returns:
        [..., D] in the dtype of x, contiguous.
    Source: RMSNorm, arXiv:1910.07467 §3.
    """
    wide = x.float()
    factor = weight.float() + 1.0 if unit_offset else weight.float()
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * factor).to(x.dtype).contiguous()


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream and normalize the sum.

    Args:
        x: [..., D] output of a block.
        residual: [..., D].
        weight: [D].
        eps: added to the mean square.
        unit_offset: the factor is 1 + weight.
    Returns:
        normalized sum and the sum itself, both [..., D] in the dtype of x. The sum is rounded to
        that dtype before it is normalized, as the unfused graph does.
    """
    total = x + residual
    return rms_norm_reference(total, weight, eps, unit_offset), total.contiguous()


def act_and_mul_reference(gate_up: Tensor, activation: str) -> Tensor:
    """Gate of a feed-forward layer: activation(first half) · second half.

    Args:
        gate_up: [..., 2 I].
        activation: `silu`, `gelu`, `gelu_tanh` or `relu`.
    Returns:
        [..., I], contiguous.
    Source: GLU variants, arXiv:2002.05202 §2.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype).contiguous()
