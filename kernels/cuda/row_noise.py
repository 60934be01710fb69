"""Noise of a row of logits, for the kernels of typed trees, and numbers as integers in order.

The noise is that of `gumbel_reference` to the last bit, so kernels that use it are launched with
`enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.sampling import LANES, LARGEST_UNIFORM, gumbel_of_bits
from specc.kernels.cuda.tree_expand import order_key
from specc.kernels.reference import sampling as facts

TOKEN_NOISE = tl.constexpr(facts.TOKEN_NOISE)
DRAW_NOISE = tl.constexpr(facts.DRAW_NOISE)
UNIFORM = tl.constexpr(facts.UNIFORM)
COLUMN_PURPOSES = tl.constexpr(facts.COLUMN_PURPOSES)


@triton.jit
def order_of(b_value):
    """Integers that sort as the numbers do; 0 and -0 are one."""
    b_value = tl.where(b_value == 0.0, 0.0, b_value)
    b_bits = b_value.to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(b_order):
    b_bits = b_order ^ ((b_order >> 31) & 0x7FFFFFFF)
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def value_of_key(b_key):
    return value_of((b_key >> 32).to(tl.int32))


@triton.jit
def noise_bits(seed, offset, purpose, o_counter):
    """Random bits of four tokens a counter, for any purpose.

    Token t takes word t / LANES mod 4 of counter t / (4 LANES) · LANES + t mod LANES.
    """
    high = (offset >> 32).to(tl.uint32)
    purpose = purpose.to(tl.uint32)
    return tl.philox(seed, o_counter.to(tl.uint32), purpose, offset.to(tl.uint32), high)


@triton.jit
def uniform_of(seed, offset, column):
    """The number that decides whether the proposal of a column is accepted."""
    purpose = UNIFORM + COLUMN_PURPOSES * column
    bits, _, _, _ = noise_bits(seed, offset, purpose, tl.full([], 0, tl.int32))
    number = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.minimum(number, LARGEST_UNIFORM)


@triton.jit
def first_of_four(o_q):
    """First of the four tokens of a counter; the others follow LANES apart."""
    return o_q // LANES * (4 * LANES) + o_q % LANES


@triton.jit
def may_win(b_score, b_bits, top):
    """Whether score + noise may reach `top`, without a logarithm.

    Noise is -log(-log(1 - w)), which is at most -log(w). The margin is far above what roundings
    of either side can make.
    """
    b_w = b_bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    margin = 1e-3 + tl.abs(top) * 1e-6
    return b_w <= tl.exp(b_score - top + margin)


@triton.jit
def raise_best(best, b_first, b_second, b_third, b_fourth, o_q, seed, offset):
    """The larger of key `best` and those of score + token noise of four tokens a counter.

    Scores of -inf are passed over. Most blocks cannot hold the best of a row once some have been
    seen; they are spared the logarithms.
    """
    b_0, b_1, b_2, b_3 = noise_bits(seed, offset, tl.full([], TOKEN_NOISE, tl.int32), o_q)
    # NaN where there is no best yet, which nothing is below
    top = value_of_key(best)
    top = tl.where(top == top, top, -float("inf"))
    m_open = may_win(b_first, b_0, top) | may_win(b_second, b_1, top)
    m_open = m_open | may_win(b_third, b_2, top) | may_win(b_fourth, b_3, top)
    if tl.max(m_open.to(tl.int32), 0) > 0:
        o_t = first_of_four(o_q)
        b_key = order_key(b_first + gumbel_of_bits(b_0), o_t)
        b_key = tl.maximum(b_key, order_key(b_second + gumbel_of_bits(b_1), o_t + LANES))
        b_key = tl.maximum(b_key, order_key(b_third + gumbel_of_bits(b_2), o_t + 2 * LANES))
        b_key = tl.maximum(b_key, order_key(b_fourth + gumbel_of_bits(b_3), o_t + 3 * LANES))
        best = tl.maximum(best, tl.max(b_key, 0))
    return best
