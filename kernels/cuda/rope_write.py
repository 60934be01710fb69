"""`specc::rope_write`: rotary embedding of q and k, and the cache write of k and v, one launch.

Programs of the first head groups rotate queries; those after rotate keys and write keys and
values to the cache. `specc::norm_rope_write` normalizes heads of q and k before they are rotated.
Where keys are stored in int8, both multiply what they have rotated by a Hadamard matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.artifact.kv_rows import holds_quantized
from specc.kernels.cuda.dependent import launch_options, wait_for_earlier, with_dependent
from specc.kernels.cuda.hadamard import transformed
from specc.kernels.cuda.kv_quantized import in_words, store_row
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, Types
from specc.kernels.cuda.strided_rows import FLOATS, check
from specc.kernels.cuda.write_kv import DTYPES, SEARCH, cache_rows, check_cache

_NOT_SPECIALIZED = (
    "num_tokens", "num_seqs", "num_heads", "num_kv_heads", "num_blocks", "num_pages", "block_size",
    "stride_table",
)  # fmt: skip


@triton.jit
def _scaled(b_x, b_scale, p_gamma, m_gamma, offset, p_x):
    """Rows in float32 times their scale and gamma, rounded as `rms_norm` rounds what it returns."""
    b_gamma = tl.load(p_gamma, mask=m_gamma, other=0.0).to(tl.float32) + offset
    return (b_x * b_scale * b_gamma).to(p_x.dtype.element_ty)


@triton.jit
def _rotate_heads(
    p_x, p_y, p_cos, p_sin, gamma, eps, offset, m_x, D: tl.constexpr, R: tl.constexpr,
    BD: tl.constexpr, HADAMARD: tl.constexpr,
):  # fmt: skip
    """Rotate heads at p_x [BT, BH, 1] into p_y; p_cos and p_sin are of [BT, 1, 1].

    Where there is a gamma [D], they are normalized before.
    """
    o_d = tl.arange(0, BD)[None, None, :]
    m_r = o_d < R
    # what a column is rotated into
    o_other = tl.where(o_d < R // 2, o_d + R // 2, o_d - R // 2)
    b_x = tl.load(p_x + o_d, mask=m_x & (o_d < D), other=0.0).to(tl.float32)  # [BT, BH, BD]
    b_other = tl.load(p_x + o_other, mask=m_x & m_r, other=0.0).to(tl.float32)
    # of every head, so that all tensors have one layout, and no row is divided among warps
    o_of, o_to = tl.broadcast_to(o_d, b_x.shape), tl.broadcast_to(o_other, b_x.shape)
    if gamma is not None:
        b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=2, keep_dims=True) / D + eps)
        m_d, m_to = tl.broadcast_to(o_d < D, b_x.shape), tl.broadcast_to(m_r, b_x.shape)
        b_x = _scaled(b_x, b_scale, gamma + o_of, m_d, offset, p_x).to(tl.float32)
        b_other = _scaled(b_other, b_scale, gamma + o_to, m_to, offset, p_x).to(tl.float32)
    b_cos = tl.load(p_cos + o_of, mask=m_x & m_r, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_of, mask=m_x & m_r, other=0.0).to(tl.float32)
    b_turn = b_other * b_sin
    b_y = tl.where(o_d < R // 2, b_x * b_cos - b_turn, b_x * b_cos + b_turn)
    # rounded to the dtype of the activations first, whatever the cache has
    b_y = tl.where(m_r, b_y, b_x).to(p_x.dtype.element_ty)
    if HADAMARD:
        b_y = transformed(b_y.to(tl.float32), HADAMARD).to(p_x.dtype.element_ty)
    store_row(p_y, o_d, b_y, m_x, D)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _rope_write_kernel(
    q,
    k,
    v,
    cos,
    sin,
    k_cache,
    v_cache,
    q_start,
    slot,
    block_table,
    out,
    q_gamma,
    k_gamma,
    eps,
    offset,
    num_tokens,
    num_seqs,
    num_heads,
    num_kv_heads,
    num_blocks,
    num_pages,
    block_size,
    stride_qh,
    stride_qt,
    stride_kh,
    stride_kt,
    stride_vh,
    stride_vt,
    stride_cos,
    stride_sin,
    stride_kcb,
    stride_kcs,
    stride_kch,
    stride_vcb,
    stride_vcs,
    stride_vch,
    stride_table,
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BB: tl.constexpr,
    HADAMARD: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_earlier(IS_DEPENDENT)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    i_group = tl.program_id(1)
    num_query_groups = (num_heads + BH - 1) // BH
    m_t = o_t < num_tokens
    o_t3 = o_t.to(tl.int64)[:, None, None]  # [BT, 1, 1]
    p_cos = cos + o_t3 * stride_cos
    p_sin = sin + o_t3 * stride_sin

    if i_group < num_query_groups:
        o_h = (i_group * BH + tl.arange(0, BH))[None, :, None].to(tl.int64)  # [1, BH, 1]
        m_q = m_t[:, None, None] & (o_h < num_heads)
        p_q = q + o_t3 * stride_qt + o_h * stride_qh  # [BT, BH, 1]
        p_out = out + (o_t3 * num_heads + o_h) * D
        _rotate_heads(p_q, p_out, p_cos, p_sin, q_gamma, eps, offset, m_q, D, R, BD, HADAMARD)
    else:
        i_group -= num_query_groups
        o_h = (i_group * BH + tl.arange(0, BH))[None, :, None].to(tl.int64)
        b_block, b_row, m_live = cache_rows(
            q_start, slot, block_table, o_t, m_t, num_seqs, num_blocks, num_pages,
            block_size, stride_table, BB,
        )  # fmt: skip
        b_block = b_block[:, None, None]
        b_row = b_row[:, None, None]
        m_live = m_live[:, None, None]
        m_k = m_live & (o_h < num_kv_heads)
        stride_kcb, stride_kcs = in_words(stride_kcb, k_cache), in_words(stride_kcs, k_cache)
        stride_vcb, stride_vcs = in_words(stride_vcb, v_cache), in_words(stride_vcs, v_cache)
        stride_kch, stride_vch = in_words(stride_kch, k_cache), in_words(stride_vch, v_cache)
        p_k = k + o_t3 * stride_kt + o_h * stride_kh
        p_kc = k_cache + b_block * stride_kcb + b_row * stride_kcs + o_h * stride_kch
        _rotate_heads(p_k, p_kc, p_cos, p_sin, k_gamma, eps, offset, m_k, D, R, BD, HADAMARD)
        o_dv = tl.arange(0, BDV)[None, None, :]
        m_v = m_k & (o_dv < DV)
        b_v = tl.load(v + o_t3 * stride_vt + o_h * stride_vh + o_dv, mask=m_v, other=0.0)
        p_vc = v_cache + b_block * stride_vcb + b_row * stride_vcs + o_h * stride_vch
        store_row(p_vc, o_dv, b_v, m_k, DV)


def config(num_tokens: int) -> tuple[int, int, int]:
    """Tokens and heads of a program, and its warps: few tokens spread over more programs.

    With norms it is that of few tokens for any number: the sums of a row have one order. With 4
    warps for 16 rows ptxas spills on sm_80.
    """
    return (1, 4, 4) if num_tokens <= 64 else (4, 4, 8)


def rope_write(
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
    """Rotate q and k and write k and v to the cache; see `rope_write_reference`."""
    places = (k_cache, v_cache, q_start, slot, block_table)
    return _launch("rope_write", (q, k, v), (cos, sin), places, None, hadamard)


def norm_rope_write(
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
    """See `norm_rope_write_reference`."""
    for name, gamma in (("q_gamma", q_gamma), ("k_gamma", k_gamma)):
        check(
            gamma.dtype in FLOATS and gamma.shape == q.shape[-1:] and gamma.is_contiguous(),
            "norm_rope_write",
            f"{name} {gamma.dtype} {list(gamma.shape)}, strides {gamma.stride()}",
            f"a contiguous {list(q.shape[-1:])} of a float",
        )
    places = (k_cache, v_cache, q_start, slot, block_table)
    norm = (q_gamma, k_gamma, float(eps), float(unit_offset))
    return _launch("norm_rope_write", (q, k, v), (cos, sin), places, norm, hadamard)


def _launch(
    operator: str,
    rows: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    places: tuple[Tensor, ...],
    norm: tuple[Tensor, Tensor, float, float] | None,
    hadamard: bool,
) -> Tensor:
    """Either operator.

    Args:
        norm: weights of q and of k, eps, and what is added to the weights.
    """
    (q, k, v), (cos, sin), (k_cache, v_cache, q_start, slot, block_table) = rows, tables, places
    check_cache(operator, k, v, k_cache, v_cache, q_start, slot, block_table)
    _check_rotation(operator, q, k, cos, sin)
    num_heads, num_tokens, head_dim = q.shape
    num_kv_heads = k.shape[0]
    num_blocks, block_size = v_cache.shape[:2]
    value_dim = v.shape[2]
    num_seqs, num_pages = block_table.shape
    out = q.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return out.transpose(0, 1)
    size = cos.shape[1]
    blocks = _blocks(*config(num_tokens if norm is None else 1), holds_quantized(k_cache.dtype))
    block_t, block_h = blocks["BT"], blocks["BH"]
    num_groups = triton.cdiv(num_heads, block_h) + triton.cdiv(num_kv_heads, block_h)
    _rope_write_kernel[(triton.cdiv(num_tokens, block_t), num_groups)](
        q, k, v, cos, sin, k_cache, v_cache, q_start, slot, block_table, out,
        *(norm or (None,) * len(_NORM)),
        num_tokens, num_seqs, num_heads, num_kv_heads, num_blocks, num_pages, block_size,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), sin.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
        **_sizes(head_dim, value_dim, size, hadamard),
        **launch_options(q.dtype),
        **blocks,
    )  # fmt: skip
    return out.transpose(0, 1)


def _sizes(head_dim: int, value_dim: int, size: int, hadamard: bool = False) -> dict[str, int]:
    columns = {"D": head_dim, "DV": value_dim, "R": size}
    padded = {"BD": triton.next_power_of_2(head_dim), "BDV": triton.next_power_of_2(value_dim)}
    return {**columns, **padded, "HADAMARD": head_dim & -head_dim if hadamard else 0}


def _blocks(block_t: int, block_h: int, num_warps: int, is_quantized: bool) -> dict[str, int]:
    blocks = {"BT": block_t, "BH": block_h, "BB": SEARCH, "num_warps": num_warps}
    # more than any needs: without a limit, ptxas spills some for one more resident program
    return {**blocks, "maxnreg": 128} if is_quantized else blocks


def _check_rotation(operator: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    num_tokens, head_dim = q.shape[1:]
    size, dtypes = cos.shape[-1], ", ".join(map(str, DTYPES))
    check(
        k.shape[1:] == q.shape[1:] and q.dtype in DTYPES,
        operator,
        f"q {q.dtype} {tuple(q.shape)} and k {tuple(k.shape)}",
        f"[H, Nt, D] and [HK, Nt, D] of {dtypes}",
    )
    is_right = cos.shape == sin.shape == (num_tokens, size) and 0 < size <= head_dim
    check(
        is_right and size % 2 == 0,
        operator,
        f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)}",
        f"[{num_tokens}, R], R even and at most {head_dim}",
    )
    for label, tensor in {"q": q, "cos": cos, "sin": sin}.items():
        is_right = tensor.dtype in DTYPES and tensor.stride(-1) == 1
        found = f"{label} {tensor.dtype} of strides {tensor.stride()}"
        check(is_right, operator, found, f"{dtypes}, and 1 in the last dimension")


# (head size, rotated elements): whole heads, and the partial rotation of a quarter and a half
_SHIPPED_SIZES = (
    (64, 64), (64, 16), (80, 80), (80, 32), (96, 96), (128, 128), (128, 64), (256, 256), (256, 64),
)  # fmt: skip
# with norms: Qwen3 and Gemma 3 (128 and 256), GLM-4.5 (a half), Qwen3-Next (a quarter); 64 in small
# ones
NORMED_SIZES = ((64, 64), (128, 128), (128, 64), (256, 256), (256, 64))
# what a kernel without norms has not
_NORM = ("q_gamma", "k_gamma", "eps", "offset")


def shipped(capability: int, is_quantized: bool = False) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability.

    Args:
        is_quantized: those over quantized caches, with the matrix, too.
    """
    rows = ("q", "k", "v", "cos", "sin", "k_cache", "v_cache", "out", "q_gamma", "k_gamma")
    types: Types = {torch.int32: ("q_start", "slot", "block_table"), float: ("eps", "offset")}
    for dtype, hadamard in itertools.product(DTYPES, (False, True)[: 1 + is_quantized]):
        for head_dim, size in _SHIPPED_SIZES:
            name = f"rope_write-{TYPE_NAMES[dtype]}-d{head_dim}-r{size}{'-hadamard' * hadamard}"
            found: list[tuple[str, tuple[int, int, int], tuple[str, ...]]]
            found = [(f"{name}-tokens{c[0]}", c, _NORM) for c in (config(1), config(512))]
            if (head_dim, size) in NORMED_SIZES:
                found.append((f"norm_{name}", config(1), ()))
            for own_name, c, absent in found:
                item = Shipped.of(
                    own_name, _rope_write_kernel, {dtype: rows}, types,
                    **_sizes(head_dim, head_dim, size, hadamard), **_blocks(*c, is_quantized),
                    **dict.fromkeys(absent),
                )  # fmt: skip
                yield from with_dependent(item, capability, dtype)
