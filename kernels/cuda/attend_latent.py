"""Cached latents in `specc::attend`: one head of keys, whose first columns are the values.

Few tokens of a sequence have a kernel of their own (`attend_latent_few`). That of the others is
`attend_kernel`. All query heads read the same rows, so the rows of a tile are the tokens of a
sequence × all of its heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specc.kernels.cuda.attend_call import (
    DTYPES,
    SEARCH,
    AttendCall,
    padded,
    shipped_pages,
)
from specc.kernels.cuda.attend_config import AttendConfig, family
from specc.kernels.cuda.attend_kernels import attend_kernel
from specc.kernels.cuda.attend_latent_few import SHIPPED_SIZES
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import check

# columns of a latent, and of what heads share
MOST_LATENT, MOST_SHARED = 512, 64
# columns of a latent that an accumulator holds: there are two of them
_HALF = MOST_LATENT // 2
# tokens of a sequence that are no chunk of a prompt
LARGEST_TREE = 64

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
    """Launch parameters of `attend_kernel`.

    Args:
        capability: 10 · major + minor.
    """
    size = dtype.itemsize
    return _EXCEPTIONS.get((family(capability), size), _TABLE[size])


def sizes(dtype: torch.dtype, rank: int, shared: int, c: AttendConfig) -> dict[str, int]:
    """Sizes that `attend_kernel` is compiled for: latents of `rank` columns are its values."""
    columns = min(_HALF, padded(rank))
    return {
        "D": rank + shared, "DV": rank, "BD": padded(shared), "BDV": columns,
        "BM": c.block_m, "BN": c.block_n,
        # without tensor cores a thread holds whole rows of its operands: a few columns at a time
        "BC": min(32, columns) if dtype == torch.float32 else _HALF,
        "BB": SEARCH, "MIN_BLOCKS": c.min_blocks, "MERGED": 1,
    }  # fmt: skip


def check_latents(call: AttendCall) -> None:
    """Refuse what kernels over latents would misread."""
    # refused when a model is compiled: passes/rewrite/require_supported.py
    assert call.slopes is None, "no slopes over latents"
    assert not call.chunk, "no chunks over latents"
    q, k_cache, rank, shared = call.q, call.k_cache, call.value_dim, call.head_dim - call.value_dim
    check(
        k_cache.shape[2:] == (1, call.head_dim),
        "attend",
        f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}",
        "[H, Nt, R + r] and [blocks, block_size, 1, R + r]",
    )
    check(
        0 < rank <= MOST_LATENT and 0 < shared <= MOST_SHARED,
        "attend",
        f"latents of {rank} columns and {shared} that heads share",
        f"1 to {MOST_LATENT} and 1 to {MOST_SHARED}",
    )
    call.check_places()


def shipped(capability: int) -> Iterator[Shipped]:
    """Every configuration that engines launch on a capability."""
    rank, shared = SHIPPED_SIZES
    for dtype in DTYPES:
        c = config(dtype, capability)
        yield from shipped_pages(
            f"latent-{TYPE_NAMES[dtype]}-r{rank}-rows{c.block_m}",
            attend_kernel, dtype, c.block_n, ("q", "k_cache", "out"),
            v_cache=None, IS_DEPENDENT=False, **sizes(dtype, rank, shared, c), **c.options,
        )  # fmt: skip
