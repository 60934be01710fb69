"""Which keys a row sees: its token, the ancestors of that, and what window and chunk leave."""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.attend_chunks import sight_ends


@triton.jit
def divide(o_r, group):
    """o_r // group, neither negative, with half of the instructions of an integer division.

    The quotient in float32 is off by one at most, as there are fewer than 2^22 tokens.
    """
    o_t = (o_r.to(tl.float32) * (1.0 / group.to(tl.float32))).to(tl.int32)
    o_t = tl.where(o_t * group > o_r, o_t - 1, o_t)
    return tl.where((o_t + 1) * group <= o_r, o_t + 1, o_t)


@triton.jit
def node_bits(p_words, m_live, i_node, num_words):
    """64 bits of each row's ancestor words, from node `i_node` on, which may be negative."""
    i_word = i_node >> 6
    i_bit = (i_node & 63).to(tl.uint64)
    m_low = m_live & (i_word >= 0) & (i_word < num_words)
    m_high = m_live & (i_word >= -1) & (i_word + 1 < num_words)
    b_low = tl.load(p_words + i_word, mask=m_low, other=0).to(tl.uint64, bitcast=True)
    b_high = tl.load(p_words + i_word + 1, mask=m_high, other=0).to(tl.uint64, bitcast=True)
    # a shift by 64 is undefined: by 1, then by 63 - bit
    b_bits = (b_low >> i_bit) | ((b_high << 1) << (63 - i_bit))
    return b_bits.to(tl.uint32), (b_bits >> 32).to(tl.uint32)


@triton.jit
def either(a, b):
    """Bits of one or the other."""
    return a | b


@triton.jit
def has_bit(b_bit, b_low, b_high):
    """Whether words of 64 bits have a bit; halves of 32 are registers, for a tile of them."""
    b_half = tl.where(b_bit < 32, b_low, b_high)
    return ((b_half >> (b_bit & 31).to(tl.uint32)) & 1) != 0


@triton.jit
def is_visible(
    b_key, b_bit, b_position, b_low, b_high, window, sink, length, IS_TREE: tl.constexpr,
    CHUNK: tl.constexpr = 0,
):  # fmt: skip
    """Which rows see which keys; one of them runs along each axis.

    With a CHUNK of positions, bits of nodes are those of rows' own chunks already.
    """
    if CHUNK:
        m_near = b_position < sight_ends(b_key, window, sink, CHUNK)
    else:
        m_near = (b_key > b_position - window) | (b_key < sink)
    if IS_TREE:
        # keys of the region are never cut by a window
        return tl.where(b_key < length, m_near, has_bit(b_bit, b_low, b_high))
    else:
        return m_near & (b_key <= b_position)


@triton.jit
def seen_by_any(
    o_key, o_n, b_low, b_high, first_position, window, sink, length, CHUNK: tl.constexpr
):
    """[BN] keys that a live row of a tree sees, without a tile of rows and keys.

    Args:
        o_key: [BN] slots.
        o_n: [BN] their places in this step, below 64.
        b_low: [BM] 32 ancestor bits from the node of place 0 on; of rows that are dead, none.
        b_high: [BM] the next 32.
        first_position: the least of live rows, which sees most of what is committed.
        sink: first keys that no window cuts.
        length: committed rows: the slot of node 0.
    """
    m_node = has_bit(o_n, tl.reduce(b_low, 0, either), tl.reduce(b_high, 0, either))
    return tl.where(o_key < length, first_position < sight_ends(o_key, window, sink, CHUNK), m_node)
