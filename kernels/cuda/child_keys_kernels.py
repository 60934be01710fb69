"""Kernels of the children of draft rows: best keys of parts of rows, then of all parts."""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.row_noise import (
    COLUMN_PURPOSES,
    DRAW_NOISE,
    TOKEN_NOISE,
    first_of_four,
    noise_bits,
    value_of_key,
)
from specc.kernels.cuda.row_options import (
    COUPLED,
    DELTA,
    MSS,
    RULE,
    SEED,
    factor_of,
    has_filter,
    is_sampled,
)
from specc.kernels.cuda.sampling import LANES, gumbel_of_bits
from specc.kernels.cuda.tree_context import scores_at
from specc.kernels.cuda.tree_expand import NO_KEY, largest_keys, order_key, token_of


@triton.jit
def _keys(b_value, o_t, vocab):
    return tl.where(o_t < vocab, order_key(b_value, o_t), NO_KEY)


@triton.jit
def _kept(b_score, cut):
    return tl.where(b_score >= cut, b_score, -float("inf"))


@triton.jit
def _sum_of_exps(b_value, best):
    """Of values relative to the best; NaN and infinity go on as the logarithm of a sum has it."""
    return tl.sum(tl.where(b_value == -float("inf"), 0.0, tl.exp(b_value - best)), 0)


