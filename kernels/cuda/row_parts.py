"""What `row_filters` reads rows for in parts: their facts, and how many are above pivots."""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.row_noise import order_of
from specc.kernels.cuda.row_options import MIN_P, TOP_K, TOP_P, has_filter
from specc.kernels.cuda.row_scan import (
    LEAST_NUMBER,
    NO_NUMBER,
    PIVOTS,
    cut_of_min_p,
    kth_of_block,
    measure,
    narrowed,
    number_of,
    pivot_of,
    tile_of,
)
from specc.kernels.cuda.tree_context import scores_at

# best, least and mass of a part
NUM_FACTS = 3
# best and mass of a row, its lowest pivot, and the cut of min_p
NUM_BOUNDS = 4


@triton.jit
def top_k_of(p_words, vocab):
    """0 where nothing is cut."""
    top_k = tl.load(p_words + TOP_K)
    return tl.where(top_k < vocab, tl.maximum(top_k, 0), 0)


@triton.jit
def store_facts(
    row, p_words, facts, maxima, arrived, i_r, i_p, vocab, num_parts, num_blocks,
    BR: tl.constexpr, W: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Best, least and mass of a part, and where a row has a top_k, maxima of its tokens."""
    b_best = tl.full([BR], -float("inf"), tl.float32)
    b_least = tl.full([BR], float("inf"), tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    for i in range(num_blocks):
        b_score = scores_at(tile_of((i_p * num_blocks + i) * BR * W, BR, W), row)
        b_next = tl.maximum(b_best, tl.max(b_score, 1))
        # -inf - -inf is NaN
        b_base = tl.where(b_next == -float("inf"), 0.0, b_next)
        b_sum *= tl.exp(b_best - b_base)
        b_sum += tl.sum(tl.exp(b_score - b_base[:, None]), 1)
        b_finite = tl.where(b_score > -float("inf"), b_score, float("inf"))
        b_least = tl.minimum(b_least, tl.min(b_finite, 1))
        b_best = b_next
    best = tl.max(b_best, 0)
    base = tl.where(best == -float("inf"), 0.0, best)
    p_facts = facts + (i_r * num_parts + i_p) * 3
    tl.store(p_facts, best)
    tl.store(p_facts + 1, tl.min(b_least, 0))
    tl.store(p_facts + 2, tl.sum(b_sum * tl.exp(b_best - base), 0))
    if top_k_of(p_words, vocab) > 0:
        b_maxima = tl.max(tl.reshape(b_best, [BM, BR // BM]), 1)
        p_maxima = maxima + (i_r * num_parts + i_p) * BM
        tl.store(p_maxima + tl.arange(0, BM), b_maxima)
    # the programs of a later launch count themselves with this
    if i_p == 0:
        tl.store(arrived + i_r, 0)


@triton.jit
def _bounds_of(
    p_facts, p_maxima, num_parts, vocab, p_values, p_words, BP: tl.constexpr, BM: tl.constexpr
):
    """Best and mass of a row, orders of its lowest pivot and of the cut of min_p."""
    o_p = tl.arange(0, BP)
    m_p = o_p < num_parts
    b_best = tl.load(p_facts + o_p * 3, mask=m_p, other=-float("inf"))
    b_least = tl.load(p_facts + o_p * 3 + 1, mask=m_p, other=float("inf"))
    b_sum = tl.load(p_facts + o_p * 3 + 2, mask=m_p, other=0.0)
    best = tl.max(b_best, 0)
    total = tl.sum(b_sum * tl.exp(b_best - best), 0)
    top = order_of(best).to(tl.int64)
    base = tl.full([], NO_NUMBER, tl.int64)
    min_p = tl.load(p_values + MIN_P)
    if min_p > 0.0:
        base = cut_of_min_p(best, top, min_p)
    low = tl.maximum(order_of(tl.min(b_least, 0)).to(tl.int64), base)
    top_k = top_k_of(p_words, vocab)
    top_p = tl.load(p_values + TOP_P)
    if (top_k > 0) & (top_k <= num_parts * BM):
        # of maxima of parts, the k-th largest is not above the row's
        o_m = tl.arange(0, BP * BM)
        b_maxima = tl.load(p_maxima + o_m, mask=o_m < num_parts * BM, other=-float("inf"))
        low = tl.maximum(low, kth_of_block(b_maxima, top_k, top))
    if (top_k == 0) & (min_p <= 0.0) & (top_p < 1.0):
        # all tokens of less than this weight are, together, half of what top_p drops
        least = (1.0 - top_p) * total / vocab * 0.5
        low = tl.maximum(low, order_of(best + tl.log(least) - 1e-3).to(tl.int64))
    return best, total, tl.minimum(tl.maximum(low, LEAST_NUMBER), top), base


@triton.jit
def read_round(p_numbers, p_masses, num_parts, BP: tl.constexpr):
    """Numbers [BP, PIVOTS] of a row's parts; numbers and masses [PIVOTS] of the row."""
    o_p = tl.arange(0, BP)[:, None]
    o = o_p * PIVOTS + tl.arange(0, PIVOTS)[None, :]
    b_part = tl.load(p_numbers + o, mask=o < num_parts * PIVOTS, other=0)
    b_mass = tl.load(p_masses + o, mask=o < num_parts * PIVOTS, other=0.0)
    return b_part, tl.sum(b_part, 0), tl.sum(b_mass, 0)


@triton.jit
def at_pivot(b_pivot, b_value, order):
    """What was measured at an order that is a pivot; where several are it, all say the same."""
    return tl.max(tl.where(b_pivot == order, b_value, 0), 0)


@triton.jit
def narrow(p_numbers, p_masses, num_parts, low, high, top_k, top_p, total, BP: tl.constexpr):
    """Bounds after a round of pivots from `low` to `high`, and how many tokens are between them."""
    b_pivot = pivot_of(tl.arange(0, PIVOTS), low, high)
    _, b_number, b_mass = read_round(p_numbers, p_masses, num_parts, BP)
    low, high = narrowed(low, high, b_pivot, b_number, b_mass, top_k, top_p, total)
    return low, high, at_pivot(b_pivot, b_number, low) - at_pivot(b_pivot, b_number, high)


@triton.jit
def read_bounds(p_bounds):
    """Best and mass of a row, the orders of its lowest pivot and of what is above its best."""
    best = tl.load(p_bounds)
    low = order_of(tl.load(p_bounds + 2)).to(tl.int64)
    return best, tl.load(p_bounds + 1), low, order_of(best).to(tl.int64) + 1


@triton.jit
def after_first(p_numbers, p_masses, num_parts, top_k, top_p, min_p, total, BP: tl.constexpr):
    """What the first round says of the options.

    Returns:
        top_k, 0 where a row has fewer tokens than that which min_p leaves and that are no -inf:
        it cuts nothing then. The mass that top_p is a share of where there is no top_k.
    """
    _, b_number, b_mass = read_round(p_numbers, p_masses, num_parts, BP)
    # without either, the lowest pivot is above tokens that top_p cannot keep
    is_cut = (top_k > 0) | (min_p > 0.0)
    top_k = tl.where(tl.max(b_number, 0) >= top_k, top_k, 0)
    return top_k, tl.where(is_cut, tl.max(b_mass, 0), total)


@triton.jit
def measure_pivots(
    row, p_values, p_words, facts, maxima, bounds, numbers, masses,
    i_r, i_p, vocab, num_parts, num_blocks, i_round,
    BR: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Numbers and masses of a part above pivots, of the first round or the second."""
    p_bounds = bounds + i_r * 4
    # rounds of a row lie one after the other
    p_numbers = numbers + i_r * 2 * num_parts * PIVOTS
    p_masses = masses + i_r * 2 * num_parts * PIVOTS
    is_open = has_filter(p_values, p_words, vocab)
    if i_round == 0:
        best, total, low, base = _bounds_of(
            facts + i_r * num_parts * 3, maxima + i_r * num_parts * BM,
            num_parts, vocab, p_values, p_words, BP, BM,
        )  # fmt: skip
        high = order_of(best).to(tl.int64) + 1
        if i_p == 0:
            tl.store(p_bounds, best)
            tl.store(p_bounds + 1, total)
            tl.store(p_bounds + 2, number_of(low))
            tl.store(p_bounds + 3, number_of(base))
    else:
        best, total, low, high = read_bounds(p_bounds)
        if is_open:
            top_p = tl.load(p_values + TOP_P)
            top_k, total = after_first(
                p_numbers, p_masses, num_parts, top_k_of(p_words, vocab),
                top_p, tl.load(p_values + MIN_P), total, BP,
            )  # fmt: skip
            low, high, inside = narrow(
                p_numbers, p_masses, num_parts, low, high, top_k, top_p, total, BP
            )
            # a list holds the rest, or nothing is left to be found
            is_open = ((top_k > 0) | (top_p < 1.0)) & (inside > BC)
    if is_open:
        first = i_p * num_blocks * BR * W
        b_number, b_mass = measure(row, best, low, high, first, num_blocks, BR, W)
        o = (i_round * num_parts + i_p) * PIVOTS + tl.arange(0, PIVOTS)
        tl.store(p_numbers + o, b_number)
        tl.store(p_masses + o, b_mass)
