"""Chunks of positions in Triton: which keys of its own chunk a row sees, and no others (Llama 4).

That a key is in the chunk of a row or in a later one is said of the key, by where its chunk ends: a
[BM] vector of where each row's begins would stay in registers, in every layout in which rows and
keys meet. Of the nodes of a tree, a row's bits leave out those before its chunk.

Source: `attention_chunk_size` of Llama 4's configuration; semantics: `attend_reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.attend_slopes import count_bits


@triton.jit
def sight_ends(b_key, window, sink, CHUNK: tl.constexpr):
    """First position that does not see a committed key any more; slots of those are positions."""
    b_end = b_key - b_key % CHUNK + CHUNK
    # a window as long as a chunk cuts nothing of it, and no sum of a longer one overflows
    b_far = tl.where(b_key < sink, b_end, b_key + tl.minimum(window, CHUNK))
    return tl.minimum(b_end, b_far)


@triton.jit
def bounds_in_chunks(
    low, start, first_position, last_position, length, CHUNK: tl.constexpr, IS_TREE: tl.constexpr
):
    """What chunks make of `low`, from which on every row sees keys, and `start`, the first seen.

    Args:
        start: likewise.
        first_position: the least of live rows.
        length: committed rows: the position of node 0.
        IS_TREE: rows have ancestor words.

    Returns:
        low, start, and whether some row's chunk begins after node 0 of a tree.
    """
    is_crossed = False
    # A branch, though maxima need none: with bounds of loops that are no results of branches Triton
    # 3.7 loses what strides are multiples of, so it loads keys by the number and pipelines nothing.
    if last_position >= CHUNK:
        last_chunk = last_position - last_position % CHUNK
        first_chunk = first_position - first_position % CHUNK
        low = tl.maximum(low, last_chunk)
        if IS_TREE:
            is_crossed = last_chunk > length
        # of a tree, too: no node lies in a slot before its position
        start = tl.maximum(start, first_chunk)
    return low, start, is_crossed


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
def place_of_bit(b_word, b_rank):
    """Place of the set bit with so many set bits below it, in words of 64 that have it."""
    b_place = b_rank * 0
    for i in tl.static_range(6):
        b_place, b_rank = _narrow(b_word, b_place, b_rank, 32 >> i)
    return b_place


@triton.jit
def first_nodes(p_words, m_live, b_position, length, num_read, CHUNK: tl.constexpr):
    """[BM] node with which each row's chunk begins on its path; 0 where the path is all of it.

    Paths ascend: what lies before that node in slots does so in positions, too.

    Args:
        p_words: [BM] ancestor words of rows.
        m_live: [BM] rows that are not dead.
        b_position: [BM] positions of rows.
        length: committed rows: the position of node 0.
        num_read: words of each row; 0 where no row's chunk begins after node 0.
    """
    # nodes of the path before the chunk, counted down; below 0 once its first node is found
    b_rank = b_position - b_position % CHUNK - length
    b_rank = tl.where(m_live & (b_rank > 0), b_rank, -1)
    b_first = tl.zeros_like(b_rank)
    for i in range(0, num_read):
        b_word = tl.load(p_words + i, mask=m_live, other=0).to(tl.uint64, bitcast=True)
        b_count = count_bits(b_word.to(tl.uint32)) + count_bits((b_word >> 32).to(tl.uint32))
        is_here = (b_rank >= 0) & (b_rank < b_count)
        b_place = i * 64 + place_of_bit(b_word, tl.maximum(b_rank, 0))
        b_first = tl.where(is_here, b_place, b_first)
        b_rank = tl.where(b_rank >= 0, b_rank - b_count, b_rank)
    return b_first


@triton.jit
def bits_from(b_bits, b_node):
    """[BM] words of 32 bits without those before each row's `b_node`, which may be anywhere."""
    # a shift by 32 is undefined: in two halves
    b_out = tl.minimum(tl.maximum(b_node, 0), 32).to(tl.uint32)
    b_half = b_out >> 1
    return (b_bits >> b_half >> (b_out - b_half)) << b_half << (b_out - b_half)
