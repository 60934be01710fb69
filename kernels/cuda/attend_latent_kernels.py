"""What `attend_kernel` multiplies of cached latents: their first columns are keys and values both.

A row of the cache is [latent, shared], one head for all queries, and its latent is read once. Rows
are wide and tiles of queries are high (all heads of a token share the cache), so accumulators fill
the registers: latents of more than 256 columns are taken in two halves, and what heads share is a
part of its own.

Source: DeepSeek-V2, arXiv:2405.04434 §2.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.attend_rows import load_keys


@triton.jit
def _load_part(p_q, o_c, m_row, first, width):
    """Columns first + o_c of queries, as far as there are `width` of them."""
    return tl.load(
        p_q[:, None] + (first + o_c)[None, :],
        mask=m_row[:, None] & (o_c < width)[None, :],
        other=0.0,
    )


@triton.jit
def load_queries(
    p_q, m_row, R: tl.constexpr, S: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Queries at p_q [BM]: what heads share [BM, BS], and halves [BM, BR] if products take them."""
    queries = (_load_part(p_q, tl.arange(0, BS), m_row, R, S),)
    for i in tl.static_range(0, R, BR):
        b_half = queries[0]
        if BC >= BR:
            b_half = _load_part(p_q, tl.arange(0, BR), m_row, i, R - i)
        queries += (b_half,)  # type: ignore[assignment]
    return queries


@triton.jit
def _scores(
    b_q,  # [BM, BQ], the whole row if BC == BQ
    p_q,  # [BM]
    p_row,  # [BN]
    b_k,  # [BN, BQ], likewise
    b_s,
    m_row,
    m_key,
    first,
    WIDTH: tl.constexpr,
    BQ: tl.constexpr,
    BC: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add products of queries and keys in columns first … first + WIDTH - 1 to [BM, BN] scores."""
    if BC >= BQ:
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision="ieee")
    else:
        # operands of a whole row would not fit the registers: a few columns at a time
        for i in tl.static_range(0, BQ, BC):
            o_c = tl.arange(0, BC)
            b_part = _load_part(p_q, o_c, m_row, first + i, WIDTH - i)
            b_own = load_keys((p_row + (first + i))[:, None], o_c, m_key, WIDTH - i, BC, IS_MASKED)
            b_s = tl.dot(b_part, tl.trans(b_own), b_s, input_precision="ieee")
    return b_s


@triton.jit
def latent_products(
    queries,  # as of `load_queries`
    p_q,  # [BM]
    m_row,  # [BM]
    p_row,  # [BN]
    m_key,  # [BN]
    R: tl.constexpr,
    S: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Queries times the keys at p_row: [BM, BN]; and the halves [BN, BR] of these keys' values."""
    values = ()
    for i in tl.static_range(0, R, BR):
        b_half = load_keys((p_row + i)[:, None], tl.arange(0, BR), m_key, R - i, BR, IS_MASKED)
        values += (b_half,)  # type: ignore[assignment]
    b_k = values[0]
    if BC >= BS:
        b_k = load_keys((p_row + R)[:, None], tl.arange(0, BS), m_key, S, BS, IS_MASKED)
    b_s = tl.zeros([m_row.shape[0], m_key.shape[0]], tl.float32)
    b_s = _scores(queries[0], p_q, p_row, b_k, b_s, m_row, m_key, R, S, BS, BC, IS_MASKED)
    for j in tl.static_range(len(values)):
        b_s = _scores(
            queries[1 + j], p_q, p_row, values[j], b_s, m_row, m_key, j * BR, R - j * BR, BR, BC,
            IS_MASKED,
        )  # fmt: skip
    return b_s, values
