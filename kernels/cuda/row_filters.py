"""What filters leave of a row of logits: one number, the cut, and the tokens no less than it.

Four launches of several programs a row; nothing is sorted, and rows that need none leave at once.
Where it is known before that no row does (`launch.unfiltered`), nothing is launched.

1. Best, least and mass of parts of rows.
2. Numbers and masses of tokens above sixteen pivots, evenly between what bounds the cut and best.
3. The same between the two of them that the cut is between; only where more tokens are there than
   a list holds.
4. The tokens that are left are listed. The last program of a row finds the cut among them.

Where too many are left even then, equal ones as a rule, one program goes on with passes over the
whole row, of which twelve are enough whatever the numbers are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from specc.kernels.cuda.launch import is_unfiltered
from specc.kernels.cuda.row_cut import row_filters_kernel
from specc.kernels.cuda.row_parts import NUM_BOUNDS, NUM_FACTS
from specc.kernels.cuda.row_scan import NUM_PIVOTS
from specc.kernels.cuda.shipped import ALIGNMENT, TYPE_NAMES, Shipped, Types, with_any_vocab
from specc.kernels.cuda.strided_rows import row_strides
from specc.kernels.cuda.tree_expand import DTYPES
from specc.sampling.rows import Rule

# loads of a pass's block, and tokens of the list that a program holds at the end of a search
LOADS, LISTED = 256, 4096
# parts of a row; programs beyond MAX_PROGRAMS gain nothing: parts grow instead
MAX_PARTS, MAX_PROGRAMS = 16, 2048
# maxima of a part, of which the bound of top_k is one
MAXIMA = 64
# bytes that a thread takes at a time, where rows are aligned
LOAD_BYTES = 16
WARPS = 8
_OPTIONS: dict[str, Any] = {"num_warps": WARPS, "maxnreg": 128, "enable_fp_fusion": False}
ROUNDS = 2
# best, cut, mass
NUM_STATS = 3


def config(num_rows: int, vocab: int, dtype: torch.dtype) -> dict[str, int]:
    """Blocks of a part, parts of a row, and constants of the kernels."""
    # neighbors that no load takes at once would be spread over threads, with sums of each
    width = 1 if vocab % ALIGNMENT else LOAD_BYTES // dtype.itemsize
    height = min(LOADS, max(64, triton.next_power_of_2(triton.cdiv(vocab, width))))
    total = triton.cdiv(vocab, height * width)
    num_blocks = triton.cdiv(total, MAX_PARTS)
    while num_blocks < total and num_rows * triton.cdiv(total, num_blocks) > MAX_PROGRAMS:
        num_blocks *= 2
    return {
        "num_blocks": num_blocks,
        "num_parts": triton.cdiv(total, num_blocks),
        "W": width,
        "BR": height,
        "BM": min(MAXIMA, height),
        "BP": triton.next_power_of_2(MAX_PARTS),
        "BC": LISTED,
    }


def row_filters(
    logits: Tensor,
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    *,
    filtered: Collection[Rule],
    weighed: Collection[Rule],
    tree: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    first_node: int = 0,
) -> Tensor:
    """What filters leave of rows of logits, in four launches; in none where rows are `unfiltered`.

    Args:
        logits: [B * F, V].
        values: [B, 6] float32, see `specc.sampling.rows.Value`.
        words: [B, 4] int64, see `specc.sampling.rows.Word`.
        cache_len: [B] int32; rows of negative ones are left out.
        filtered: rules whose rows are looked at where they have filters.
        weighed: rules whose rows are looked at, and summed up.
        tree: depths [B, F] int32, counts [B, V] int32 (see `tree_context`), tokens [B, N] int64
            and parents [B, N] int32, where logits are those of F of a tree's nodes: they are
            penalized, and nodes of depth -1 are left out. None: of a draft.
        first_node: of the F nodes.
    Returns:
        [B * F, 3] float32 best s, the cut (tokens with s of at least the cut are kept), and the
        sum of exp(s - best) over tokens kept. Nothing is written to rows that are not looked at,
        greedy ones among them.
    """
    num_rows, vocab = logits.shape
    device = logits.device
    stats = torch.empty(num_rows, NUM_STATS, dtype=torch.float32, device=device)
    if is_unfiltered():
        return stats
    sizes = config(num_rows, vocab, logits.dtype)
    num_parts = sizes["num_parts"]
    # scratch of the caller's pool: a replay finds it where the capture had it
    facts = torch.empty(num_rows, num_parts, NUM_FACTS, dtype=torch.float32, device=device)
    maxima = torch.empty(num_rows, num_parts, sizes["BM"], dtype=torch.float32, device=device)
    bounds = torch.empty(num_rows, NUM_BOUNDS, dtype=torch.float32, device=device)
    shape = (num_rows, ROUNDS, num_parts, NUM_PIVOTS)
    numbers = torch.empty(shape, dtype=torch.int32, device=device)
    masses = torch.empty(shape, dtype=torch.float32, device=device)
    listed = torch.empty(num_rows, sizes["BC"], dtype=torch.float32, device=device)
    arrived = torch.empty(num_rows, dtype=torch.int32, device=device)
    depths, counts, tokens, parents = tree or (None, None, None, None)
    rows = (logits, values, words, cache_len, depths, counts, tokens, parents)
    numbers_of_rows = (
        *row_strides(logits, values, words, cache_len, tokens, parents),
        vocab, num_rows // len(cache_len), first_node, num_parts, sizes["num_blocks"],
        _bits(filtered), _bits(weighed),
    )  # fmt: skip
    scratch = {
        "facts": facts, "maxima": maxima, "bounds": bounds, "numbers": numbers, "masses": masses,
        "listed": listed, "arrived": arrived, "stats": stats,
    }  # fmt: skip
    for phase, i_round in (("parts", None), ("pivots", 0), ("pivots", 1), ("cut", None)):
        row_filters_kernel[(num_rows * num_parts,)](
            *rows,
            *(x if name in _USED[phase] else None for name, x in scratch.items()),
            *numbers_of_rows,
            i_round,
            IS_TREE=tree is not None,
            **_sizes(phase, sizes),
        )
    return stats


def _bits(rules: Collection[Rule]) -> int:
    return sum(1 << rule for rule in rules)


# what launches read and write between them
_USED = {
    "parts": ("facts", "maxima", "arrived"),
    "pivots": ("facts", "maxima", "bounds", "numbers", "masses"),
    "cut": ("bounds", "numbers", "masses", "listed", "arrived", "stats"),
}


def _sizes(phase: str, sizes: dict[str, int]) -> dict[str, Any]:
    blocks = {name: sizes[name] for name in ("BR", "W", "BM", "BP", "BC")}
    return {"PHASE": phase, **blocks, **_OPTIONS}


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability."""
    tree: Types = {torch.int32: ("depths", "counts", "parents"), torch.int64: ("tokens",)}
    floats = ("values", "facts", "maxima", "bounds", "masses", "listed", "stats")
    types: Types = {torch.float32: floats, torch.int64: ("words",)}
    types |= {torch.int32: ("cache_len", "numbers", "arrived")}
    for dtype in DTYPES:
        sizes, odd = (config(1, vocab, dtype) for vocab in (131072, 131071))
        for phase in _USED:
            for is_tree in (True, False):
                given: dict[str, Any] = {"IS_TREE": is_tree}
                given |= {x: None for used in _USED.values() for x in used if x not in _USED[phase]}
                given |= {} if is_tree else {x: None for names in tree.values() for x in names}
                given |= {} if phase == "pivots" else {"i_round": None}
                own = f"{phase}-{'tree' if is_tree else 'draft'}-{TYPE_NAMES[dtype]}"
                item, other = (
                    Shipped.of(
                        own, row_filters_kernel, {dtype: ("logits",)}, types, tree,
                        **given, **_sizes(phase, found),
                    )
                    for found in (sizes, odd)
                )  # fmt: skip
                yield from with_any_vocab(item, constexprs=other.constexprs)
