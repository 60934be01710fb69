"""Where the chunk of a row begins in Triton: no key before it is seen (Llama 4).

Source: `attention_chunk_size` of Llama 4's configuration; semantics: `attend_reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.attend_slopes import count_bits


@triton.jit
def _narrow(b_word, b_place, b_rank, HALF: tl.constexpr):
    """Which half of the next 2 · HALF bits has the set bit that is looked for."""
    b_low = (b_word >> b_place.to(tl.uint64)).to(tl.uint32)
    if HALF < 32:
        b_low &= (1 << HALF) - 1
    b_below = count_bits(b_low)
    is_above = b_rank >= b_below
    return b_place + tl.where(is_above, HALF, 0), b_rank - tl.where(is_above, b_below, 0)


@triton.jit
def _place_of_bit(b_word, b_rank):
    """Place of the set bit with so many set bits below it, in words of 64 that have it."""
    b_place = b_rank * 0
    for i in tl.static_range(6):
        b_place, b_rank = _narrow(b_word, b_place, b_rank, 32 >> i)
    return b_place


@triton.jit
def first_slots(
    p_words, m_live, b_position, length, num_words, CHUNK: tl.constexpr, IS_TREE: tl.constexpr
):
    """[BM] slot of the first key of each row's chunk.

    Of what is committed slots are positions. Of a chunk that begins in the region it is the node of
    the row's path at that position: paths ascend, so what lies before it in slots does so in
    positions, too.

    Args:
        p_words: [BM] ancestor words of rows.
        m_live: [BM] rows that are not dead.
        b_position: [BM] positions of rows.
        length: committed rows: the slot of node 0.
        num_words: of each row.
        CHUNK: positions of a chunk.
        IS_TREE: rows have ancestor words.
    """
    b_first = b_position - b_position % CHUNK
    if IS_TREE:
        # nodes of the path before the chunk, counted down; below 0 once its first node is found
        b_rank = tl.where(m_live & (b_first > length), b_first - length, -1)
        b_first = tl.where(b_rank > 0, length, b_first)
        num_read = tl.where(tl.max(b_rank, 0) > 0, num_words, 0)
        for i in range(0, num_read):
            b_word = tl.load(p_words + i, mask=m_live, other=0).to(tl.uint64, bitcast=True)
            b_count = count_bits(b_word.to(tl.uint32)) + count_bits((b_word >> 32).to(tl.uint32))
            is_here = (b_rank >= 0) & (b_rank < b_count)
            b_place = length + i * 64 + _place_of_bit(b_word, tl.maximum(b_rank, 0))
            b_first = tl.where(is_here, b_place, b_first)
            b_rank = tl.where(b_rank >= 0, b_rank - b_count, b_rank)
    return b_first
