"""`specc::attend` over cached latents: one head of keys, whose first columns are the values.

As in `attend` a program takes a tile of packed rows of one sequence and one split of its keys, and
the last program of a tile merges. All query heads read the same rows, so the rows of a tile are
the tokens of a sequence × all of its heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from specc.kernels.cuda import attend
from specc.kernels.cuda.arrivals import counters
from specc.kernels.cuda.attend_config import SHORT_ROWS, AttendConfig, plan_work
from specc.kernels.cuda.attend_kernels import NO_WINDOW
from specc.kernels.cuda.attend_latent_kernels import attend_latent_kernel
from specc.kernels.cuda.launch import is_even, launcher
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.speculation.tree import WORD_BITS

# columns of a latent, and of what heads share
MOST_LATENT, MOST_SHARED = 512, 64
# columns of a latent that an accumulator holds: there are two of them
_HALF = MOST_LATENT // 2
# tokens of a sequence that are no chunk of a prompt
_LARGEST_TREE = 64
# sequences, or tokens, that one step of a search looks at
_SEARCH = 64
# columns that one step of merging takes
_MERGED = 64
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# (bytes of an element, rows) → launch parameters; rows are the largest of a tile. Tiles of 64 rows,
# which wgmma needs, spill on sm_90: accumulators take half of the registers, and descriptors of the
# queries are kept in most of the others
_TABLE = {
    (2, 16): AttendConfig(16, 32, 8, 3, 1),
    (2, 32): AttendConfig(32, 32, 8, 2, 1),
    (4, 16): AttendConfig(16, 16, 8, 2, 1),
}
# (family of capabilities, bytes, rows) → launch parameters, where the one above does not fit
_EXCEPTIONS: dict[tuple[int, int, int], AttendConfig] = {
    (90, 2, 16): AttendConfig(16, 64, 8, 2, 1),
    # higher tiles spill
    **{(family, 2, 32): AttendConfig(16, 32, 8, 3, 1) for family in (80, 100)},
    # two key blocks in flight take more than the 99 KiB of shared memory
    (120, 4, 16): AttendConfig(16, 16, 8, 1, 1),
}


def config(dtype: torch.dtype, rows: int, capability: int) -> AttendConfig:
    """Launch parameters for sequences of so many packed rows in the mean.

    Args:
        dtype: of queries and cache.
        rows: tokens × heads.
        capability: 10 · major + minor.
    """
    size = dtype.itemsize
    heights = [height for bytes_, height in _TABLE if bytes_ == size]
    height = next((height for height in heights if height >= rows), heights[-1])
    family = 120 if capability in (86, 89) or capability >= 120 else capability // 10 * 10
    return _EXCEPTIONS.get((family, size, height), _TABLE[size, height])


def attend_latent(
    q: Tensor,
    k_cache: Tensor,
    rank: int,
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
    """Attend to prefix and tree ancestors among latents; see `attend_reference`.

    Args:
        q: [H, Nt, R + r].
        k_cache: [blocks, block_size, 1, R + r]; a value is the first R columns of its key.
        rank: R, at most 512; r is at most 64.
        q_start: as of `tree_attention_reference`, like all that is not named here.
        position: [Nt] int64.
        slot: [Nt] int32.
        cache_len: [B] int32.
        ancestors: [Nt, W] int64, or None.
        block_table: [B, n] int32.
        scale: positive.
        window: 0 is no limit.
        sink: first keys that no window cuts.
        num_splits: of the keys of every tile; None: chosen on the device, by lengths.
    Returns:
        [H, Nt, R] in the dtype of q, laid out as [Nt, H, R].
    """
    _check(q, k_cache, rank, q_start, position, slot, cache_len, ancestors, block_table)
    if not scale > 0:
        raise ValueError(f"attend: found scale {scale}; needed a positive one")
    num_heads, num_tokens, columns = q.shape
    num_blocks, block_size = k_cache.shape[:2]
    num_seqs, num_pages = block_table.shape
    out = q.new_empty(num_tokens, num_heads, rank)
    if num_tokens == 0 or num_seqs == 0:
        return out.zero_().transpose(0, 1)

    capability, num_sms = attend.machine(q.device)
    tokens = triton.cdiv(num_tokens, num_seqs)
    rows = tokens * num_heads
    c = config(q.dtype, rows, capability)
    # else q_start says
    tokens_each = num_tokens // num_seqs if is_even() and num_tokens % num_seqs == 0 else 0
    num_tiles = num_seqs * triton.cdiv(rows, c.block_m)
    most_tiles = num_tiles if tokens_each else num_tokens * num_heads // c.block_m + num_seqs
    work = plan_work(
        num_tiles, most_tiles, 1, num_seqs, c.programs_per_sm * num_sms,
        triton.cdiv(num_pages * block_size, c.block_n) // c.min_blocks,
        num_splits=num_splits,
        is_prompt=tokens > _LARGEST_TREE,
        is_short=num_pages * block_size <= SHORT_ROWS,
    )  # fmt: skip
    # absent, in the type they have else: one kernel for both
    partial = lse = q.new_empty(0, dtype=torch.float32)
    arrived = q.new_empty(0, dtype=torch.int32)
    if work.num_parts:
        lse = q.new_empty(work.num_parts, c.block_m, dtype=torch.float32)
        partial = q.new_empty(work.num_parts, c.block_m, rank, dtype=torch.float32)
        arrived = counters(k_cache, work.num_parts)
    launcher(attend_latent_kernel)[(work.num_programs,)](
        q, k_cache, out, partial, lse, arrived,
        q_start, position, slot, cache_len,
        q_start if ancestors is None else ancestors,
        block_table, scale, window or NO_WINDOW.value, sink,
        num_tokens, num_seqs, num_heads,
        0 if ancestors is None else ancestors.shape[1],
        num_blocks, num_pages, block_size, tokens_each,
        work.num_splits, work.slots, work.waves,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        block_table.stride(0),
        0 if ancestors is None else ancestors.stride(0),
        **_sizes(q.dtype, rank, columns - rank, c),
        PAGE=_page(num_pages, block_size, c.block_n),
        IS_TREE=ancestors is not None,
        **c.options,
    )  # fmt: skip
    return out.transpose(0, 1)


def _sizes(dtype: torch.dtype, rank: int, shared: int, c: AttendConfig) -> dict[str, int]:
    padded = min(_HALF, _padded(rank))
    return {
        "R": rank, "S": shared, "BR": padded, "BS": _padded(shared),
        "BM": c.block_m, "BN": c.block_n,
        # without tensor cores a thread holds whole rows of its operands: a few columns at a time
        "BC": min(32, padded) if dtype == torch.float32 else _HALF,
        "BV": min(_MERGED, padded), "BB": _SEARCH, "MIN_BLOCKS": c.min_blocks,
    }  # fmt: skip


def _padded(size: int) -> int:
    """Columns of a tile: a power of two, and what tensor cores take at least."""
    return max(16, triton.next_power_of_2(size))


def _page(num_pages: int, block_size: int, block_n: int) -> int:
    """Rows of a page; 0 if none ends in a key block: whole key blocks, or a page that holds all."""
    return 0 if num_pages == 1 or block_size % block_n == 0 else block_size


def _check(
    q: Tensor,
    k_cache: Tensor,
    rank: int,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
) -> None:
    """Refuse what the kernel would misread."""
    if q.dtype != k_cache.dtype or q.dtype not in _DTYPES:
        raise ValueError(
            f"attend: found q {q.dtype}, k_cache {k_cache.dtype};"
            f" needed one dtype of {', '.join(map(str, _DTYPES))}"
        )
    _, num_tokens, columns = q.shape
    if k_cache.shape[2:] != (1, columns):
        raise ValueError(
            f"attend: found q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)};"
            " needed [H, Nt, R + r] and [blocks, block_size, 1, R + r]"
        )
    if not (0 < rank <= MOST_LATENT and 0 < columns - rank <= MOST_SHARED):
        raise ValueError(
            f"attend: found latents of {rank} columns and {columns - rank} that heads share;"
            f" needed 1 to {MOST_LATENT} and 1 to {MOST_SHARED}"
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
    tensors = {"q": q, "k_cache": k_cache, "block_table": block_table}
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


# what engines are built with: latents of DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash, in dense
# rows (one page) or pages of 16 rows
_SHIPPED_SIZES = (512, 64)
_SHIPPED_PAGES = ((1, 4096), (256, 16))
_POINTERS = (
    "q", "k_cache", "out", "partial", "lse", "arrived", "q_start", "position", "slot",
    "cache_len", "ancestors", "block_table",
)  # fmt: skip
_DIVISIBLE_STRIDES = ("stride_qh", "stride_qt", "stride_kb", "stride_ks")
_INTEGERS = (
    "window", "sink", "num_tokens", "num_seqs", "num_heads", "num_words", "num_blocks",
    "num_pages", "block_size", "tokens_each", "num_splits", "slots", "waves",
    "stride_table", "stride_words", *_DIVISIBLE_STRIDES,
)  # fmt: skip


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability."""
    for dtype in _DTYPES:
        configs = {config(dtype, rows, capability) for rows in (1, 4096)}
        for c in sorted(configs, key=lambda c: c.block_m):
            for page in sorted({_page(*sizes, c.block_n) for sizes in _SHIPPED_PAGES}):
                for is_tree in (True, False):
                    yield _shipped_attend(dtype, c, page, is_tree)


def _shipped_attend(dtype: torch.dtype, c: AttendConfig, page: int, is_tree: bool) -> Shipped:
    name = TYPE_NAMES[dtype]
    tensors = {"q": name, "k_cache": name, "out": name, "position": "i64"}
    tensors |= {"partial": "fp32", "lse": "fp32", "ancestors": "i64" if is_tree else "i32"}
    signature = {pointer: f"*{tensors.get(pointer, 'i32')}" for pointer in _POINTERS}
    rank, shared = _SHIPPED_SIZES
    return Shipped(
        f"latent-{name}-r{rank}-rows{c.block_m}-page{page}-{'tree' if is_tree else 'causal'}",
        attend_latent_kernel,
        signature | {"scale": "fp32", **dict.fromkeys(_INTEGERS, "i32")},
        {**_sizes(dtype, rank, shared, c), "PAGE": page, "IS_TREE": is_tree},
        c.num_warps,
        c.num_stages,
        (*_POINTERS, *_DIVISIBLE_STRIDES),
        c.max_registers,
    )
