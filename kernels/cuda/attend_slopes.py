"""What slopes add to scores in Triton: by how far a key is from a token, in positions (ALiBi).

Source: arXiv:2108.12409 §3; semantics: `attend_reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.attend_softmax import LOG2E


@triton.jit
def count_bits(b_word):
    """Bits that are set in words of 32."""
    b_word = b_word - ((b_word >> 1) & 0x55555555)
    b_word = (b_word & 0x33333333) + ((b_word >> 2) & 0x33333333)
    b_word = (b_word + (b_word >> 4)) & 0x0F0F0F0F
    b_word = b_word + (b_word >> 8)
    return ((b_word + (b_word >> 16)) & 63).to(tl.int32)


@triton.jit
def _rounded(b_x):
    """The nearest bfloat16 of finite numbers, ties to even, as float32."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_bits += 0x7FFF + ((b_bits >> 16) & 1)
    return ((b_bits >> 16) << 16).to(tl.float32, bitcast=True)


@triton.jit
def nodes_from(p_words, m_live, i_node, num_words):
    """[BM] nodes of each row's path from node `i_node` on, which is 0 or more."""
    b_count = tl.where(m_live, 0, 0)
    for i in range(i_node >> 6, num_words):
        b_word = tl.load(p_words + i, mask=m_live, other=0).to(tl.uint64, bitcast=True)
        # of the first word, the bits from the node on
        b_word = b_word >> tl.maximum(i_node - i * 64, 0).to(tl.uint64)
        b_count += count_bits(b_word.to(tl.uint32)) + count_bits((b_word >> 32).to(tl.uint32))
    return b_count


@triton.jit
def distances(
    p_words, m_live, b_position, o_key, o_n, b_low, b_high, i_node, length, num_words,
    IS_REGION: tl.constexpr,
):  # fmt: skip
    """[BM, BN] position of each key minus that of each row; of keys that it does not see, any.

    Nodes of a row's path count back from it, whatever slots they lie in.

    Args:
        p_words: [BM] ancestor words of rows.
        m_live: [BM] rows that are not dead.
        b_position: [BM] positions of rows.
        o_key: [BN] slots.
        o_n: [BN] their places in this step, below 64.
        b_low: [BM] 32 ancestor bits from node `i_node` on, the node of place 0.
        b_high: [BM] the next 32.
        i_node: which may be negative.
        length: committed rows: the slot of node 0.
        IS_REGION: there may be keys of the region among them.
    """
    b_far = o_key[None, :] - b_position[:, None]
    if IS_REGION:
        b_later = nodes_from(p_words, m_live, tl.maximum(i_node + 64, 0), num_words)
        o_bit = (o_n & 31).to(tl.uint32)[None, :]
        is_low = (o_n < 32)[None, :]
        # bits above the key's own
        b_low_above = tl.where(is_low, (b_low[:, None] >> o_bit) >> 1, 0).to(tl.uint32)
        b_high_above = tl.where(is_low, b_high[:, None], (b_high[:, None] >> o_bit) >> 1)
        b_after = count_bits(b_low_above) + count_bits(b_high_above.to(tl.uint32))
        b_after += b_later[:, None]
        b_far = tl.where(o_key[None, :] < length, b_far, -b_after)
    return b_far


@triton.jit
def biases(b_slope, b_far, b_position, qk_scale, ROUNDS: tl.constexpr):
    """[BM, BN] what slopes add to scores in powers of two.

    Args:
        b_slope: [BM] slopes of the rows' heads.
        b_far: [BM, BN], see `distances`.
        b_position: [BM] positions of the rows.
        qk_scale: scale of scores · log2(e), which products that were rounded are scaled by.
        ROUNDS: positions and products with them are bfloat16.
    """
    if ROUNDS:
        b_token = b_position.to(tl.float32)
        b_key = _rounded(b_token[:, None] + b_far.to(tl.float32))
        b_ends = _rounded(b_slope[:, None] * b_key)
        return (b_ends - _rounded(b_slope * _rounded(b_token))[:, None]) * qk_scale
    else:
        return b_slope[:, None] * b_far.to(tl.float32) * LOG2E
