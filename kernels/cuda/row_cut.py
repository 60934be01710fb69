"""The kernel of `row_filters`, and its last launch: which token of those that may be is the cut."""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.arrivals import is_last
from specc.kernels.cuda.row_noise import order_of
from specc.kernels.cuda.row_options import MIN_P, TOP_P, has_filter
from specc.kernels.cuda.row_parts import (
    after_first,
    at_pivot,
    measure_pivots,
    narrow,
    read_bounds,
    read_round,
    store_facts,
    top_k_of,
)
from specc.kernels.cuda.row_scan import (
    FEW_PIVOTS,
    PIVOTS,
    PLAIN_INTEGERS,
    even_pivot_of,
    measure_row,
    needed_mass,
    number_of,
    pivot_of,
    row_of,
    tile_of,
)
from specc.kernels.cuda.tree_context import scores_at


@triton.jit
def _list_part(
    row,
    p_list,
    place,
    low,
    high,
    first,
    num_blocks,
    BR: tl.constexpr,
    W: tl.constexpr,
    BC: tl.constexpr,
):
    """Store a part's tokens from `low` up to below `high`, from a place on, in the row's order."""
    for i in range(num_blocks):
        b_score = scores_at(tile_of(first + i * BR * W, BR, W), row)
        m_in = (b_score >= number_of(low)) & (b_score < number_of(high))
        b_found = tl.sum(m_in.to(tl.int32), 1)  # [BR]
        found = tl.sum(b_found, 0)
        if found > 0:
            b_before = place + tl.cumsum(b_found, 0) - b_found
            o_place = b_before[:, None] + tl.cumsum(m_in.to(tl.int32), 1) - 1
            tl.store(p_list + o_place, b_score, mask=m_in & (o_place < BC))
        place += found


@triton.jit
def _search_list(b_score, b_weight, above, low, high, needed):
    """The highest order from `low` on at which `above` and the weights no less reach `needed`."""
    while high - low > 1:
        middle = (low + high) >> 1
        b_kept = tl.where(b_score >= number_of(middle), b_weight, 0.0)
        is_low = (above + tl.sum(b_kept, 0)).to(tl.float64) >= needed
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
    return low


@triton.jit
def _search_row(
    row,
    best,
    cut,
    low,
    high,
    top_k,
    top_p,
    total,
    num_blocks,
    BR: tl.constexpr,
    W: tl.constexpr,
):
    """The cut, by passes over the whole row, for top_k, then for top_p; and the mass that it keeps.

    A pass leaves a seventh of the orders, so twelve are enough for each.
    """
    o_j = tl.arange(0, FEW_PIVOTS)
    mass = total
    end = high
    # 0: top_k is searched for, 1: what it keeps is weighed, 2: top_p, 3: what that keeps, 4: done
    phase = tl.where(top_k > 0, 0, 2)
    while phase < 4:
        b_pivot = even_pivot_of(o_j, low, end)
        b_sum = measure_row(row, best, low, end, phase > 0, num_blocks, BR, W)
        is_search = phase % 2 == 0
        mass = tl.where(is_search, mass, at_pivot(b_pivot, b_sum, low))
        needed = tl.where(phase == 0, top_k.to(tl.float64), needed_mass(top_p, mass))
        m = b_sum.to(tl.float64) >= needed
        low = tl.where(is_search, tl.max(tl.where(m, b_pivot, low), 0), low)
        end = tl.where(is_search, tl.min(tl.where(m, end, b_pivot), 0), high)
        is_over = (is_search == 0) | (end - low <= 1)
        phase += tl.where(is_over, tl.where((phase == 1) & (top_p >= 1.0), 3, 1), 0)
    return tl.maximum(cut, low), mass


