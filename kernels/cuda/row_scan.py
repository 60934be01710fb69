"""Passes over a row of logits, or a part of one, for the search of a cut.

A thread takes sixteen bytes of logits at a time. A pass measures sixteen pivots at once: how many
tokens are no less, and their mass. What it adds up it adds in one order, so a row gives the same
numbers every time; and a sum over fewer tokens is never larger, however it rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.row_noise import order_of, value_of
from specc.kernels.cuda.row_options import NUM_PROMPT, RULE, factor_of, has_filter, is_sampled
from specc.kernels.cuda.sampling import log_split, split_float
from specc.kernels.cuda.tree_context import has_penalty, scores_at

# of a pass of parts, and of one of a whole row, which has fewer registers to spare
NUM_PIVOTS = 16
PIVOTS = tl.constexpr(NUM_PIVOTS)
FEW_PIVOTS = tl.constexpr(8)
# integers that are 1 in many calls, which would be other code each: chains have one node a level
ROW_INTEGERS = (
    "value_stride", "word_stride", "len_stride", "token_stride", "parent_stride",
    "num_rows", "first_node", "num_parts", "num_blocks",
)  # fmt: skip
PLAIN_INTEGERS = (*ROW_INTEGERS, "filtered", "weighed")
# orders of -inf and of the least number
NO_NUMBER = tl.constexpr(-0x7F800001)
LEAST_NUMBER = tl.constexpr(-0x7F800000)


@triton.jit
def number_of(order):
    return value_of(order.to(tl.int32))


@triton.jit
def row_of(
    i_r,
    num_rows,
    first_node,
    vocab,
    filtered,
    weighed,
    pointers,
    strides,
    tree,
    IS_TREE: tl.constexpr,
):
    """Whether a row is looked at, the row, and its sampling values and words."""
    logits, values, words, cache_len = pointers
    row_stride, value_stride, word_stride, len_stride, token_stride, parent_stride = strides
    i_b = i_r // num_rows
    p_values = values + i_b * value_stride
    p_words = words + i_b * word_stride
    length = tl.load(cache_len + i_b * len_stride)
    rule = tl.load(p_words + RULE)
    is_wanted = ((filtered >> rule) & 1) != 0
    is_wanted = is_wanted & has_filter(p_values, p_words, vocab)
    is_wanted = is_wanted | (((weighed >> rule) & 1) != 0)
    is_wanted = is_wanted & (length >= 0) & is_sampled(p_values)
    row = (logits + i_r * row_stride, vocab, factor_of(p_values))
    if IS_TREE:
        depths, counts, tokens, parents = tree
        depth = tl.load(depths + i_r)
        is_wanted = is_wanted & (depth >= 0)
        node = first_node + (i_r - i_b * num_rows).to(tl.int32)
        num_prompt = tl.load(p_words + NUM_PROMPT)
        p_tokens = tokens + i_b * token_stride
        p_parents = parents + i_b * parent_stride
        p_counts = counts + i_b * vocab
        context = (p_counts, p_tokens, p_parents, p_values, num_prompt, node, length + depth)
        row = (row[0], row[1], row[2], has_penalty(p_values), context)  # type: ignore[assignment]
    return is_wanted, row, p_values, p_words


@triton.jit
def tile_of(first, BR: tl.constexpr, W: tl.constexpr):
    """Tokens [BR, W] of a block: W neighbors are a thread's."""
    return first + tl.arange(0, BR)[:, None] * W + tl.arange(0, W)[None, :]


@triton.jit
def pivot_of(j, low, high):
    """Order of pivot j of PIVOTS, evenly by value from order `low` to order `high`, ends included.

    Tokens are spread by value as logits are, so that a few rounds leave few of them.
    """
    share = j * (1.0 / (PIVOTS - 1))
    pivot = order_of(number_of(low) * (1.0 - share) + number_of(high) * share).to(tl.int64)
    pivot = tl.minimum(tl.maximum(pivot, low), high)
    return tl.where(j == 0, low, tl.where(j == PIVOTS - 1, high, pivot))


@triton.jit
def even_pivot_of(j, low, high):
    """The same of FEW_PIVOTS, evenly by order: there is always one between ends that are apart."""
    return low + (high - low) * j // (FEW_PIVOTS - 1)


# A pass keeps one sum a thread for each pivot. To add those up over threads at once, the sums are
# joined in pairs, pairs of pairs and so on: what is joined first becomes the highest bit of a
# column's number, so pivot j is kept at the place with the bits of j in reverse.


@triton.jit
def _join_eight(b):
    b_low = tl.join(tl.join(b[0], b[1]), tl.join(b[2], b[3]))
    return tl.join(b_low, tl.join(tl.join(b[4], b[5]), tl.join(b[6], b[7])))


@triton.jit
def _columns_of(b):
    """Sums [PIVOTS] of sixteen tensors [BR]."""
    b_all = tl.join(_join_eight(b[:8]), _join_eight(b[8:]))
    return tl.reshape(tl.sum(b_all, 0), [PIVOTS])


