"""What programs of wide tiles ask of ancestor words, block tables and lengths."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specc.kernels.cuda.dependent import load_early


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def node_halves(p_words, m_live, i_node, num_words):
    """64 bits of each row's ancestor words, from node `i_node` on, which may be negative."""
    i_word = i_node >> 6
    i_bit = (i_node & 63).to(gl.uint64)
    m_low = m_live & (i_word >= 0) & (i_word < num_words)
    m_high = m_live & (i_word >= -1) & (i_word + 1 < num_words)
    b_low = gl.load(p_words + i_word, mask=m_low, other=0).to(gl.uint64, bitcast=True)
    b_high = gl.load(p_words + i_word + 1, mask=m_high, other=0).to(gl.uint64, bitcast=True)
    # a shift by 64 is undefined: by 1, then by 63 - bit
    b_bits = (b_low >> i_bit) | ((b_high << 1) << (63 - i_bit))
    return (b_bits & 0xFFFFFFFF).to(gl.uint32), (b_bits >> 32).to(gl.uint32)


@gluon.jit
def has_bit(o_n, b_low, b_high):
    b_half = gl.where(o_n < 32, b_low, b_high)
    return ((b_half >> (o_n & 31).to(gl.uint32)) & 1) != 0


@gluon.jit
def load_pages(p_table, i_block, o_n, num_pages, block_size, BN: gl.constexpr, PAGE: gl.constexpr):
    """Pages of the keys of a block; those after the end of the table are 0."""
    # the whole block may lie in one page
    o_page = i_block * BN // block_size + o_n * 0 if PAGE == 0 else (i_block * BN + o_n) // PAGE
    return gl.load(p_table + o_page, mask=o_page < num_pages, other=0)


@gluon.jit
def share(
    cache_len, num_visits, num_shares, max_splits, num_seqs, capacity, tokens_each, BN: gl.constexpr
):
    """Splits of a sequence of `num_visits` blocks: what it is worth of `num_shares` for all."""
    total = 0
    for i in range(0, num_seqs, 128):
        o_b = i + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        b_length = load_early(cache_len + o_b, o_b < num_seqs, -1)
        b_keys = gl.minimum(gl.minimum(b_length, capacity) + tokens_each, capacity)
        total += gl.sum(gl.where(b_length >= 0, (b_keys + BN - 1) // BN, 0), 0)
    total = gl.maximum(total, 1)
    # to the nearest
    most = (2 * num_visits * num_shares + total) // (2 * total)
    return gl.minimum(gl.maximum(most, 1), max_splits)