@triton.jit
def find_cut(
    row, p_values, p_words, bounds, numbers, masses, listed, arrived, stats,
    i_r, i_p, vocab, num_parts, num_blocks,
    BR: tl.constexpr, W: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Best, cut and mass of a row, by the last of its programs to have listed its part."""
    p_numbers = numbers + i_r * 2 * num_parts * PIVOTS
    p_masses = masses + i_r * 2 * num_parts * PIVOTS
    p_list = listed + i_r * BC
    best, mass, low, high = read_bounds(bounds + i_r * 4)
    cut = order_of(tl.load(bounds + i_r * 4 + 3)).to(tl.int64)
    is_mine = i_p == 0
    if has_filter(p_values, p_words, vocab):
        top_p = tl.load(p_values + TOP_P)
        top_k, mass = after_first(
            p_numbers, p_masses, num_parts, top_k_of(p_words, vocab),
            top_p, tl.load(p_values + MIN_P), mass, BP,
        )  # fmt: skip
        if (top_k > 0) | (top_p < 1.0):
            from_ = low
            to = high
            low, high, inside = narrow(
                p_numbers, p_masses, num_parts, from_, to, top_k, top_p, mass, BP
            )
            if inside > BC:
                from_ = low
                to = high
                p_numbers += num_parts * PIVOTS
                p_masses += num_parts * PIVOTS
                low, high, inside = narrow(
                    p_numbers, p_masses, num_parts, from_, to, top_k, top_p, mass, BP
                )
            b_pivot = pivot_of(tl.arange(0, PIVOTS), from_, to)
            b_part, b_number, b_mass = read_round(p_numbers, p_masses, num_parts, BP)
            if inside <= BC:
                # numbers of parts say where each part's tokens begin
                b_first = tl.max(tl.where((b_pivot == low)[None, :], b_part, 0), 1)
                b_last = tl.max(tl.where((b_pivot == high)[None, :], b_part, 0), 1)
                m_before = tl.arange(0, BP) < i_p
                place = tl.sum(tl.where(m_before, b_first - b_last, 0), 0)
                first = i_p * num_blocks * BR * W
                _list_part(row, p_list, place, low, high, first, num_blocks, BR, W, BC)
                is_mine = is_last(arrived + i_r, num_parts)
            if is_mine:
                if inside <= BC:
                    o_c = tl.arange(0, BC)
                    b_score = tl.load(p_list + o_c, mask=o_c < inside, other=float("nan"))
                    b_weight = tl.exp(b_score - best)
                    above = at_pivot(b_pivot, b_mass, high)
                    if top_k > 0:
                        number = at_pivot(b_pivot, b_number, high).to(tl.float32)
                        b_one = tl.full([BC], 1.0, tl.float32)
                        low = _search_list(b_score, b_one, number, low, high, top_k.to(tl.float64))
                        b_kept = tl.where(b_score >= number_of(low), b_weight, 0.0)
                        mass = above + tl.sum(b_kept, 0)
                    if top_p < 1.0:
                        needed = needed_mass(top_p, mass)
                        low = _search_list(b_score, b_weight, above, low, high, needed)
                    cut = tl.maximum(cut, low)
                    b_kept = tl.where(b_score >= number_of(cut), b_weight, 0.0)
                    mass = above + tl.sum(b_kept, 0)
                else:
                    cut, mass = _search_row(
                        row, best, cut, low, high, top_k, top_p, mass,
                        num_parts * num_blocks, BR, W,
                    )  # fmt: skip
    if is_mine:
        p_stats = stats + i_r * 3
        tl.store(p_stats, best)
        tl.store(p_stats + 1, number_of(cut))
        tl.store(p_stats + 2, mass)


@triton.jit(do_not_specialize=[*PLAIN_INTEGERS, "i_round"])
def row_filters_kernel(
    logits,
    values,
    words,
    cache_len,
    depths,
    counts,
    tokens,
    parents,
    facts,
    maxima,
    bounds,
    numbers,
    masses,
    listed,
    arrived,
    stats,
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
    filtered,
    weighed,
    i_round,
    PHASE: tl.constexpr,
    IS_TREE: tl.constexpr,
    BR: tl.constexpr,
    W: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    i_r = (tl.program_id(0) // num_parts).to(tl.int64)
    i_p = tl.program_id(0) % num_parts
    is_wanted, row, p_values, p_words = row_of(
        i_r, num_rows, first_node, vocab, filtered, weighed,
        (logits, values, words, cache_len),
        (row_stride, value_stride, word_stride, len_stride, token_stride, parent_stride),
        (depths, counts, tokens, parents), IS_TREE,
    )  # fmt: skip
    if is_wanted:
        if PHASE == "parts":
            store_facts(
                row, p_words, facts, maxima, arrived, i_r, i_p, vocab, num_parts, num_blocks,
                BR, W, BM,
            )  # fmt: skip
        elif PHASE == "pivots":
            measure_pivots(
                row, p_values, p_words, facts, maxima, bounds, numbers, masses,
                i_r, i_p, vocab, num_parts, num_blocks, i_round, BR, W, BM, BP, BC,
            )  # fmt: skip
        else:
            find_cut(
                row, p_values, p_words, bounds, numbers, masses, listed, arrived, stats,
                i_r, i_p, vocab, num_parts, num_blocks, BR, W, BP, BC,
            )  # fmt: skip
