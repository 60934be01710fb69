"""The walk of `specc::accept`: one program a sequence, and several for passes over the vocabulary.

Greedy, coupled and delta rows read what `node_best` has found, in the first launch. MSS and SWOR
rows try the proposals of a node one by one: P and q are computed from logits as they are needed,
and what rejections leave of P lies in one row of scratch a sequence. A proposal that is accepted
costs a few numbers; a rejection, and the draw at the end of a walk, cost a pass over the
vocabulary, which the programs of a later launch share (`accept_walk_kernels.py`). Launches that a
row does not need are left at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from specc.kernels.cuda.accept_walk_kernels import NUM_STATES, NUM_SUMS, accept_walk_kernel
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, with_any_vocab
from specc.kernels.cuda.strided_rows import row_strides
from specc.kernels.cuda.tree_expand import DTYPES

# parts of rows whose keys one load takes
KEYS = 128
# nodes, or columns of proposals, of a block: one, but for merged trees of more
NODES = 1024
# tokens of a block of a pass over the vocabulary, and counters, of four tokens, of one with noise
BLOCK, COUNTERS = 2048, 1024
# parts of a pass; programs beyond MAX_PROGRAMS gain nothing: parts grow instead
MAX_PARTS, MAX_PROGRAMS = 32, 2048
# passes that programs share: of a chain, which has one proposal a node, a rejection and a draw; of
# other trees as many as most walks need
CHAIN_ROUNDS, TREE_ROUNDS = 2, 4
_SIZES: dict[str, Any] = {
    "BN": NODES, "BV": BLOCK, "BQ": COUNTERS, "BP": MAX_PARTS,
    "num_warps": 8, "maxnreg": 255, "enable_fp_fusion": False,
}  # fmt: skip


def parts_of(batch: int, vocab: int) -> tuple[int, int, int]:
    """Parts of a pass, blocks of 4 * COUNTERS tokens of each, and of the whole vocabulary."""
    total = triton.cdiv(vocab, 4 * COUNTERS)
    num_blocks = triton.cdiv(total, MAX_PARTS)
    while num_blocks < total and batch * triton.cdiv(total, num_blocks) > MAX_PROGRAMS:
        num_blocks *= 2
    return triton.cdiv(total, num_blocks), num_blocks, total


def rounds_of(num_columns: int, max_depth: int) -> int:
    """Passes of a walk that programs share; what goes beyond is one program's."""
    return CHAIN_ROUNDS if num_columns - 1 <= max_depth else TREE_ROUNDS


def accept_walk(
    best: Tensor,
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    max_depth: int,
    image: Tensor | None,
    q_rows: Tensor | None,
    drafts: Tensor | None,
    stats: tuple[Tensor, Tensor | None],
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    counts: Tensor,
    *,
    is_tried: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, number of accepted tokens and output tokens of `accept`.

    One launch, and where `is_tried` is set, one for each of `rounds_of`.

    `best` are keys of `node_best`, `stats` those of `row_filters` for logits and for drafts,
    `counts` of `tree_context`; `drafts` [B * G, V] are the logits of all draft rows, None where no
    proposal was drawn from one; the others are inputs of `accept`. Where `is_tried` is not set,
    MSS and SWOR rows are walked as the others are, which needs keys of all rules.
    """
    batch, num_nodes = tokens.shape
    vocab, device = logits.shape[1], logits.device
    num_columns = num_nodes if image is None else image.shape[1]
    path = torch.empty(batch, max_depth + 1, dtype=torch.int32, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int32, device=device)
    output_tokens = torch.empty(batch, max_depth + 1, dtype=torch.int64, device=device)
    num_parts, num_blocks, all_blocks = parts_of(batch, vocab)
    scratch: list[Tensor | None] = [None] * 7
    if is_tried:
        scratch = [
            torch.empty(batch, width, dtype=dtype, device=device)
            for width, dtype in (
                (vocab, torch.float32),
                (num_columns, torch.int64),
                (NUM_STATES, torch.int32),
                (NUM_SUMS, torch.float32),
                (num_parts * NUM_SUMS, torch.float32),
                (num_parts, torch.int64),
                (1, torch.int32),
            )
        ]
    num_rounds = rounds_of(num_columns, max_depth) if is_tried else 0
    for i_round in range(num_rounds + 1):
        # of the first launch, a row has one program
        parts = num_parts if i_round else 1
        accept_walk_kernel[(batch * parts,)](
            best,
            logits if is_tried else None,
            tokens,
            parents,
            image if is_tried else None,
            None if drafts is None else q_rows,
            drafts,
            *(stats if is_tried else (None, None)),
            values,
            words,
            cache_len,
            counts,
            *scratch,
            path,
            num_accepted,
            output_tokens,
            *row_strides(logits, tokens, parents, image, q_rows, drafts),
            *row_strides(values, words, cache_len),
            vocab,
            num_nodes,
            num_columns,
            0 if drafts is None else drafts.shape[0] // batch,
            max_depth,
            best.shape[1],
            parts,
            num_blocks,
            all_blocks,
            i_round,
            num_rounds,
            IS_TRIED=is_tried,
            BS=max(KEYS, triton.next_power_of_2(best.shape[1])),
            **_SIZES,
            **launch_options(None, not is_tried),
        )
    return path, num_accepted, output_tokens


# rest, tried, state, sums, part_sums, part_keys, arrived: see the kernel
_SCRATCH = {
    torch.float32: ("rest", "sums", "part_sums"),
    torch.int64: ("tried", "part_keys"),
    torch.int32: ("state", "arrived"),
}
_TYPES = {
    torch.int64: ("best", "tokens", "words", "output_tokens"),
    torch.int32: ("parents", "image", "q_rows", "cache_len", "counts", "path", "num_accepted"),
    torch.float32: ("target_stats", "draft_stats", "values"),
}


def shipped(capability: int) -> Iterator[Shipped]:
    """Every dtype and what proposals may come from; dependent only what looks at no logits."""
    of_drafts = ("q_rows", "drafts", "draft_stats")
    found: list[Shipped] = []
    for dtype in DTYPES:
        name = TYPE_NAMES[dtype]
        found += _shipped(f"alone-{name}", dtype, ("image", *of_drafts))
        found += _shipped(f"drafts-{name}", dtype, ("image",))
        found += _shipped(f"merged-{name}", dtype, ())
        # of proposals that were looked up
        found += _shipped(f"merged-alone-{name}", dtype, of_drafts)
    for item in found:
        yield from with_dependent(item, capability, None, is_able=False)
    # rows that follow the best tokens do not look at logits
    scratch = (name for names in _SCRATCH.values() for name in names)
    absent = ("logits", "target_stats", "image", *of_drafts, *scratch)
    for item in _shipped("best", torch.bfloat16, absent):
        yield from with_dependent(item, capability, None)


def _shipped(name: str, dtype: torch.dtype, absent: Sequence[str]) -> Iterator[Shipped]:
    item = Shipped.of(
        f"walk-{name}",
        accept_walk_kernel, {dtype: ("logits", "drafts")}, _TYPES, _SCRATCH,
        IS_TRIED="rest" not in absent, BS=KEYS, **_SIZES, **dict.fromkeys(absent),
    )  # fmt: skip
    return with_any_vocab(item)
