"""Children of draft rows whose filters are known: best keys of parts of rows, then of all parts.

A key is a value and its token as one integer, as in `tree_expand`. Greedy rows and delta rank
logits, coupled and SWOR rows s + noise; an MSS row keeps one best for each child's own noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from specc.kernels.cuda.child_keys_kernels import draft_merge_kernel, draft_parts_kernel
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, with_any_vocab
from specc.kernels.cuda.strided_rows import row_strides
from specc.kernels.cuda.tree_expand import DTYPES, MAX_ROUNDS, parts_config


def config(vocab: int, num_children: int) -> dict[str, int]:
    """Block sizes, as `parts_config` has them."""
    sizes = parts_config(vocab, num_children, 512)
    return sizes | {
        "IS_SORTED": num_children > MAX_ROUNDS,
        "BQ": sizes["BV"] // 4,
        "BS": triton.next_power_of_2(sizes["num_parts"]),
    }


def best_children(
    logits: Tensor,
    num_children: int,
    columns: Tensor,
    depth: int,
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    stats: Tensor,
    *,
    scored: bool,
) -> tuple[Tensor, Tensor]:
    """Tokens and scores of `draft_children` in two launches; `stats` are those of `row_filters`."""
    num_rows, vocab = logits.shape
    frontier, device = len(columns), logits.device
    sizes = config(vocab, num_children)
    num_parts = sizes["num_parts"]
    keys = torch.empty(num_rows, num_parts, num_children, dtype=torch.int64, device=device)
    tokens = torch.empty(num_rows, num_children, dtype=torch.int64, device=device)
    scores = torch.empty(
        num_rows, num_children if scored else 0, dtype=torch.float32, device=device
    )
    sums = torch.empty(num_rows, num_parts, 2, device=device) if scored else None
    draft_parts_kernel[(num_rows * num_parts,)](
        logits,
        cache_len,
        columns,
        values,
        words,
        stats,
        keys,
        sums,
        *row_strides(logits, cache_len, columns, values, words),
        vocab,
        frontier,
        num_parts,
        num_children,
        depth,
        **_part_sizes(sizes),
    )
    draft_merge_kernel[(num_rows,)](
        logits if scored else None,
        cache_len,
        values,
        words,
        stats,
        keys,
        sums,
        tokens,
        scores if scored else None,
        *row_strides(logits, cache_len, values, words),
        vocab,
        frontier,
        num_parts,
        num_children,
        **_merge_sizes(sizes),
    )
    return tokens, scores


def _part_sizes(sizes: dict[str, int]) -> dict[str, int]:
    """Of the first launch."""
    return _options(sizes["part_warps"]) | {x: sizes[x] for x in ("IS_SORTED", "BK", "BQ")}


def _merge_sizes(sizes: dict[str, int]) -> dict[str, int]:
    """Of the second."""
    return _options(sizes["merge_warps"]) | {x: sizes[x] for x in ("IS_SORTED", "BK", "BC", "BS")}


def _options(num_warps: int) -> dict[str, int]:
    """Registers: what a multiprocessor has for each thread of a program."""
    return {
        "num_warps": num_warps,
        "maxnreg": min(255, 2048 // num_warps),
        "enable_fp_fusion": False,
    }


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability."""
    for dtype in DTYPES:
        for num_children in (1, 2, 4, 8, 16):
            yield from _parts(dtype, num_children, scored=False)
        for num_children in (8, 16):
            yield from _parts(dtype, num_children, scored=True)
    # a sort takes long to compile
    yield from _parts(torch.bfloat16, 64, scored=False)
    for vocab, num_children in SHIPPED_MERGES:
        yield from _merge(None, vocab, num_children)
    for dtype in DTYPES:
        for num_children in (8, 10):
            yield from _merge(dtype, 131072, num_children)


# vocabularies leave different numbers of candidates
SHIPPED_MERGES = [(131072, k) for k in (1, 2, 4, 8, 16, 64)] + [(32768, 4), (262144, 4)]


_TYPES = {
    torch.float32: ("values", "stats", "sums", "scores"),
    torch.int32: ("cache_len", "columns"),
    torch.int64: ("words", "keys", "tokens"),
}


def _parts(dtype: torch.dtype, num_children: int, *, scored: bool) -> Iterator[Shipped]:
    item = Shipped.of(
        f"parts-{TYPE_NAMES[dtype]}-k{num_children}{'-scored' * scored}",
        draft_parts_kernel, {dtype: ("logits",)}, _TYPES,
        **_part_sizes(config(131072, num_children)), **({} if scored else {"sums": None}),
    )  # fmt: skip
    return with_any_vocab(item)


def _merge(dtype: torch.dtype | None, vocab: int, num_children: int) -> Iterator[Shipped]:
    """Scored where it has a dtype."""
    absent = dict.fromkeys(("logits", "sums", "scores") if dtype is None else ())
    item = Shipped.of(
        f"merge{'' if dtype is None else f'-scored-{TYPE_NAMES[dtype]}'}-v{vocab}-k{num_children}",
        draft_merge_kernel, {dtype: ("logits",)}, _TYPES,
        **_merge_sizes(config(vocab, num_children)), **absent,
    )  # fmt: skip
    return with_any_vocab(item)
