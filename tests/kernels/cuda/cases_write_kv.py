"""Cases of `write_kv` and how one is checked, without pytest; `rope_write` writes the same way.

The caches are slices of a slab of other layers, all of it a canary value: the whole slab is
compared, so that a row written beside its place is found wherever it lands.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specc.artifact.kv_rows import QUANTIZED_ROWS, stored_row
from specc.kernels.cuda.write_kv import write_kv
from specc.kernels.reference.core import write_kv_reference

# exact in all dtypes; of quantized rows, one of them
CANARY, CANARY_CODE = 12288.0, 77
BAD_BLOCK = 1_000_000_000


@dataclass(frozen=True)
class Case:
    """A batch of tokens to write.

    Args:
        seqs: (tokens, first slot) of each sequence.
        heads: query heads (of `rope_write`) and KV heads.
        sizes: head size of keys and of values.
        rotated: R of `rope_write`; 0 is the whole head.
        block_size: rows of a block; 0 is dense.
        dead: tokens (flat) that are dead.
        tail: tokens after those of the last sequence.
        cache_dtype: None is the same.
        rows: how caches hold rows, see `specc.artifact.kv_rows`.
        angle_dtype: of cos and sin; None is the same.
    """

    seqs: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (64, 64)
    rotated: int = 0
    block_size: int = 16
    dead: tuple[int, ...] = ()
    tail: int = 0
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    angle_dtype: torch.dtype | None = None
    rows: str = "auto"


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = {
    "decode": Case(((1, 30), (1, 0), (1, 47))),
    "one-token": Case(((1, 5),), (6, 6), (128, 128), dtype=BF16),
    "tree": Case(((7, 30), (0, 3), (12, 15)), (6, 3), (80, 80), dtype=F16, angle_dtype=F32),
    "partial": Case(((5, 9), (2, 1)), (3, 1), (96, 96), rotated=32, dtype=BF16),
    "partial-odd-half": Case(((5, 9),), (4, 2), (80, 80), rotated=20),
    "odd-pages": Case(((9, 4), (3, 6)), (2, 2), (64, 64), block_size=3, dtype=F16),
    "dense": Case(((4, 77), (2, 10)), (4, 4), (64, 64), block_size=0, dtype=BF16),
    "value-size": Case(((6, 12),), (4, 2), (64, 40), rotated=64),
    "dead-tokens": Case(((5, 30), (2, 4), (3, 9)), dead=(1, 5, 6, 9), tail=3),
    "dead-batch": Case(((2, 30),), dead=(0, 1)),
    "chunk": Case(((70, 20), (3, 5)), (5, 3), (16, 16), dtype=F16),
    "many-heads": Case(((3, 8),), (20, 20), (32, 32)),
    "many-sequences": Case(((0, 0),) * 300 + ((2, 9), (0, 3), (1, 0)), (2, 1), (16, 16)),
    "wider-cache": Case(((3, 8),), cache_dtype=F32, dtype=BF16, angle_dtype=F32),
    "head-256": Case(((2, 3),), (2, 1), (256, 256), rotated=64),
}
_QUANTIZED_ROWS = (
    "decode", "one-token", "tree", "partial", "partial-odd-half", "odd-pages", "value-size",
    "dead-tokens", "dead-batch", "chunk", "head-256",
)  # fmt: skip
CODED_CASES = {
    f"{name}-{kind}": replace(CASES[name], rows=kind)
    for name in _QUANTIZED_ROWS
    for kind in QUANTIZED_ROWS
}


def make_rows(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Arguments of `write_kv`, and the slab of the caches of each size."""
    rng = random.Random(repr(case))
    torch.manual_seed(rng.randrange(1 << 30))
    num_kv_heads = case.heads[1]
    rows = max(first + tokens for tokens, first in case.seqs)
    block_size = case.block_size or rows + 5
    num_pages = -(-rows // block_size)
    num_blocks = len(case.seqs) * num_pages + 2
    slots = [first + i for tokens, first in case.seqs for i in range(tokens)] + [1] * case.tail
    num_tokens = len(slots)
    for token in case.dead:
        slots[token] = -1
    args: dict[str, Tensor] = {}
    # slices of one fused projection
    widths = [num_kv_heads * size for size in case.sizes]
    fused = torch.randn(num_tokens, sum(widths), dtype=torch.float32).to(case.dtype).to(device)
    for name, part, size in zip("kv", fused.split(widths, 1), case.sizes, strict=True):
        args[name] = part.view(num_tokens, num_kv_heads, size).transpose(0, 1)
    for i, (name, size) in enumerate(zip("kv", case.sizes, strict=True)):
        size, stored = stored_row(size, case.cache_dtype or case.dtype, case.rows)
        # what a block beyond the cache would be lies in the slab, too
        shape = (3, 2, num_blocks, block_size, num_kv_heads, size)
        canary = CANARY if stored.is_floating_point else CANARY_CODE
        args[f"{name}_slab"] = torch.full(shape, canary, dtype=stored, device=device)
        args[f"{name}_cache"] = args[f"{name}_slab"][1, i]
    table = torch.randperm(num_blocks)[: len(case.seqs) * num_pages].view(-1, num_pages).int()
    for b, (tokens, first) in enumerate(case.seqs):
        table[b, -(-(first + tokens) // block_size) :] = BAD_BLOCK
    starts = [sum(t for t, _ in case.seqs[:b]) for b in range(len(case.seqs) + 1)]
    args["q_start"] = torch.tensor(starts, dtype=torch.int32, device=device)
    args["slot"] = torch.tensor(slots, dtype=torch.int32, device=device)
    # columns of a wider table: what a slot beyond the last page would find is a sound block
    wide = torch.zeros(len(case.seqs), num_pages + 1, dtype=torch.int32)
    wide[:, :-1] = table
    args["block_table"] = wide.to(device)[:, :-1]
    return args


def split_slabs(args: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The arguments without the slabs, and the slabs."""
    slabs = [args["k_slab"], args["v_slab"]]
    return {name: x for name, x in args.items() if not name.endswith("_slab")}, slabs


def check_write_kv(case: Case, device: torch.device) -> None:
    """Compare all of the slabs with the oracle's; raises AssertionError."""
    args, slabs = split_slabs(make_rows(case, device))
    expected, expected_slabs = split_slabs(make_rows(case, device))
    assert write_kv(**args) is None
    write_kv_reference(**expected)
    for got, want in zip(slabs, expected_slabs, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def break_rows(args: dict[str, Tensor]) -> dict[str, Tensor]:
    """Slots beyond the table, and blocks beyond the cache, for a case of three sequences.

    Of the first one, the two tokens lie in two pages.
    """
    table, slot = args["block_table"], args["slot"]
    num_blocks = args["k_cache"].shape[0]
    assert slot[0] // args["k_cache"].shape[1] != slot[1] // args["k_cache"].shape[1]
    # the first one there is not, and one before the first
    table[0] = torch.tensor([num_blocks, -7] * 9)[: table.shape[1]]
    slot[args["q_start"][2] :] = 1 << 30
    # the last row of the last page is inside, the next is not
    slot[-1] = table.shape[1] * args["k_cache"].shape[1]
    return args


def check_bad_data(device: torch.device) -> None:
    """Rows without a place are not written; those of the sound sequence are."""
    case = Case(((2, 15), (3, 20), (2, 12)))
    args, slabs = split_slabs(break_rows(make_rows(case, device)))
    expected, expected_slabs = split_slabs(make_rows(case, device))
    expected["slot"][:2] = -1
    expected["slot"][5:] = -1
    write_kv(**args)
    write_kv_reference(**expected)
    for got, want in zip(slabs, expected_slabs, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
