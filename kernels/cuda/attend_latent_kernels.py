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

from specc.kernels.cuda.attend_rows import load_keys, products


@triton.jit
def load_queries(p_q, m_row, R: tl.constexpr, S: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr):
    """Queries at p_q [BM]: what heads share [BM, BS], and halves [BM, BR] of latents."""
    queries = (load_keys(p_q[:, None], tl.arange(0, BS), m_row, S, BS, True, R),)
    for i in tl.static_range(0, R, BR):
        b_half = load_keys(p_q[:, None], tl.arange(0, BR), m_row, R - i, BR, True, i)
        queries += (b_half,)  # type: ignore[assignment]
    return queries


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
    # keys that a product does not take as a whole it loads itself
    b_k = None
    if BC >= BS:
        b_k = load_keys((p_row + R)[:, None], tl.arange(0, BS), m_key, S, BS, IS_MASKED)
    b_s = products(
        queries[0], p_q + R, m_row, p_row + R, None, m_key, S, BS, BC, IS_MASKED, None, b_k
    )
    for j in tl.static_range(len(values)):
        b_s = products(
            queries[1 + j], p_q + j * BR, m_row, p_row + j * BR, None, m_key, R - j * BR, BR, BC,
            IS_MASKED, b_s, values[j],
        )  # fmt: skip
    return b_s, values
