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
from specc.kernels.cuda.row_cut import row_cut_kernel
from specc.kernels.cuda.row_parts import NUM_BOUNDS, NUM_FACTS, row_parts_kernel, row_pivots_kernel
from specc.kernels.cuda.row_scan import NUM_PIVOTS
from specc.kernels.cuda.shipped import ALIGNMENT, TYPE_NAMES, Shipped, Types, with_any_vocab
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
_OPTIONS: dict[str, Any] = {"num_warps": 8, "maxnreg": 128, "enable_fp_fusion": False}
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
        logits.stride(0), values.stride(0), words.stride(0), cache_len.stride(0),
        0 if tokens is None else tokens.stride(0),
        0 if parents is None else parents.stride(0),
        vocab, num_rows // len(cache_len), first_node, num_parts, sizes["num_blocks"],
        _bits(filtered), _bits(weighed),
    )  # fmt: skip
    constants: dict[str, Any] = {name: sizes[name] for name in ("BR", "W")}
    constants |= {"IS_TREE": tree is not None, **_OPTIONS}
    grid = (num_rows * num_parts,)
    row_parts_kernel[grid](
        *rows, facts, maxima, arrived, *numbers_of_rows, BM=sizes["BM"], **constants
    )  # fmt: skip
    for i_round in range(ROUNDS):
        row_pivots_kernel[grid](
            *rows, facts, maxima, bounds, numbers, masses, *numbers_of_rows, i_round,
            **{name: sizes[name] for name in ("BM", "BP", "BC")},
            **constants,
        )  # fmt: skip
    row_cut_kernel[grid](
        *rows, bounds, numbers, masses, listed, arrived, stats, *numbers_of_rows,
        **{name: sizes[name] for name in ("BP", "BC")},
        **constants,
    )  # fmt: skip
    return stats


def _bits(rules: Collection[Rule]) -> int:
    return sum(1 << rule for rule in rules)


_KERNELS = {
    "parts": (row_parts_kernel, ("BM",)),
    "pivots": (row_pivots_kernel, ("BM", "BP", "BC")),
    "cut": (row_cut_kernel, ("BP", "BC")),
}


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability."""
    tree: Types = {torch.int32: ("depths", "counts", "parents")}
    tree |= {torch.int64: ("tokens",)}
    floats = ("values", "facts", "maxima", "bounds", "masses", "listed", "stats")
    types = {torch.float32: floats, torch.int64: ("words",)}
    types |= {torch.int32: ("cache_len", "numbers", "arrived")}
    absent = dict.fromkeys(name for names in tree.values() for name in names)
    for dtype in DTYPES:
        sizes, odd = (config(1, vocab, dtype) for vocab in (131072, 131071))
        for name, (kernel, constants) in _KERNELS.items():
            of_kernel = ("BR", "W", *constants)
            for is_tree in (True, False):
                item = Shipped.of(
                    f"{name}-{'tree' if is_tree else 'draft'}-{TYPE_NAMES[dtype]}",
                    kernel, {dtype: ("logits",)}, types, tree,
                    **{key: sizes[key] for key in of_kernel}, **({} if is_tree else absent),
                    IS_TREE=is_tree, **_OPTIONS,
                )  # fmt: skip
                others = {key: odd[key] for key in of_kernel}
                yield from with_any_vocab(item, constexprs={**item.constexprs, **others})