@triton.jit(
    do_not_specialize=[
        "len_stride",
        "column_stride",
        "value_stride",
        "word_stride",
        "num_rows",
        "num_parts",
        "k",
        "depth",
    ]
)
def draft_parts_kernel(
    logits,
    cache_len,
    columns,
    values,
    words,
    stats,
    keys,
    sums,
    row_stride,
    len_stride,
    column_stride,
    value_stride,
    word_stride,
    vocab,
    num_rows,
    num_parts,
    k,
    depth,
    IS_SORTED: tl.constexpr,
    BK: tl.constexpr,
    BQ: tl.constexpr,
):
    i_r = (tl.program_id(0) // num_parts).to(tl.int64)
    i_p = tl.program_id(0) % num_parts
    i_b = i_r // num_rows
    length = tl.load(cache_len + i_b * len_stride)
    if length >= 0:
        p_values = values + i_b * value_stride
        p_words = words + i_b * word_stride
        rule = tl.load(p_words + RULE)
        is_noisy = is_sampled(p_values) & (rule != DELTA)
        factor = tl.where(is_noisy, factor_of(p_values), 1.0)
        row = (logits + i_r * row_stride, vocab, factor)
        o_q = i_p * BQ + tl.arange(0, BQ)
        o_t = first_of_four(o_q)
        b_0 = scores_at(o_t, row)
        b_1 = scores_at(o_t + LANES, row)
        b_2 = scores_at(o_t + 2 * LANES, row)
        b_3 = scores_at(o_t + 3 * LANES, row)
        if is_noisy & has_filter(p_values, p_words, vocab):
            cut = tl.load(stats + i_r * 3 + 1)
            b_0 = _kept(b_0, cut)
            b_1 = _kept(b_1, cut)
            b_2 = _kept(b_2, cut)
            b_3 = _kept(b_3, cut)
        seed = tl.load(p_words + SEED)
        offset = (length + depth).to(tl.int64) + 1
        column = tl.load(columns + (i_r - i_b * num_rows) * column_stride)
        draw = DRAW_NOISE + COLUMN_PURPOSES * column
        p_keys = keys + (i_r * num_parts + i_p) * k
        # what is scored: s of rows that draw, else what is ranked
        b_s0, b_s1, b_s2, b_s3 = b_0, b_1, b_2, b_3
        if is_noisy & (rule == MSS):
            for i in range(k):
                b_i, b_j, b_k, b_l = noise_bits(seed, offset, draw + COLUMN_PURPOSES * i, o_q)
                b_key = _keys(b_0 + gumbel_of_bits(b_i), o_t, vocab)
                b_more = _keys(b_1 + gumbel_of_bits(b_j), o_t + LANES, vocab)
                b_key = tl.maximum(b_key, b_more)
                b_more = _keys(b_2 + gumbel_of_bits(b_k), o_t + 2 * LANES, vocab)
                b_key = tl.maximum(b_key, b_more)
                b_more = _keys(b_3 + gumbel_of_bits(b_l), o_t + 3 * LANES, vocab)
                tl.store(p_keys + i, tl.max(tl.maximum(b_key, b_more), 0))
        else:
            if is_noisy:
                purpose = tl.where(rule == COUPLED, TOKEN_NOISE, draw)
                b_i, b_j, b_k, b_l = noise_bits(seed, offset, purpose, o_q)
                b_0 += gumbel_of_bits(b_i)
                b_1 += gumbel_of_bits(b_j)
                b_2 += gumbel_of_bits(b_k)
                b_3 += gumbel_of_bits(b_l)
                if rule == COUPLED:
                    b_s0, b_s1, b_s2, b_s3 = b_0, b_1, b_2, b_3
            b_near = tl.join(_keys(b_0, o_t, vocab), _keys(b_1, o_t + LANES, vocab))
            b_far = tl.join(_keys(b_2, o_t + 2 * LANES, vocab), _keys(b_3, o_t + 3 * LANES, vocab))
            b_key = tl.reshape(tl.join(b_near, b_far), [4 * BQ], can_reorder=True)
            b_best = largest_keys(b_key, k, BK, IS_SORTED)
            o_k = tl.arange(0, BK)
            tl.store(p_keys + o_k, b_best, mask=o_k < k)
        if sums is not None:
            # beyond the vocabulary lies -inf, before noise and after
            b_best = tl.maximum(tl.maximum(b_s0, b_s1), tl.maximum(b_s2, b_s3))
            best = tl.max(b_best, 0)
            total = _sum_of_exps(b_s0, best) + _sum_of_exps(b_s1, best)
            total += _sum_of_exps(b_s2, best) + _sum_of_exps(b_s3, best)
            p_sums = sums + (i_r * num_parts + i_p) * 2
            tl.store(p_sums, best)
            tl.store(p_sums + 1, total)


@triton.jit(
    do_not_specialize=["len_stride", "value_stride", "word_stride", "num_rows", "num_parts", "k"]
)
def draft_merge_kernel(
    logits,
    cache_len,
    values,
    words,
    stats,
    keys,
    sums,
    tokens,
    scores,
    row_stride,
    len_stride,
    value_stride,
    word_stride,
    vocab,
    num_rows,
    num_parts,
    k,
    IS_SORTED: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    BS: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    i_b = i_r // num_rows
    p_values = values + i_b * value_stride
    p_words = words + i_b * word_stride
    rule = tl.load(p_words + RULE)
    is_noisy = is_sampled(p_values) & (rule != DELTA)
    p_keys = keys + i_r * num_parts * k
    o_k = tl.arange(0, BK)
    o_s = tl.arange(0, BS)
    is_padding = tl.load(cache_len + i_b * len_stride) < 0
    b_best = tl.full([BK], 0x7FFFFFFF, tl.int64)
    if is_padding == 0:
        if is_noisy & (rule == MSS):
            m = (o_s < num_parts)[:, None] & (o_k < k)[None, :]
            b_draw = tl.load(p_keys + o_s[:, None] * k + o_k[None, :], mask=m, other=NO_KEY)
            b_best = tl.max(b_draw, 0)
        else:
            o_c = tl.arange(0, BC)
            b_key = tl.load(p_keys + o_c, mask=o_c < num_parts * k, other=NO_KEY)
            b_best = largest_keys(b_key, k, BK, IS_SORTED)
    b_token = token_of(b_best)
    tl.store(tokens + i_r * k + o_k, b_token, mask=o_k < k)
    if sums is not None:
        b_value = value_of_key(b_best)
        if is_noisy & (rule != COUPLED) & (is_padding == 0):
            row = (logits + i_r * row_stride, vocab, factor_of(p_values))
            b_value = scores_at(tl.where(o_k < k, b_token, -1), row)
            if has_filter(p_values, p_words, vocab):
                b_value = _kept(b_value, tl.load(stats + i_r * 3 + 1))
        p_sums = sums + (i_r * num_parts + o_s) * 2
        b_part = tl.load(p_sums, mask=o_s < num_parts, other=-float("inf"))
        b_sum = tl.load(p_sums + 1, mask=o_s < num_parts, other=0.0)
        best = tl.max(b_part, 0)
        b_sum = tl.where(b_part == -float("inf"), b_sum, b_sum * tl.exp(b_part - best))
        total = best + tl.log(tl.sum(b_sum, 0))
        b_score = tl.where(is_padding, 0.0, b_value - total)
        tl.store(scores + i_r * k + o_k, b_score, mask=o_k < k)
