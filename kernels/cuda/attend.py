"""`specc::attend`: flash decoding over a paged cache, for trees, plain decoding and prefill chunks.

One program takes a tile of packed rows of one sequence and KV head (its tokens × the query heads
that share the KV head) and one split of the keys; the last program of a tile to be done merges its
splits. The host knows shapes only: which sequence a tile belongs to, how long it is and how many
splits it is worth are found on the device, and programs without work return.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from specc.kernels.cuda import attend_few, attend_wide
from specc.kernels.cuda.arrivals import counters
from specc.kernels.cuda.attend_config import SHORT_ROWS, AttendConfig, config, machine, plan_work
from specc.kernels.cuda.attend_kernels import NO_WINDOW, attend_kernel
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.launch import is_even, launcher
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.speculation.tree import WORD_BITS

MAX_HEAD_DIM = 256
# packed rows of a sequence that are no chunk of a prompt: 64 nodes × 8 heads
LARGEST_DECODE = 512
# of dependent launches: packed rows of a sequence, 16 nodes × 4 heads, and sizes of Llama's heads
LARGEST_DEPENDENT = 64
_DEPENDENT_HEAD_DIMS = (64, 128)
# sequences, or tokens, that one step of a search looks at
_SEARCH = 64


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
    *,
    scale: float,
    window: int = 0,
    sink: int = 0,
    num_splits: int | None = None,
) -> Tensor:
    """Attend to prefix and tree ancestors in the cache; see `attend_reference`.

    `num_splits` is the number of splits of the keys of every tile; None: chosen on the device, by
    lengths.
    """
    _check(q, k_cache, v_cache, q_start, position, slot, cache_len, ancestors, block_table)
    if not scale > 0:
        raise ValueError(f"attend: found scale {scale}; needed a positive one")
    num_heads, num_tokens, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, value_dim = v_cache.shape
    num_seqs, num_pages = block_table.shape
    out = q.new_empty(num_tokens, num_heads, value_dim)
    if num_tokens == 0 or num_seqs == 0:
        return out.zero_().transpose(0, 1)

    capability, num_sms = machine(q.device)
    group = num_heads // num_kv_heads
    wide = attend_wide.find(q, v_cache, block_table, window, capability)
    if wide is not None:
        attend_wide.launch(
            wide, q, k_cache, v_cache, out, q_start, position, slot, cache_len, ancestors,
            block_table, scale=scale, page=_page(num_pages, block_size, wide.block_n),
            num_sms=num_sms, num_splits=num_splits,
        )  # fmt: skip
        return out.transpose(0, 1)
    few = attend_few.find(q, v_cache, block_table, window, capability)
    if few is not None:
        attend_few.launch(
            few, q, k_cache, v_cache, out, q_start, position, slot, cache_len, ancestors,
            block_table, scale=scale, page=_page(num_pages, block_size, few.block_n),
            num_sms=num_sms, num_splits=num_splits,
        )  # fmt: skip
        return out.transpose(0, 1)
    rows = triton.cdiv(num_tokens, num_seqs) * group
    c = config(q.dtype, max(head_dim, value_dim), rows, capability)
    # else q_start says
    tokens_each = num_tokens // num_seqs if is_even() and num_tokens % num_seqs == 0 else 0
    num_tiles = num_seqs * triton.cdiv(rows, c.block_m)
    most_tiles = num_tiles if tokens_each else num_tokens * group // c.block_m + num_seqs
    work = plan_work(
        num_tiles, most_tiles, num_kv_heads, num_seqs, c.programs_per_sm * num_sms,
        triton.cdiv(num_pages * block_size, c.block_n) // c.min_blocks,
        num_splits=num_splits,
        is_prompt=rows > LARGEST_DECODE,
        is_short=num_pages * block_size <= SHORT_ROWS,
    )  # fmt: skip
    # absent, in the type they have else: one kernel for both
    partial = lse = q.new_empty(0, dtype=torch.float32)
    arrived = q.new_empty(0, dtype=torch.int32)
    if work.num_parts:
        num_parts = num_kv_heads * work.num_parts
        lse = q.new_empty(num_parts, c.block_m, dtype=torch.float32)
        partial = q.new_empty(num_parts, c.block_m, value_dim, dtype=torch.float32)
        arrived = counters(k_cache, num_parts)
    can_start_early = rows <= LARGEST_DEPENDENT and head_dim in _DEPENDENT_HEAD_DIMS
    can_start_early &= head_dim == value_dim
    launcher(attend_kernel)[(work.num_programs * num_kv_heads,)](
        q, k_cache, v_cache, out, partial, lse, arrived,
        q_start, position, slot, cache_len,
        q_start if ancestors is None else ancestors,
        block_table, scale, window or NO_WINDOW.value, sink,
        num_tokens, num_seqs, num_heads, group,
        0 if ancestors is None else ancestors.shape[1],
        num_blocks, num_pages, block_size, tokens_each,
        work.num_splits, work.slots, work.waves, work.num_parts,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        0 if ancestors is None else ancestors.stride(0),
        D=head_dim,
        DV=value_dim,
        BD=_padded(head_dim),
        BDV=_padded(value_dim),
        BM=c.block_m,
        BN=c.block_n,
        BC=_columns(q.dtype, head_dim),
        BB=_SEARCH,
        MIN_BLOCKS=c.min_blocks,
        MERGED=c.merged(_padded(value_dim)),
        PAGE=_page(num_pages, block_size, c.block_n),
        IS_TREE=ancestors is not None,
        **launch_options(q.dtype, can_start_early),
        **c.options,
    )  # fmt: skip
    return out.transpose(0, 1)


def _padded(size: int) -> int:
    """Columns of a tile: a power of two, and what tensor cores take at least."""
    return max(16, triton.next_power_of_2(size))


def _page(num_pages: int, block_size: int, block_n: int) -> int:
    """Rows of a page; 0 if none ends in a key block: whole key blocks, or a page that holds all."""
    return 0 if num_pages == 1 or block_size % block_n == 0 else block_size


def _columns(dtype: torch.dtype, head_dim: int) -> int:
    """Columns of keys that one product takes."""
    padded = _padded(head_dim)
    return min(32, padded) if dtype == torch.float32 else padded


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
) -> None:
    """Refuse what the kernel would misread."""
    if not q.dtype == k_cache.dtype == v_cache.dtype or q.dtype not in _DTYPES:
        raise ValueError(
            f"attend: found q {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype};"
            f" needed one dtype of {', '.join(map(str, _DTYPES))}"
        )
    num_heads, num_tokens, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if k_cache.shape[3] != head_dim or v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"attend: found q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache"
            f" {tuple(v_cache.shape)}; needed [H, Nt, D], [blocks, block_size, HK, D] and"
            " [blocks, block_size, HK, DV]"
        )
    for size in (head_dim, v_cache.shape[3]):
        if size % 8 or not 0 < size <= MAX_HEAD_DIM:
            raise ValueError(
                f"attend: found head size {size}; needed a multiple of 8 up to {MAX_HEAD_DIM}"
            )
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"attend: found {num_heads} query heads on {num_kv_heads} KV heads; needed a multiple"
        )
    num_seqs = block_table.shape[0]
    if q_start.shape != (num_seqs + 1,) or cache_len.shape != (num_seqs,):
        raise ValueError(
            f"attend: found q_start {tuple(q_start.shape)}, cache_len {tuple(cache_len.shape)},"
            f" block_table {tuple(block_table.shape)}; needed [B + 1], [B] and [B, n]"
        )
    if position.shape != (num_tokens,) or slot.shape != (num_tokens,):
        raise ValueError(
            f"attend: found position {tuple(position.shape)} and slot {tuple(slot.shape)};"
            f" needed [{num_tokens}]"
        )
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
    tensors |= {"q_start": q_start, "position": position, "slot": slot, "cache_len": cache_len}
    if ancestors is not None:
        tensors["ancestors"] = ancestors
        if ancestors.dtype != torch.int64 or ancestors.shape[0] != num_tokens:
            raise ValueError(
                f"attend: found ancestors {ancestors.dtype} {tuple(ancestors.shape)};"
                f" needed int64 [{num_tokens}, W]"
            )
        num_nodes = ancestors.shape[1] * WORD_BITS
        if num_tokens > num_seqs * num_nodes:
            raise ValueError(
                f"attend: found {num_tokens} tokens of {num_seqs} sequences and words for"
                f" {num_nodes} nodes of each; needed a bit for every node"
            )
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"attend: found strides {tensor.stride()} of {name}; needed 1 in the last dimension"
            )


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# what engines are built with: the head sizes, and dense rows (one page) or pages of 16 rows
_SHIPPED_HEAD_DIMS = (64, 80, 96, 128, 256)
_SHIPPED_PAGES = ((1, 4096), (256, 16))
_POINTERS = (
    "q", "k_cache", "v_cache", "out", "partial", "lse", "arrived", "q_start", "position", "slot",
    "cache_len", "ancestors", "block_table",
)  # fmt: skip
# older than the keys that the kernel before writes: it finds its places by them
_EARLY = ("q_start", "position", "slot", "cache_len")
_DIVISIBLE_STRIDES = (
    "stride_qh", "stride_qt", "stride_kb", "stride_ks", "stride_kh",
    "stride_vb", "stride_vs", "stride_vh",
)  # fmt: skip
_INTEGERS = (
    "window", "sink", "num_tokens", "num_seqs", "num_heads", "group", "num_words",
    "num_blocks", "num_pages", "block_size", "tokens_each", "num_splits", "slots",
    "waves", "num_parts", "stride_table", "stride_words", *_DIVISIBLE_STRIDES,
)  # fmt: skip


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability."""
    for dtype in _DTYPES:
        for head_dim in _SHIPPED_HEAD_DIMS:
            sizes = (1, 32, LARGEST_DEPENDENT)
            few = {config(dtype, head_dim, rows, capability) for rows in sizes}
            configs = few | {config(dtype, head_dim, 4096, capability)}
            for c in sorted(configs, key=lambda c: c.block_m):
                # where key blocks are no longer than pages, paged and dense caches are the same
                for page in sorted({_page(*sizes, c.block_n) for sizes in _SHIPPED_PAGES}):
                    for is_tree in (True, False):
                        item = _shipped_attend(dtype, head_dim, c, page, is_tree)
                        is_able = c in few and head_dim in _DEPENDENT_HEAD_DIMS
                        yield from with_dependent(item, capability, dtype, is_able)


