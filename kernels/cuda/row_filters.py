"""What filters leave of a row of logits: one number, the cut, and the tokens no less than it.

One program a row, nothing is sorted: pivots narrow an interval of s until the tokens inside of it
fit one program's registers, which then hold the rest of the search. Rows that need none leave at
once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.row_noise import order_of, value_of
from specc.kernels.cuda.row_options import (
    MIN_P,
    NUM_PROMPT,
    RULE,
    TOP_K,
    TOP_P,
    Bounded,
    factor_of,
    has_filter,
    is_sampled,
)
from specc.kernels.cuda.sampling import log_split, split_float
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, with_any_vocab
from specc.kernels.cuda.tree_context import has_penalty, scores_at
from specc.kernels.cuda.tree_expand import DTYPES
from specc.sampling_rows import Rule

# tokens of a pass's block, and of the interval that a program holds at the end of a search
BLOCK, LISTED = 1024, 4096
WARPS = 16
MAX_REGISTERS = 128
# best, cut, mass
NUM_STATS = 3
# orders of -inf and of the least number
NO_NUMBER = tl.constexpr(-0x7F800001)
LEAST_NUMBER = tl.constexpr(-0x7F800000)


@triton.jit
def _number(order):
    return value_of(order.to(tl.int32))


@triton.jit
def _between(pivot, low, high):
    """Order of a pivot, moved to one between low and high, which are further apart."""
    return tl.minimum(tl.maximum(order_of(pivot).to(tl.int64), low + 1), high - 1)


@triton.jit
def _kth_of_block(b_value, k, top):
    """Order of the k-th largest of at least k numbers."""
    low = tl.full([], NO_NUMBER, tl.int64)
    high = top + 1
    while high - low > 1:
        middle = (low + high) >> 1
        is_low = tl.sum((b_value >= _number(middle)).to(tl.int32), 0) >= k
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
    return low


@triton.jit
def _cut_of_min_p(best, top, min_p):
    """The lowest order whose weight is at least min_p; the best's is, whatever min_p says.

    Weights are compared by their logarithms: a GPU's exp is not monotone, a difference is, and the
    logarithm is the one that noise is made with, the same to the last bit wherever it runs.
    """
    # a weight that is half a unit below min_p is rounded to it; below are no normal numbers
    b_f, b_e = split_float(tl.maximum(min_p, 1.1754943508222875e-38))
    least = log_split(b_f, b_e) - 2.9802322387695312e-08
    low = tl.full([], NO_NUMBER, tl.int64)
    high = top
    while high - low > 1:
        middle = (low + high) >> 1
        is_kept = _number(middle) - best >= least
        high = tl.where(is_kept, middle, high)
        low = tl.where(is_kept, low, middle)
    return high


@triton.jit
def _mass_of(row, best, cut, BV: tl.constexpr):
    """Sum of the weights of tokens that are no less than the cut."""
    b_sum = tl.zeros([BV], tl.float32)
    for start in range(0, row[1], BV):
        b_score = scores_at(start + tl.arange(0, BV), row)
        b_sum += tl.where(b_score >= _number(cut), tl.exp(b_score - best), 0.0)
    return tl.sum(b_sum, 0)


@triton.jit
def _search(
    row, p_list, best, top, low, needed, IS_MASS: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr
):
    """The highest order with a measure of at least `needed`; that of `low` is.

    The measure of an order is the mass of the tokens that are no less, or their number. `needed`
    is a float64, so that a share of equal weights is not rounded to fewer of them.
    """
    vocab = row[1]
    high = top + 1
    above = tl.full([], 0.0, tl.float32)  # measure of `high`
    inside = tl.full([], BC + 1, tl.int32)
    while (inside > BC) & (high - low > 1):
        # three pivots evenly by value; one by order, so that there is an end
        floor = _number(tl.maximum(low, LEAST_NUMBER))
        step = (_number(high - 1) - floor) * 0.25
        t_0 = _between(floor + step, low, high)
        t_1 = _between(floor + 2.0 * step, low, high)
        t_2 = _between(floor + 3.0 * step, low, high)
        t_3 = (low + high) >> 1
        b_0 = tl.zeros([BV], tl.float32)
        b_1 = tl.zeros([BV], tl.float32)
        b_2 = tl.zeros([BV], tl.float32)
        b_3 = tl.zeros([BV], tl.float32)
        inside = tl.full([], 0, tl.int32)
        # what an earlier search wrote has been read
        tl.debug_barrier()
        for start in range(0, vocab, BV):
            o_t = start + tl.arange(0, BV)
            b_score = scores_at(o_t, row)
            # nothing that compares lies beyond the vocabulary
            b_score = tl.where(o_t < vocab, b_score, float("nan"))
            if inside <= BC:
                m_in = (b_score >= _number(low)) & (b_score < _number(high))
                found = tl.sum(m_in.to(tl.int32), 0)
                if found > 0:
                    o_place = inside + tl.cumsum(m_in.to(tl.int32), 0) - 1
                    tl.store(p_list + o_place, b_score, mask=m_in & (o_place < BC))
                inside += found
            b_weight = tl.full([BV], 1.0, tl.float32)
            if IS_MASS:
                b_weight = tl.exp(b_score - best)
            b_0 += tl.where(b_score >= _number(t_0), b_weight, 0.0)
            b_1 += tl.where(b_score >= _number(t_1), b_weight, 0.0)
            b_2 += tl.where(b_score >= _number(t_2), b_weight, 0.0)
            b_3 += tl.where(b_score >= _number(t_3), b_weight, 0.0)
        if inside > BC:
            low, high, above = _move(low, high, above, t_0, tl.sum(b_0, 0), needed)
            low, high, above = _move(low, high, above, t_1, tl.sum(b_1, 0), needed)
            low, high, above = _move(low, high, above, t_2, tl.sum(b_2, 0), needed)
            low, high, above = _move(low, high, above, t_3, tl.sum(b_3, 0), needed)
    if high - low > 1:
        tl.debug_barrier()
        o_c = tl.arange(0, BC)
        b_score = tl.load(p_list + o_c, mask=o_c < inside, other=float("nan"))
        b_weight = tl.full([BC], 1.0, tl.float32)
        if IS_MASS:
            b_weight = tl.exp(b_score - best)
        while high - low > 1:
            middle = (low + high) >> 1
            b_kept = tl.where(b_score >= _number(middle), b_weight, 0.0)
            is_low = (above + tl.sum(b_kept, 0)).to(tl.float64) >= needed
            low = tl.where(is_low, middle, low)
            high = tl.where(is_low, high, middle)
    return low


@triton.jit
def _move(low, high, above, pivot, measure, needed):
    """Bounds of a search after the measure of a pivot."""
    is_low = measure.to(tl.float64) >= needed
    above = tl.where(is_low | (pivot >= high), above, measure)
    high = tl.where(is_low, high, tl.minimum(high, pivot))
    return tl.where(is_low, tl.maximum(low, pivot), low), high, above


@triton.jit(
    do_not_specialize=[
        "value_stride",
        "word_stride",
        "len_stride",
        "token_stride",
        "parent_stride",
        "num_rows",
        "first_node",
    ]
)
def row_filters_kernel(
    logits,
    values,
    words,
    cache_len,
    stats,
    listed,
    depths,
    counts,
    tokens,
    parents,
    row_stride,
    value_stride,
    word_stride,
    len_stride,
    token_stride,
    parent_stride,
    vocab,
    num_rows,
    first_node,
    FILTERED: tl.constexpr,
    WEIGHED: tl.constexpr,
    IS_TREE: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    i_b = i_r // num_rows
    p_values = values + i_b * value_stride
    p_words = words + i_b * word_stride
    length = tl.load(cache_len + i_b * len_stride)
    rule = tl.load(p_words + RULE)
    is_weighed = ((WEIGHED >> rule) & 1) != 0
    is_filtered = ((FILTERED >> rule) & 1) != 0
    is_wanted = is_weighed | (is_filtered & has_filter(p_values, p_words, vocab))
    is_wanted = is_wanted & (length >= 0) & is_sampled(p_values)
    row = (logits + i_r * row_stride, vocab, factor_of(p_values))
    if IS_TREE:
        depth = tl.load(depths + i_r)
        is_wanted = is_wanted & (depth >= 0)
        num_prompt = tl.load(p_words + NUM_PROMPT)
        p_tokens = tokens + i_b * token_stride
        p_parents = parents + i_b * parent_stride
        node = first_node + (i_r - i_b * num_rows).to(tl.int32)
        p_counts = counts + i_b * vocab
        context = (p_counts, p_tokens, p_parents, p_values, num_prompt, node, length + depth)
        row = (row[0], row[1], row[2], has_penalty(p_values), context)  # type: ignore[assignment]
    if is_wanted:
        p_list = listed + i_r * BC
        b_best = tl.full([BV], -float("inf"), tl.float32)
        for start in range(0, vocab, BV):
            b_best = tl.maximum(b_best, scores_at(start + tl.arange(0, BV), row))
        best = tl.max(b_best, 0)
        top = order_of(best).to(tl.int64)
        cut = tl.full([], NO_NUMBER, tl.int64)
        top_k = tl.load(p_words + TOP_K)
        if (top_k > 0) & (top_k < vocab):
            # of maxima of parts, the k-th largest is not above the row's
            if top_k <= BV:
                cut = _kth_of_block(b_best, top_k, top)
            needed = top_k.to(tl.float64)
            cut = _search(row, p_list, best, top, cut, needed, False, BV, BC)
        min_p = tl.load(p_values + MIN_P)
        if min_p > 0.0:
            cut = tl.maximum(cut, _cut_of_min_p(best, top, min_p))
        top_p = tl.load(p_values + TOP_P)
        if top_p < 1.0:
            total = _mass_of(row, best, cut, BV)
            # all tokens of less than this weight are, together, half of what top_p drops
            least = (1.0 - top_p) * total / vocab * 0.5
            low = order_of(best + tl.log(least) - 1e-3).to(tl.int64)
            low = tl.minimum(tl.maximum(cut, low), top)
            # a share of 0 keeps the best
            needed = tl.maximum(top_p.to(tl.float64) * total, 1e-30)
            cut = _search(row, p_list, best, top, low, needed, True, BV, BC)
        mass = tl.full([], 0.0, tl.float32)
        if is_weighed:
            mass = _mass_of(row, best, cut, BV)
        tl.store(stats + i_r * 3, best)
        tl.store(stats + i_r * 3 + 1, _number(cut))
        tl.store(stats + i_r * 3 + 2, mass)


def config(vocab: int) -> dict[str, int]:
    return {"BV": min(BLOCK, max(512, triton.next_power_of_2(vocab))), "BC": LISTED}


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
    """What filters leave of rows of logits, in one launch.

    Args:
        logits: [B * F, V].
        values: [B, 6] float32, see `specc.sampling_rows.Value`.
        words: [B, 4] int64, see `specc.sampling_rows.Word`.
        cache_len: [B] int32; rows of negative ones are left out.
        filtered: rules whose rows are looked at where they have filters.
        weighed: rules whose rows are looked at, and summed up.
        tree: depths [B, F] int32, counts [B, V] int32 (see `tree_context`), tokens [B, N] int64
            and parents [B, N] int32, where logits are those of F of a tree's nodes: they are
            penalized, and nodes of depth -1 are left out. None: of a draft.
        first_node: of the F nodes.
    Returns:
        [B * F, 3] float32 best s, the cut (tokens with s of at least the cut are kept), and the
        sum of exp(s - best) over tokens kept, 0 where not weighed. Nothing is written to rows
        that are not looked at, greedy ones among them.
    """
    num_rows, vocab = logits.shape
    batch = len(cache_len)
    sizes = config(vocab)
    stats = torch.empty(num_rows, NUM_STATS, dtype=torch.float32, device=logits.device)
    listed = torch.empty(num_rows, sizes["BC"], dtype=torch.float32, device=logits.device)
    depths, counts, tokens, parents = tree or (None, None, None, None)
    row_filters_kernel[(num_rows,)](
        logits,
        values,
        words,
        cache_len,
        stats,
        listed,
        depths,
        counts,
        tokens,
        parents,
        logits.stride(0),
        values.stride(0),
        words.stride(0),
        cache_len.stride(0),
        0 if tokens is None else tokens.stride(0),
        0 if parents is None else parents.stride(0),
        vocab,
        num_rows // batch,
        first_node,
        FILTERED=_bits(filtered),
        WEIGHED=_bits(weighed),
        IS_TREE=tree is not None,
        BV=sizes["BV"],
        BC=sizes["BC"],
        num_warps=WARPS,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,
    )
    return stats


def _bits(rules: Collection[Rule]) -> int:
    return sum(1 << rule for rule in rules)


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability."""
    walked, tried = (Rule.COUPLED, Rule.DELTA), (Rule.MSS, Rule.SWOR)
    kinds: dict[str, tuple[Collection[Rule], Collection[Rule]]] = {
        "nodes": (walked, tried),
        "roots": (tuple(Rule), ()),
        "drawn": ((), tried),
        "draft": ((Rule.COUPLED, *tried), ()),
    }
    for dtype in DTYPES:
        for kind, (filtered, weighed) in kinds.items():
            is_tree = kind in ("nodes", "roots")
            signature = {
                "logits": f"*{TYPE_NAMES[dtype]}",
                **dict.fromkeys(("values", "stats", "listed"), "*fp32"),
                **{"words": "*i64", "cache_len": "*i32"},
                **dict.fromkeys(("row_stride", "value_stride", "word_stride"), "i32"),
                **dict.fromkeys(("len_stride", "token_stride", "parent_stride"), "i32"),
                **dict.fromkeys(("vocab", "num_rows", "first_node"), "i32"),
            }
            tree = {"depths": "*i32", "counts": "*i32", "tokens": "*i64", "parents": "*i32"}
            constexprs: dict[str, object] = {
                "FILTERED": _bits(filtered),
                "WEIGHED": _bits(weighed),
                "IS_TREE": is_tree,
                **config(131072),
            }
            item = Bounded(
                name=f"{kind}-{TYPE_NAMES[dtype]}",
                kernel=row_filters_kernel,
                signature=signature | (tree if is_tree else {}),
                constexprs=constexprs | ({} if is_tree else dict.fromkeys(tree)),
                num_warps=WARPS,
                num_stages=3,
                max_registers=MAX_REGISTERS,
                divisible=(
                    *("logits", "values", "words", "cache_len", "stats", "listed"),
                    *("row_stride", "vocab", *(tree if is_tree else ())),
                ),
            )
            yield from with_any_vocab(item)
