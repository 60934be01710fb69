"""`specc::attend` over cached latents: one head of keys, whose first columns are the values.

Few tokens of a sequence have a kernel of their own (`attend_latent_few`). In that of the others, as
in `attend` a program takes a tile of packed rows of one sequence and one split of its keys, and
the last program of a tile merges. All query heads read the same rows, so the rows of a tile are
the tokens of a sequence × all of its heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from specc.kernels.cuda import attend, attend_latent_few
from specc.kernels.cuda.attend_call import (
    DTYPES,
    NOTHING_BESIDE,
    PLACES,
    SEARCH,
    SHIPPED_PAGES,
    AttendCall,
    padded,
    page_rows,
    signature,
)
from specc.kernels.cuda.attend_config import AttendConfig
from specc.kernels.cuda.attend_latent_kernels import attend_latent_kernel
from specc.kernels.cuda.attend_visits import NO_WINDOW
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped

# columns of a latent, and of what heads share
MOST_LATENT, MOST_SHARED = 512, 64
# columns of a latent that an accumulator holds: there are two of them
_HALF = MOST_LATENT // 2
# tokens of a sequence that are no chunk of a prompt
_LARGEST_TREE = 64
# columns that one step of merging takes
_MERGED = 64

# bytes of an element → launch parameters. Tiles of 64 rows, which wgmma needs, spill on sm_90:
# accumulators take half of the registers, and descriptors of the queries are kept in most of the
# others
_TABLE = {2: AttendConfig(32, 32, 8, 2, 1), 4: AttendConfig(16, 16, 8, 2, 1)}
# (family of capabilities, bytes) → launch parameters, where the one above does not fit
_EXCEPTIONS: dict[tuple[int, int], AttendConfig] = {
    # higher tiles spill
    **{(family, 2): AttendConfig(16, 32, 8, 3, 1) for family in (80, 100)},
    # two key blocks in flight take more than the 99 KiB of shared memory
    (120, 4): AttendConfig(16, 16, 8, 1, 1),
}


def config(dtype: torch.dtype, capability: int) -> AttendConfig:
    """Launch parameters of the kernel for all batches.

    Args:
        capability: 10 · major + minor.
    """
    family = 120 if capability in (86, 89) or capability >= 120 else capability // 10 * 10
    return _EXCEPTIONS.get((family, dtype.itemsize), _TABLE[dtype.itemsize])


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
    sink_logits: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    sink: int = 0,
    softcap: float = 0.0,
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
        sink_logits: [H] in the dtype of q, or None.
        scale: positive.
        window: 0 is no limit.
        sink: first keys that no window cuts.
        softcap: 0 is none.
        num_splits: of the keys of every tile; None: chosen on the device, by lengths.
    Returns:
        [H, Nt, R] in the dtype of q, laid out as [Nt, H, R].
    """
    call = AttendCall(
        q, k_cache, k_cache, rank, q_start, position, slot, cache_len, ancestors, block_table,
        scale, window, sink, num_splits, sink_logits, softcap,
    )  # fmt: skip
    _check(call)
    out = q.new_empty(call.num_tokens, call.num_heads, rank)
    if call.num_tokens == 0 or call.num_seqs == 0:
        return out.zero_().transpose(0, 1)

    capability, num_sms = attend.machine(q.device)
    if (few := attend_latent_few.find(call)) is not None:
        attend_latent_few.launch(few, call, out, num_sms)
    else:
        _launch(call, out, capability, num_sms)
    return out.transpose(0, 1)