def _shipped_attend(
    dtype: torch.dtype, head_dim: int, c: AttendConfig, page: int, is_tree: bool
) -> Shipped:
    name = TYPE_NAMES[dtype]
    tensors = {"q": name, "k_cache": name, "v_cache": name, "out": name, "position": "i64"}
    tensors |= {"partial": "fp32", "lse": "fp32", "ancestors": "i64" if is_tree else "i32"}
    signature = {pointer: f"*{tensors.get(pointer, 'i32')}" for pointer in _POINTERS}
    return Shipped(
        f"attend-{name}-d{head_dim}-rows{c.block_m}-page{page}-{'tree' if is_tree else 'causal'}",
        attend_kernel,
        signature | {"scale": "fp32", **dict.fromkeys(_INTEGERS, "i32")},
        {
            "D": head_dim, "DV": head_dim, "BD": _padded(head_dim), "BDV": _padded(head_dim),
            "BM": c.block_m, "BN": c.block_n,
            "BC": _columns(dtype, head_dim), "BB": _SEARCH,
            "MIN_BLOCKS": c.min_blocks, "MERGED": c.merged(_padded(head_dim)),
            "PAGE": page, "IS_TREE": is_tree,
        },
        c.num_warps,
        c.num_stages,
        (*_POINTERS, *_DIVISIBLE_STRIDES),
        c.max_registers,
        early=_EARLY,
    )  # fmt: skip
