"""`specc::attend`: flash decoding over a paged cache, for trees, plain decoding and prefill chunks.

One program takes a tile of packed rows of one sequence and KV head (its tokens × the query heads
that share the KV head; of latents all) and one split of the keys; the last program of a tile to be
done merges its splits. The host knows shapes only: which sequence a tile belongs to, how long it is
and how many splits it is worth are found on the device, and programs without work return.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from specc.artifact.kv_rows import holds_quantized
from specc.kernels.cuda import attend_few, attend_latent, attend_latent_few, attend_wide
from specc.kernels.cuda.attend_call import (
    DTYPES,
    ROWS,
    SEARCH,
    AttendCall,
    padded,
    shipped_pages,
)
from specc.kernels.cuda.attend_config import AttendConfig, config, for_chunks, machine
from specc.kernels.cuda.attend_kernels import attend_kernel
from specc.kernels.cuda.attend_visits import NO_WINDOW
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.kv_quantized import check_words
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import check
from specc.kernels.reference.kv_rows import columns_of

MAX_HEAD_DIM = 256
# packed rows of a sequence that are no chunk of a prompt: 64 nodes × 8 heads
LARGEST_DECODE = 512
# of dependent launches: packed rows of a sequence, 16 nodes × 4 heads, and sizes of Llama's heads
LARGEST_DEPENDENT = 64
_DEPENDENT_HEAD_DIMS = (64, 128)


def attend(*tensors: Tensor | None, **options: Any) -> Tensor:
    """Attend to prefix and tree ancestors in the cache; see `attend_reference` and `AttendCall`."""
    call = AttendCall.of(*tensors, **options)
    is_latent = call.v_cache is None
    (attend_latent.check_latents if is_latent else check_heads)(call)
    out = call.q.new_empty(call.num_tokens, call.num_heads, call.value_dim)
    if call.num_tokens == 0 or call.num_seqs == 0:
        return out.zero_().transpose(0, 1)

    capability, num_sms = machine(call.q.device)
    others: tuple[Any, ...] = (attend_latent_few,) if is_latent else (attend_wide, attend_few)
    for other in () if call.slopes is not None or call.chunk else others:
        if (found := other.find(call, capability)) is not None:
            other.launch(found, call, out, num_sms)
            break
    else:
        _launch(call, out, capability, num_sms)
    return out.transpose(0, 1)


def _launch(call: AttendCall, out: Tensor, capability: int, num_sms: int) -> None:
    """Launch the kernel for all batches; `out` [Nt, H, DV] is written."""
    rows, dtype = call.mean_rows, call.q.dtype
    if call.v_cache is None:
        c = attend_latent.config(dtype, capability)
        sizes = attend_latent.sizes(dtype, call.value_dim, call.head_dim - call.value_dim, c)
        is_prompt = rows > attend_latent.LARGEST_TREE * call.num_heads
    else:
        is_quantized = holds_quantized(call.k_cache.dtype)
        c = config(dtype, max(call.head_dim, call.value_dim), rows, capability, is_quantized)
        c = for_chunks(c) if call.chunk else c
        sizes = _sizes(dtype, call.head_dim, call.value_dim, c, is_quantized)
        is_prompt = rows > LARGEST_DECODE
    work = call.plan(c, num_sms, is_prompt=is_prompt)
    num_parts = call.num_kv_heads * work.num_parts
    can_start_early = rows <= LARGEST_DEPENDENT and call.head_dim in _DEPENDENT_HEAD_DIMS
    can_start_early &= call.head_dim == call.value_dim
    attend_kernel[(work.num_programs * call.num_kv_heads,)](
        call.q, call.k_cache, call.v_cache, out, *call.parts(num_parts, c.block_m, num_parts),
        *call.places, call.window or NO_WINDOW.value, call.sink,
        call.num_tokens, call.num_seqs, call.num_heads, call.group, *call.sizes,
        work.num_splits, work.slots, work.waves, work.num_parts,
        *call.strides, call.block_table.stride(0), call.stride_words,
        **sizes,
        PAGE=call.page(c.block_n),
        IS_TREE=call.ancestors is not None,
        **launch_options(dtype, can_start_early),
        **call.all_beside,
        **c.options,
    )  # fmt: skip


def _sizes(
    dtype: torch.dtype, head_dim: int, value_dim: int, c: AttendConfig, is_quantized: bool
) -> dict[str, int]:
    return {
        "D": head_dim, "DV": value_dim, "BD": padded(head_dim), "BDV": padded(value_dim),
        "BM": c.block_m, "BN": c.block_n,
        "BC": _columns(dtype, head_dim, is_quantized), "BB": SEARCH,
        "MIN_BLOCKS": c.min_blocks, "MERGED": c.merged(padded(value_dim)),
    }  # fmt: skip


def _columns(dtype: torch.dtype, head_dim: int, is_quantized: bool) -> int:
    """Columns of keys that one product takes."""
    columns = padded(head_dim)
    return min(16 if is_quantized else 32, columns) if dtype == torch.float32 else columns


def check_heads(call: AttendCall) -> None:
    """Refuse what kernels for heads of keys and values would misread."""
    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    assert v_cache is not None, "no latents"
    check(
        columns_of(k_cache) == call.head_dim and v_cache.shape[:3] == k_cache.shape[:3],
        "attend",
        f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}",
        "[H, Nt, D], [blocks, block_size, HK, D] and [blocks, block_size, HK, DV]",
    )
    for size in (call.head_dim, call.value_dim):
        is_right = size % 8 == 0 and 0 < size <= MAX_HEAD_DIM
        check(is_right, "attend", f"head size {size}", f"a multiple of 8 up to {MAX_HEAD_DIM}")
    is_right = call.num_kv_heads > 0 and call.num_heads % call.num_kv_heads == 0
    found = f"{call.num_heads} query heads on {call.num_kv_heads} KV heads"
    check(is_right, "attend", found, "a multiple")
    check(call.chunk >= 0, "attend", f"a chunk of {call.chunk}", "0 or more positions")
    check_words("attend", {"k_cache": k_cache, "v_cache": v_cache})
    call.check_places()


# what engines are built with
_SHIPPED_HEAD_DIMS = (64, 80, 96, 128, 256)
# older than the keys that the kernel before writes: it finds its places by them
_EARLY = ("q_start", "position", "slot", "cache_len")


def shipped(capability: int, chunk: int = 0, is_quantized: bool = False) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability.

    Args:
        chunk: positions of the chunks that layers of an engine have; 0 is none.
        is_quantized: of engines whose caches are, but for the types of caches.
    """
    for dtype in DTYPES:
        for head_dim in _SHIPPED_HEAD_DIMS:
            sizes = (1, 32, LARGEST_DEPENDENT)
            few = {config(dtype, head_dim, rows, capability, is_quantized) for rows in sizes}
            configs = few | {config(dtype, head_dim, 4096, capability, is_quantized)}
            for c in sorted(configs, key=lambda c: c.block_m):
                launched = for_chunks(c) if chunk else c
                is_able = c in few and head_dim in _DEPENDENT_HEAD_DIMS
                for item in shipped_pages(
                    f"attend-{TYPE_NAMES[dtype]}-d{head_dim}-rows{c.block_m}",
                    attend_kernel, dtype, c.block_n, (*ROWS, "out"),
                    **_sizes(dtype, head_dim, head_dim, c, is_quantized),
                    CHUNK=chunk, **launched.options, early=_EARLY,
                ):  # fmt: skip
                    yield from with_dependent(item, capability, dtype, is_able)