def _launch(call: AttendCall, out: Tensor, capability: int, num_sms: int) -> None:
    """Launch the kernel for all batches; `out` [Nt, H, R] is written."""
    c = config(call.q.dtype, capability)
    tokens = triton.cdiv(call.num_tokens, call.num_seqs)
    work = call.plan(c, num_sms, is_prompt=tokens > _LARGEST_TREE)
    attend_latent_kernel[(work.num_programs,)](
        call.q, call.k_cache, out, *call.parts(work.num_parts, c.block_m, work.num_parts),
        *call.places, call.window or NO_WINDOW.value, call.sink,
        call.num_tokens, call.num_seqs, call.num_heads, *call.sizes,
        work.num_splits, work.slots, work.waves,
        *call.q.stride()[:2], *call.k_cache.stride()[:2], call.block_table.stride(0),
        call.stride_words,
        **_sizes(call.q.dtype, call.value_dim, call.head_dim - call.value_dim, c),
        PAGE=call.page(c.block_n),
        IS_TREE=call.ancestors is not None,
        **call.beside,
        **c.options,
    )  # fmt: skip


def _sizes(dtype: torch.dtype, rank: int, shared: int, c: AttendConfig) -> dict[str, int]:
    columns = min(_HALF, padded(rank))
    return {
        "R": rank, "S": shared, "BR": columns, "BS": padded(shared),
        "BM": c.block_m, "BN": c.block_n,
        # without tensor cores a thread holds whole rows of its operands: a few columns at a time
        "BC": min(32, columns) if dtype == torch.float32 else _HALF,
        "BV": min(_MERGED, columns), "BB": SEARCH, "MIN_BLOCKS": c.min_blocks,
    }  # fmt: skip


def _check(call: AttendCall) -> None:
    """Refuse what the kernel would misread."""
    q, k_cache, rank, shared = call.q, call.k_cache, call.value_dim, call.head_dim - call.value_dim
    if q.dtype != k_cache.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"attend: found q {q.dtype}, k_cache {k_cache.dtype};"
            f" needed one dtype of {', '.join(map(str, DTYPES))}"
        )
    if k_cache.shape[2:] != (1, call.head_dim):
        raise ValueError(
            f"attend: found q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)};"
            " needed [H, Nt, R + r] and [blocks, block_size, 1, R + r]"
        )
    if not (0 < rank <= MOST_LATENT and 0 < shared <= MOST_SHARED):
        raise ValueError(
            f"attend: found latents of {rank} columns and {shared} that heads share;"
            f" needed 1 to {MOST_LATENT} and 1 to {MOST_SHARED}"
        )
    call.check_places()


_POINTERS = ("q", "k_cache", "out", "partial", "lse", "arrived", *PLACES)
_DIVISIBLE_STRIDES = ("stride_qh", "stride_qt", "stride_kb", "stride_ks")
_INTEGERS = (
    "window", "sink", "num_tokens", "num_seqs", "num_heads", "num_words", "num_blocks",
    "num_pages", "block_size", "tokens_each", "num_splits", "slots", "waves",
    "stride_table", "stride_words", *_DIVISIBLE_STRIDES,
)  # fmt: skip


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability."""
    for dtype in DTYPES:
        c = config(dtype, capability)
        for page in sorted({page_rows(*sizes, c.block_n) for sizes in SHIPPED_PAGES}):
            for is_tree in (True, False):
                yield _shipped_attend(dtype, c, page, is_tree)


def _shipped_attend(dtype: torch.dtype, c: AttendConfig, page: int, is_tree: bool) -> Shipped:
    name = TYPE_NAMES[dtype]
    rank, shared = attend_latent_few.SHIPPED_SIZES
    return Shipped(
        f"latent-{name}-r{rank}-rows{c.block_m}-page{page}-{'tree' if is_tree else 'causal'}",
        attend_latent_kernel,
        {**signature(_POINTERS, _INTEGERS, dtype, is_tree=is_tree), "scale": "fp32"},
        {**_sizes(dtype, rank, shared, c), "PAGE": page, "IS_TREE": is_tree, **NOTHING_BESIDE},
        c.num_warps,
        c.num_stages,
        (*_POINTERS, *_DIVISIBLE_STRIDES),
        c.max_registers,
    )
