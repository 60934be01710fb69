"""Passes over the vocabulary of `accept_walk`: P and q of a node whose proposals are tried one by
one, what they come to in a part of the vocabulary, and in all of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.row_noise import first_of_four, raise_best
from specc.kernels.cuda.sampling import LANES
from specc.kernels.cuda.tree_context import scores_at
from specc.kernels.cuda.tree_expand import NO_KEY

# what a row waits for: nothing more, no pass, what a rejection leaves of P, the sum of what the
# next proposal's q has left, a draw
DONE, WALK, REST, LEFT, DRAW = (tl.constexpr(i) for i in range(5))


@triton.jit
def target_probs(o_t, target, rest_sum):
    """Target probabilities, or what rejections have left of them."""
    row, p_rest, p_stats, vocab = target
    m_t = (o_t >= 0) & (o_t < vocab)
    if rest_sum > 0.0:
        b_prob = tl.load(p_rest + o_t, mask=m_t, other=0.0) / rest_sum
    else:
        b_score = scores_at(o_t, row)
        m_kept = m_t & (b_score >= tl.load(p_stats + 1))
        b_weight = tl.exp(b_score - tl.load(p_stats))
        b_prob = tl.where(m_kept, b_weight / tl.load(p_stats + 2), 0.0)
    return b_prob


@triton.jit
def draft_probs(o_t, token, draft, row, num_tried, HAS_DRAFTS: tl.constexpr):
    """Draft probabilities, not normalized again; 1 at the token where no row was drawn from."""
    b_prob = tl.where(o_t == token, 1.0, 0.0)
    if HAS_DRAFTS:
        p_rows, p_stats, p_tried, row_stride, vocab, factor = draft
        if row >= 0:
            m_t = (o_t >= 0) & (o_t < vocab)
            p_row = p_rows + row.to(tl.int64) * row_stride
            b_score = scores_at(o_t, (p_row, vocab, factor))
            p_stat = p_stats + row * 3
            m_kept = m_t & (b_score >= tl.load(p_stat + 1))
            b_weight = tl.exp(b_score - tl.load(p_stat))
            b_prob = tl.where(m_kept, b_weight / tl.load(p_stat + 2), 0.0)
            for i in range(num_tried):
                tried = tl.load(p_tried + i)
                m_tried = (tried >> 32 == row) & ((tried & 0xFFFFFFFF) == o_t)
                b_prob = tl.where(m_tried, 0.0, b_prob)
    return b_prob


@triton.jit
def sample_part(target, rest_sum, first, num_blocks, seed, offset, BQ: tl.constexpr):
    """Key of argmax(log P + token noise) among some blocks of 4 * BQ tokens."""
    key = tl.full([], NO_KEY, tl.int64)
    for i in range(num_blocks):
        o_q = first // 4 + i * BQ + tl.arange(0, BQ)
        o_t = first_of_four(o_q)
        b_0 = tl.log(target_probs(o_t, target, rest_sum))
        b_1 = tl.log(target_probs(o_t + LANES, target, rest_sum))
        b_2 = tl.log(target_probs(o_t + 2 * LANES, target, rest_sum))
        b_3 = tl.log(target_probs(o_t + 3 * LANES, target, rest_sum))
        key = raise_best(key, b_0, b_1, b_2, b_3, o_q, seed, offset)
    return key


@triton.jit
def pass_of_part(
    work, first, num_blocks, target, draft, proposal, left, following, rest_sum, seed, offset,
    HAS_DRAFTS: tl.constexpr, BV: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Sums of what is left of P and of the next proposal's q, and the key of a draw, of a part."""
    _, token, row, num_known = proposal
    _, next_token, next_row, next_known = following
    _, p_rest, _, vocab = target
    b_rest_sum = tl.zeros([BV], tl.float32)
    b_left_sum = tl.zeros([BV], tl.float32)
    key = tl.full([], NO_KEY, tl.int64)
    if work == DRAW:
        key = sample_part(target, rest_sum, first, num_blocks, seed, offset, BQ)
    else:
        for i in range(num_blocks * (4 * BQ // BV)):
            o_t = first + i * BV + tl.arange(0, BV)
            if work == REST:
                b_q = draft_probs(o_t, token, draft, row, num_known, HAS_DRAFTS)
                b_rest = target_probs(o_t, target, rest_sum) - b_q / left
                b_rest = tl.maximum(b_rest, 0.0)
                tl.store(p_rest + o_t, b_rest, mask=o_t < vocab)
                b_rest_sum += b_rest
            if HAS_DRAFTS:  # noqa: SIM102
                # of the proposal after a rejected one at once: one pass less
                if next_known > 0:
                    b_left_sum += draft_probs(
                        o_t, next_token, draft, next_row, next_known, HAS_DRAFTS
                    )
    return tl.sum(b_rest_sum, 0), tl.sum(b_left_sum, 0), key


@triton.jit
def whole_pass(p_part, p_key, num_parts, BP: tl.constexpr):
    """What the parts of a pass come to, in their order."""
    o_p = tl.arange(0, BP)
    m_p = o_p < num_parts
    b_rest = tl.load(p_part + o_p * 2, mask=m_p, other=0.0)
    b_left = tl.load(p_part + o_p * 2 + 1, mask=m_p, other=0.0)
    b_key = tl.load(p_key + o_p, mask=m_p, other=NO_KEY)
    return tl.sum(b_rest, 0), tl.sum(b_left, 0), tl.max(b_key, 0)
