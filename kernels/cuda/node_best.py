"""Which token the target wants after each node of a tree: best keys of parts of all rows.

Which rows a walk will visit is known on the device alone, so all that it can reach are reduced.
Greedy rows are compared and no more; the others take the noise of their position. Rows whose
proposals are tried one by one (`accept_walk`) are left to the walk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.row_noise import first_of_four, raise_best
from specc.kernels.cuda.row_options import (
    DELTA,
    NUM_PROMPT,
    RULE,
    SEED,
    factor_of,
    has_filter,
    is_sampled,
)
from specc.kernels.cuda.row_scan import ROW_INTEGERS
from specc.kernels.cuda.sampling import LANES
from specc.kernels.cuda.shipped import ALIGNMENT, TYPE_NAMES, Shipped, with_any_vocab
from specc.kernels.cuda.strided_rows import row_strides
from specc.kernels.cuda.tree_context import has_penalty, scores_at
from specc.kernels.cuda.tree_expand import DTYPES, NO_KEY, order_key

# programs beyond this many gain nothing: parts of rows grow instead
MAX_PROGRAMS = 2048
# noise takes more registers than comparisons
COUNTERS = 512
MAX_REGISTERS = 160
# of rows that are not aligned: sm_120 spills with fewer, and as many programs are resident
MAX_ODD_REGISTERS = 168


@triton.jit
def _best_token(row, first, num_blocks, BV: tl.constexpr):
    """Key of the best logit of some blocks of a row."""
    o_v = first + tl.arange(0, BV)
    # a token beyond the row is -inf after all tokens of the row: it never wins
    b_best = tl.full([BV], -float("inf"), tl.float32)
    b_token = o_v
    for i in range(num_blocks):
        o_t = o_v + i * BV
        b_logit = scores_at(o_t, row)
        m_better = (b_logit > b_best) | ((b_logit != b_logit) & (b_best == b_best))
        b_best = tl.where(m_better, b_logit, b_best)
        b_token = tl.where(m_better, o_t, b_token)
    return tl.max(order_key(b_best, b_token), 0)


@triton.jit(do_not_specialize=ROW_INTEGERS)
def node_best_kernel(
    logits,
    values,
    words,
    cache_len,
    stats,
    depths,
    counts,
    tokens,
    parents,
    best,
    row_stride,
    value_stride,
    word_stride,
    len_stride,
    token_stride,
    parent_stride,
    vocab,
    num_rows,
    first_node,
    num_parts,
    num_blocks,
    ALL_RULES: tl.constexpr,
    BV: tl.constexpr,
    BQ: tl.constexpr,
):
    i_r = (tl.program_id(0) // num_parts).to(tl.int64)
    i_p = tl.program_id(0) % num_parts
    i_b = i_r // num_rows
    node = first_node + (i_r - i_b * num_rows).to(tl.int32)
    p_values = values + i_b * value_stride
    p_words = words + i_b * word_stride
    depth = tl.load(depths + i_r)
    if depth >= 0:
        place = tl.load(cache_len + i_b * len_stride) + depth
        rule = tl.load(p_words + RULE)
        is_penalized = has_penalty(p_values)
        num_prompt = tl.load(p_words + NUM_PROMPT)
        p_counts = counts + i_b * vocab
        p_tokens = tokens + i_b * token_stride
        p_parents = parents + i_b * parent_stride
        context = (p_counts, p_tokens, p_parents, p_values, num_prompt, node, place)
        p_row = logits + i_r * row_stride
        if is_sampled(p_values):
            if ALL_RULES or rule <= DELTA:
                cut = -float("inf")
                if has_filter(p_values, p_words, vocab):
                    cut = tl.load(stats + i_r * 3 + 1)
                row = (p_row, vocab, factor_of(p_values), is_penalized, context)
                seed = tl.load(p_words + SEED)
                offset = place.to(tl.int64) + 1
                key = tl.full([], NO_KEY, tl.int64)
                first = i_p * num_blocks * (BV // 4)
                for i in range(num_blocks * (BV // 4 // BQ)):
                    o_q = first + i * BQ + tl.arange(0, BQ)
                    o_t = first_of_four(o_q)
                    b_0 = scores_at(o_t, row)
                    b_1 = scores_at(o_t + LANES, row)
                    b_2 = scores_at(o_t + 2 * LANES, row)
                    b_3 = scores_at(o_t + 3 * LANES, row)
                    b_0 = tl.where(b_0 >= cut, b_0, -float("inf"))
                    b_1 = tl.where(b_1 >= cut, b_1, -float("inf"))
                    b_2 = tl.where(b_2 >= cut, b_2, -float("inf"))
                    b_3 = tl.where(b_3 >= cut, b_3, -float("inf"))
                    key = raise_best(key, b_0, b_1, b_2, b_3, o_q, seed, offset)
                tl.store(best + i_r * num_parts + i_p, key)
        else:
            # penalties take more registers than comparisons, too
            first = i_p * num_blocks * BV
            if is_penalized:
                count = num_blocks * (BV // 4 // BQ)
                row = (p_row, vocab, 1.0, True, context)
                key = _best_token(row, first, count, 4 * BQ)
            else:
                key = _best_token((p_row, vocab, 1.0), first, num_blocks, BV)
            tl.store(best + i_r * num_parts + i_p, key)


def config(num_rows: int, vocab: int) -> dict[str, int]:
    """Blocks of a part, as many parts as fill a device; counters, of four tokens, at a time."""
    block = 512 if vocab <= 4096 else 2048
    total = triton.cdiv(vocab, block)
    num_blocks = 1
    while num_blocks < total and num_rows * triton.cdiv(total, num_blocks) > MAX_PROGRAMS:
        num_blocks *= 2
    return {
        "BV": block,
        "BQ": min(block // 4, COUNTERS),
        "num_blocks": num_blocks,
        "num_parts": triton.cdiv(total, num_blocks),
        "num_warps": 4,
    }


def node_best(
    logits: Tensor,
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    stats: Tensor,
    tree: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    all_rules: bool,
    first_node: int = 0,
) -> Tensor:
    """Keys [B * T, parts] int64 of the best of each part of a row, in one launch.

    `stats` are those of `row_filters`, `tree` is depths, counts, tokens and parents as there; the
    others are inputs of `accept`. `all_rules`: MSS and SWOR rows are wanted as well. Rows are those
    of T nodes of each sequence, from `first_node` on. Rows of nodes that no walk reaches are not
    written.
    """
    num_rows, vocab = logits.shape
    depths, counts, tokens, parents = tree
    sizes = config(num_rows, vocab)
    num_parts = sizes["num_parts"]
    best = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    node_best_kernel[(num_rows * num_parts,)](
        logits,
        values,
        words,
        cache_len,
        stats,
        depths,
        counts,
        tokens,
        parents,
        best,
        *row_strides(logits, values, words, cache_len, tokens, parents),
        vocab,
        num_rows // len(tokens),
        first_node,
        num_parts,
        sizes["num_blocks"],
        ALL_RULES=all_rules,
        BV=sizes["BV"],
        BQ=sizes["BQ"],
        num_warps=sizes["num_warps"],
        maxnreg=MAX_ODD_REGISTERS if vocab % ALIGNMENT else MAX_REGISTERS,
        enable_fp_fusion=False,
    )
    return best


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability."""
    types = {torch.int64: ("words", "tokens", "best"), torch.float32: ("values", "stats")}
    types |= {torch.int32: ("cache_len", "depths", "counts", "parents")}
    sizes = config(1, 131072)
    for dtype in DTYPES:
        for all_rules in (False, True):
            item = Shipped.of(
                f"{'roots' if all_rules else 'nodes'}-{TYPE_NAMES[dtype]}",
                node_best_kernel, {dtype: ("logits",)}, types,
                # a root is the last column of a step's tokens
                unaligned=("tokens",) if all_rules else (),
                ALL_RULES=all_rules, BV=sizes["BV"], BQ=sizes["BQ"],
                maxnreg=MAX_REGISTERS, enable_fp_fusion=False,
            )  # fmt: skip
            yield from with_any_vocab(item, max_registers=MAX_ODD_REGISTERS)
