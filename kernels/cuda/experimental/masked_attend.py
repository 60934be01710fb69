"""`specc::masked_attention` in Triton: a bool mask over HND caches, one kernel.

For TensorRT's plugins, which launch one kernel: keys are not split, so that few rows over a long
cache leave a GPU idle (`attend` splits them). One program takes a tile of packed rows of one
sequence and KV head: its nodes × the query heads that share the head. The tree, committed lengths
and windows are all in the mask.

Source: FlashAttention-2, arXiv:2307.08691 §3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
# packed rows of a tile: for the few nodes of a tree, and for prompts
TILE_ROWS = (16, 32)
NUM_WARPS = 4
# key blocks in flight
NUM_STAGES = 2


def num_keys(head_dim: int) -> int:
    """Keys of a step.

    Tiles fit 48 KiB of shared memory: more is given only to a kernel whose launcher asks the
    driver for it first, and whether TensorRT does is not said.
    """
    return {64: 64, 128: 32, 256: 16}[padded(head_dim)]


def padded(head_dim: int) -> int:
    """Columns of a tile."""
    return max(64, triton.next_power_of_2(head_dim))


def masked_attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor, scale: float, tile_rows: int = 16
) -> Tensor:
    """Attend to the rows that a mask names; see `masked_attention_reference`.

    Args:
        q: [B, H, N, D], contiguous like all.
        k_cache: [B, HK, L, D].
        v_cache: [B, HK, L, D].
        mask: [B, 1, N, L] bool.
        scale: factor of the scores.
        tile_rows: one of `TILE_ROWS`.
    Raises:
        ValueError: other shapes, dtypes or strides.
    """
    _check(q, k_cache, v_cache, mask)
    batch, num_heads, num_nodes, head_dim = q.shape
    num_kv_heads, length = k_cache.shape[1:3]
    out = torch.empty_like(q)
    if not out.numel():
        return out
    rows = num_nodes * (num_heads // num_kv_heads)
    masked_attend_kernel[(triton.cdiv(rows, tile_rows), batch * num_kv_heads)](
        q, k_cache, v_cache, mask.view(torch.uint8),
        num_nodes, length, num_heads, num_kv_heads,
        out,
        SCALE=scale,
        D=head_dim,
        BD=padded(head_dim),
        BM=tile_rows,
        BN=num_keys(head_dim),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )  # fmt: skip
    return out


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> None:
    """Refuse what the kernel would misread."""
    batch, num_heads, num_nodes, head_dim = q.shape
    num_kv_heads, length = k_cache.shape[1:3]
    if not q.dtype == k_cache.dtype == v_cache.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"masked_attend: found q {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype};"
            f" needed one dtype of {', '.join(map(str, DTYPES))}"
        )
    if (
        head_dim not in HEAD_DIMS
        or k_cache.shape != (batch, num_kv_heads, length, head_dim)
        or v_cache.shape != k_cache.shape
        or num_heads % num_kv_heads
    ):
        raise ValueError(
            f"masked_attend: found q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache"
            f" {tuple(v_cache.shape)}; needed [B, H, N, D], [B, HK, L, D] twice, HK a divisor of"
            f" H and D one of {HEAD_DIMS}"
        )
    if mask.dtype != torch.bool or mask.shape != (batch, 1, num_nodes, length):
        raise ValueError(
            f"masked_attend: found mask {mask.dtype} {tuple(mask.shape)};"
            f" needed bool {(batch, 1, num_nodes, length)}"
        )
    if not all(x.is_contiguous() for x in (q, k_cache, v_cache, mask)):
        raise ValueError("masked_attend: found strides; needed contiguous tensors")


# arguments stand in the order of a plugin's: inputs, numbers, outputs
@triton.jit(do_not_specialize=["num_nodes", "length", "num_heads", "num_kv_heads"])
def masked_attend_kernel(
    q,  # [B, H, N, D]
    k_cache,  # [B, HK, L, D]
    v_cache,  # [B, HK, L, D]
    mask,  # [B, 1, N, L] bytes
    num_nodes,
    length,
    num_heads,
    num_kv_heads,
    out,  # [B, H, N, D]
    SCALE: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    i_tile = tl.program_id(0)
    i_pair = tl.program_id(1)
    i_b = (i_pair // num_kv_heads).to(tl.int64)
    i_kv = (i_pair % num_kv_heads).to(tl.int64)
    group = num_heads // num_kv_heads

    o_r = i_tile * BM + tl.arange(0, BM)  # [BM] packed rows: node · group + head of the group
    m_row = o_r < num_nodes * group
    o_t = o_r // group
    o_h = i_kv * group + o_r % group
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_row = (i_b * num_heads + o_h) * num_nodes + o_t  # [BM]
    p_mask = mask + (i_b * num_nodes + o_t) * length  # [BM]
    o_cache = (i_b * num_kv_heads + i_kv) * length * D

    m_q = m_row[:, None] & m_d[None, :]
    b_q = tl.load(q + o_row[:, None] * D + o_d[None, :], mask=m_q, other=0.0)  # [BM, BD]
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BD], tl.float32)
    for i in range(0, length, BN):
        o_n = i + tl.arange(0, BN)
        m_n = o_n < length
        m_pair = m_row[:, None] & m_n[None, :]
        b_seen = tl.load(p_mask[:, None] + o_n[None, :], mask=m_pair, other=0) != 0  # [BM, BN]
        # rows that no node sees may hold anything, and 0 · NaN is NaN: they are never read
        m_key = tl.max(b_seen.to(tl.int32), 0) > 0
        m_kv = m_key[:, None] & m_d[None, :]
        o_kv = o_cache + o_n[:, None] * D + o_d[None, :]
        b_k = tl.load(k_cache + o_kv, mask=m_kv, other=0.0)  # [BN, BD]
        b_v = tl.load(v_cache + o_kv, mask=m_kv, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * (SCALE * 1.4426950408889634)
        b_s = tl.where(b_seen, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        # a row that has seen nothing yet: -inf - -inf is NaN
        b_base = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_p = tl.exp2(b_s - b_base[:, None])
        b_shrink = tl.exp2(b_m - b_base)
        b_l = b_l * b_shrink + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
        b_m = b_m_new
    b_out = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
    tl.store(out + o_row[:, None] * D + o_d[None, :], b_out.to(out.dtype.element_ty), mask=m_q)
