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
        # halves of 32 bits: registers, for a tile of them
        b_half = tl.where(b_bit < 32, b_low, b_high)
        m_node = ((b_half >> (b_bit & 31).to(tl.uint32)) & 1) != 0
        # keys of the region are never cut by a window
        return tl.where(b_key < length, m_near, m_node)
    else:
        return m_near & (b_key <= b_position)