@triton.jit
def measure(row, best, low, high, first, num_blocks, BR: tl.constexpr, W: tl.constexpr):
    """Tokens of some blocks of a row that are no less than each pivot: numbers and masses [PIVOTS].

    Pivots lie evenly by value from `low` to `high`.
    """
    pivots = ()
    for at in tl.static_range(PIVOTS):
        j = ((at & 1) << 3) | ((at & 2) << 1) | ((at & 4) >> 1) | ((at & 8) >> 3)
        pivots = pivots + (number_of(pivot_of(j, low, high)),)  # type: ignore[assignment]  # noqa: RUF005
    b_numbers = ()
    b_masses = ()
    for _ in tl.static_range(PIVOTS):
        b_numbers = b_numbers + (tl.zeros([BR], tl.int32),)  # type: ignore[assignment]  # noqa: RUF005
        b_masses = b_masses + (tl.zeros([BR], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for i in range(num_blocks):
        b_score = scores_at(tile_of(first + i * BR * W, BR, W), row)
        b_weight = tl.exp(b_score - best)
        b_more = ()
        b_heavier = ()
        for at in tl.static_range(PIVOTS):
            m = b_score >= pivots[at]
            b_more = b_more + (b_numbers[at] + tl.sum(m.to(tl.int32), 1),)  # type: ignore[assignment]  # noqa: RUF005
            b_mass = tl.sum(tl.where(m, b_weight, 0.0), 1)
            b_heavier = b_heavier + (b_masses[at] + b_mass,)  # type: ignore[assignment]  # noqa: RUF005
        b_numbers = b_more
        b_masses = b_heavier
    return _columns_of(b_numbers), _columns_of(b_masses)


@triton.jit
def measure_row(row, best, low, high, is_mass, num_blocks, BR: tl.constexpr, W: tl.constexpr):
    """Numbers of a whole row's tokens, or their masses, [FEW_PIVOTS] float32.

    Pivots lie evenly by order from `low` to `high`.
    """
    pivots = ()
    b_sums = ()
    for at in tl.static_range(FEW_PIVOTS):
        j = ((at & 1) << 2) | (at & 2) | ((at & 4) >> 2)
        pivots = pivots + (number_of(even_pivot_of(j, low, high)),)  # type: ignore[assignment]  # noqa: RUF005
        b_sums = b_sums + (tl.zeros([BR], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for i in range(num_blocks):
        b_score = scores_at(tile_of(i * BR * W, BR, W), row)
        b_weight = tl.where(is_mass, tl.exp(b_score - best), 1.0)
        b_more = ()
        for at in tl.static_range(FEW_PIVOTS):
            b_part = tl.sum(tl.where(b_score >= pivots[at], b_weight, 0.0), 1)
            b_more = b_more + (b_sums[at] + b_part,)  # type: ignore[assignment]  # noqa: RUF005
        b_sums = b_more
    return tl.reshape(tl.sum(_join_eight(b_sums), 0), [FEW_PIVOTS])


@triton.jit
def needed_mass(top_p, total):
    """A float64, so that a share of equal weights is not rounded to fewer of them.

    A share of 0 keeps the best.
    """
    return tl.maximum(top_p.to(tl.float64) * total, 1e-30)


@triton.jit
def narrowed(low, high, b_pivot, b_number, b_mass, top_k, top_p, total):
    """Bounds of all that decides a cut, after a pass: orders of its pivots, [PIVOTS] each.

    top_k is 0, and top_p 1, where they cut nothing. `low` is then no higher than the cut of top_k,
    or where there is none that of top_p, and `high` is above both. `total` is the mass that top_p
    is a share of, where there is no top_k to change it.
    """
    # a pivot that has enough tokens is below all that have not
    m_k = b_number >= top_k
    low_k = tl.max(tl.where(m_k, b_pivot, low), 0)
    high_k = tl.min(tl.where(m_k, high, b_pivot), 0)
    # the cut of top_k leaves at least the mass of its upper bound
    is_k = top_k > 0
    least = tl.where(is_k, tl.max(tl.where(m_k, 0.0, b_mass), 0), total)
    m_far = b_mass.to(tl.float64) >= needed_mass(top_p, total)
    m_near = b_mass.to(tl.float64) >= needed_mass(top_p, least)
    low_p = tl.max(tl.where(m_far, b_pivot, low), 0)
    high_p = tl.min(tl.where(m_near, high, b_pivot), 0)
    high_p = tl.where(top_p < 1.0, high_p, low)
    low = tl.where(is_k, low_k, low_p)
    return low, tl.maximum(tl.where(is_k, high_k, high_p), high_p)


@triton.jit
def kth_of_block(b_value, k, top):
    """Order of the k-th largest of at least k numbers."""
    low = tl.full([], NO_NUMBER, tl.int64)
    high = top + 1
    while high - low > 1:
        middle = (low + high) >> 1
        is_low = tl.sum((b_value >= number_of(middle)).to(tl.int32), 0) >= k
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
    return low


@triton.jit
def cut_of_min_p(best, top, min_p):
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
        is_kept = number_of(middle) - best >= least
        high = tl.where(is_kept, middle, high)
        low = tl.where(is_kept, low, middle)
    return high
