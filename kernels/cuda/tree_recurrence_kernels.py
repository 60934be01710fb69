"""States of recurrences in registers, token after token: the kernels.

A program has some columns of one head's state of one sequence; columns do not depend on each other.
It takes the certain tokens of a pass in order, and stores the state after the last of them. A node
that is not certain goes on from the node before it, if that is its parent; else from the state that
was stored, and its ancestors are taken again: from the pass, or, where an earlier pass of the step
has had them, from their replay rows. No program reads what another one of its launch writes.

A token changes a state in one function, `_advance`: no multiplication is fused with an addition but
where it says so, and a sum over the rows of a block is added up in the order of the block's layout,
which is one for all kernels of a head's size. So nodes, folds and plain decoding have the same
bits, whatever else is in a batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.state_tokens import (
    bits_before,
    exponent,
    first_new,
    node_of_path,
    nodes_of,
    path_word,
    place_of,
    token_of,
    tokens_of,
)

COUNTS = ("num_seqs", "num_states", "num_rows", "key_heads", "group")
OF_PASS = ("num_tokens", "num_words", "stride_words")
OF_TOKENS = ("stride_qt", "stride_qh", "stride_kt", "stride_kh", "stride_vt", "stride_vh")
OF_NUMBERS = ("stride_gt", "stride_gh", "stride_bt", "stride_bh")
OF_PATHS = ("num_columns", "stride_source")


@triton.jit
def _advance(b_state, b_k, b_v, b_g, beta, HAS_BETA: tl.constexpr, BY_ROW: tl.constexpr):
    """The state [BK, BV] after a token with key [BK], value [BV] and decay [BK] or []."""
    b_decay = tl.exp(b_g)
    b_state = b_state * (b_decay[:, None] if BY_ROW else b_decay)
    if HAS_BETA:
        b_v = beta * (b_v - tl.sum(b_state * b_k[:, None], 0))
    b_k = tl.broadcast_to(b_k[:, None], b_state.shape)
    return tl.fma(b_k, tl.broadcast_to(b_v[None, :], b_state.shape), b_state)


@triton.jit
def _row_width(
    key_heads, num_heads, DK: tl.constexpr, DV: tl.constexpr, HAS_BETA: tl.constexpr,
    BY_ROW: tl.constexpr,
):  # fmt: skip
    """Columns of a replay row."""
    of_head = DV + (DK if BY_ROW else 1) + (1 if HAS_BETA else 0)
    return key_heads * DK + num_heads * of_head


@triton.jit
def _places_in_row(
    p_row, i_h, i_k, key_heads, num_heads, DK: tl.constexpr, DV: tl.constexpr, BY_ROW: tl.constexpr
):
    """Where key, value, decay and beta of a head are in a replay row."""
    p_v = p_row + key_heads * DK
    p_g = p_v + num_heads * DV
    p_beta = p_g + num_heads * (DK if BY_ROW else 1)
    return p_row + i_k * DK, p_v + i_h * DV, p_g + i_h * (DK if BY_ROW else 1), p_beta + i_h


@triton.jit
def _load_inputs(
    p_k, p_v, p_g, p_beta, o_k, o_v, m_k, m_v, HAS_BETA: tl.constexpr, BY_ROW: tl.constexpr
):
    """Key, value, decay and beta of one head, of a token or of its replay row."""
    b_k = tl.load(p_k + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + o_v, mask=m_v, other=0.0).to(tl.float32)
    if BY_ROW:
        b_g = tl.load(p_g + o_k, mask=m_k, other=0.0).to(tl.float32)
    else:
        b_g = tl.load(p_g).to(tl.float32)
    beta = tl.full([], 1.0, tl.float32)
    if HAS_BETA:
        beta = tl.load(p_beta).to(tl.float32)
    return b_k, b_v, b_g, beta


@triton.jit
def _load_token(
    p_k, p_v, p_g, p_beta, i_t, stride_kt, stride_vt, stride_gt, stride_bt, o_k, o_v, m_k, m_v,
    HAS_BETA: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    i_t = i_t.to(tl.int64)
    p_beta = p_beta + i_t * stride_bt if HAS_BETA else p_g
    return _load_inputs(
        p_k + i_t * stride_kt, p_v + i_t * stride_vt, p_g + i_t * stride_gt, p_beta,
        o_k, o_v, m_k, m_v, HAS_BETA, BY_ROW,
    )  # fmt: skip


@triton.jit
def _load_row(
    p_row, i_h, i_k, key_heads, num_heads, o_k, o_v, m_k, m_v, DK: tl.constexpr, DV: tl.constexpr,
    HAS_BETA: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    p_k, p_v, p_g, p_beta = _places_in_row(p_row, i_h, i_k, key_heads, num_heads, DK, DV, BY_ROW)
    return _load_inputs(p_k, p_v, p_g, p_beta, o_k, o_v, m_k, m_v, HAS_BETA, BY_ROW)


@triton.jit
def _store_row(
    p_row, i_h, i_k, key_heads, num_heads, o_k, o_v, m_k, m_v, b_k, b_v, b_g, beta,
    DK: tl.constexpr, DV: tl.constexpr, HAS_BETA: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """A program's columns of a replay row; what they share the first of them stores."""
    p_k, p_v, p_g, p_beta = _places_in_row(p_row, i_h, i_k, key_heads, num_heads, DK, DV, BY_ROW)
    is_first = tl.program_id(0) == 0
    tl.store(p_v + o_v, b_v, mask=m_v)
    # of the heads that have this key, the first
    is_owner = is_first & (i_h % (num_heads // key_heads) == 0)
    tl.store(p_k + o_k, b_k, mask=m_k & is_owner)
    if BY_ROW:
        tl.store(p_g + o_k, b_g, mask=m_k & is_first)
    else:
        tl.store(p_g, b_g, mask=is_first)
    if HAS_BETA:
        tl.store(p_beta, beta, mask=is_first)


@triton.jit
def _load_query(p_q, i_t, stride_qt, o_k, m_k):
    return tl.load(p_q + i_t.to(tl.int64) * stride_qt + o_k, mask=m_k, other=0.0).to(tl.float32)


@triton.jit
def _read(b_state, b_q, p_out, i_t, stride_ot, o_v, m_v):
    """What a token's query finds in its state is its result."""
    b_out = tl.sum(b_state * b_q[:, None], 0)
    p_out = p_out + i_t.to(tl.int64) * stride_ot + o_v
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_v)


@triton.jit
def _goes_on(ancestors, i_t, node, i_last, last_node, stride_words, num_words, certain):
    """Whether a token's path is that of the last one, and its node."""
    is_next = i_last >= 0
    if ancestors is None:
        is_next = is_next & (last_node + 1 == node)
    else:
        is_next = is_next & (last_node < num_words * 64)
        i_last = tl.maximum(i_last, 0)
        for i_w in range(certain // 64, num_words):
            own = path_word(ancestors, i_t, i_w, stride_words, num_words, certain, node)
            before = path_word(ancestors, i_last, i_w, stride_words, num_words, certain, last_node)
            before |= bits_before(last_node + 1 - i_w * 64) & ~bits_before(last_node - i_w * 64)
            is_next = is_next & (own == before)
    return is_next


@triton.jit(do_not_specialize=[*COUNTS, *OF_PASS, *OF_NUMBERS])
def tree_recurrence_kernel(
    q, k, v, g, beta, state, rows, q_start, slot, cache_len, ancestors, states, out,
    num_tokens, num_seqs, num_states, num_rows, num_words, key_heads, group,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_gt, stride_gh, stride_bt, stride_bh, stride_words,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    BY_ROW: tl.constexpr,
):  # fmt: skip
    HAS_BETA: tl.constexpr = beta is not None
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    i_k = i_h // group
    num_heads = key_heads * group
    o_k = tl.arange(0, BK)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < DK, o_v < DV
    first, last = tokens_of(q_start, i_b, num_tokens)
    length, place, certain = place_of(cache_len, states, i_b, num_states)
    p_out = out + i_h * DV
    stride_ot = num_heads * DV

    # where certain tokens end, and others begin; results of dead tokens, also of nobody's
    zero = tl.full([], 0, tl.int32)
    end_certain, begin_others, num_roots = first, last, zero
    end = tl.where(i_b == num_seqs - 1, num_tokens, last)
    for i in range(first, end, BS):
        o_t = i + tl.arange(0, BS)
        b_slot = tl.load(slot + o_t, mask=o_t < last, other=-1)
        b_node = nodes_of(b_slot, length, certain, num_rows)
        m_certain = (b_node >= 0) & (b_node < certain)
        end_certain = tl.maximum(end_certain, tl.max(tl.where(m_certain, o_t + 1, first), 0))
        begin_others = tl.minimum(begin_others, tl.min(tl.where(b_node >= certain, o_t, last), 0))
        num_roots += tl.sum((b_node == 0).to(tl.int32), 0)
        p_dead = p_out + o_t.to(tl.int64)[:, None] * stride_ot + o_v[None, :]
        m_dead = ((b_node < 0) & (o_t < end))[:, None] & m_v[None, :]
        tl.store(p_dead, tl.zeros([BS, BV], out.dtype.element_ty), mask=m_dead)

    if (end_certain > first) | (begin_others < last):
        p_q = q + i_k * stride_qh
        p_k = k + i_k * stride_kh
        p_v = v + i_h * stride_vh
        p_g = g + i_h * stride_gh
        p_beta = beta + i_h * stride_bh if HAS_BETA else p_g
        p_state = state + (place * num_heads + i_h) * DK * DV
        p_state = p_state + o_k[:, None] * DV + o_v[None, :]
        m_state = m_k[:, None] & m_v[None, :]
        is_begun = (length == 0) & (num_roots > 0)
        b_state = tl.load(p_state, mask=m_state & ~is_begun, other=0.0)  # [BK, BV]

        if end_certain > first:
            b_q = _load_query(p_q, first, stride_qt, o_k, m_k)
            b_k, b_v, b_g, b_beta = _load_token(
                p_k, p_v, p_g, p_beta, first, stride_kt, stride_vt, stride_gt, stride_bt,
                o_k, o_v, m_k, m_v, HAS_BETA, BY_ROW,
            )  # fmt: skip
            for i in range(first, end_certain):
                i_t = i + zero
                # the next token comes while this one is taken
                i_n = tl.minimum(i_t + 1, end_certain - 1)
                n_q = _load_query(p_q, i_n, stride_qt, o_k, m_k)
                n_k, n_v, n_g, n_beta = _load_token(
                    p_k, p_v, p_g, p_beta, i_n, stride_kt, stride_vt, stride_gt, stride_bt,
                    o_k, o_v, m_k, m_v, HAS_BETA, BY_ROW,
                )  # fmt: skip
                node = nodes_of(tl.load(slot + i_t), length, certain, num_rows)
                if (node >= 0) & (node < certain):
                    b_state = _advance(b_state, b_k, b_v, b_g, b_beta, HAS_BETA, BY_ROW)
                    _read(b_state, b_q, p_out, i_t, stride_ot, o_v, m_v)
                b_q, b_k, b_v, b_g, b_beta = n_q, n_k, n_v, n_g, n_beta
        if (end_certain > first) | is_begun:
            tl.store(p_state, b_state, mask=m_state)
            # nodes read it again
            tl.debug_barrier()

        i_last = tl.full([], -1, tl.int32)
        last_node = tl.full([], -1, tl.int32)
        width = _row_width(key_heads, num_heads, DK, DV, HAS_BETA, BY_ROW)
        p_rows = rows + place * num_rows * width
        for i in range(begin_others, last):
            i_t = i + zero
            node = nodes_of(tl.load(slot + i_t), length, certain, num_rows)
            if node >= certain:
                b_q = _load_query(p_q, i_t, stride_qt, o_k, m_k)
                b_k, b_v, b_g, b_beta = _load_token(
                    p_k, p_v, p_g, p_beta, i_t, stride_kt, stride_vt, stride_gt, stride_bt,
                    o_k, o_v, m_k, m_v, HAS_BETA, BY_ROW,
                )  # fmt: skip
                _store_row(
                    p_rows + node.to(tl.int64) * width, i_h, i_k, key_heads, num_heads,
                    o_k, o_v, m_k, m_v, b_k, b_v, b_g, b_beta, DK, DV, HAS_BETA, BY_ROW,
                )  # fmt: skip
                goes_on = _goes_on(
                    ancestors, i_t, node, i_last, last_node, stride_words, num_words, certain
                )
                if goes_on == 0:
                    b_state = tl.load(p_state, mask=m_state, other=0.0)
                    for i_w in range(certain // 64, node // 64 + 1):
                        word = path_word(
                            ancestors, i_t, i_w, stride_words, num_words, certain, node
                        )
                        while word != 0:
                            lowest = word & -word
                            word = word ^ lowest
                            above = i_w * 64 + exponent(lowest)
                            i_a = token_of(
                                slot, length + above, i_t - node + above, first, last, BS
                            )
                            if i_a >= 0:
                                a_k, a_v, a_g, a_beta = _load_token(
                                    p_k, p_v, p_g, p_beta, i_a, stride_kt, stride_vt, stride_gt,
                                    stride_bt, o_k, o_v, m_k, m_v, HAS_BETA, BY_ROW,
                                )  # fmt: skip
                            else:
                                a_k, a_v, a_g, a_beta = _load_row(
                                    p_rows + above.to(tl.int64) * width, i_h, i_k, key_heads,
                                    num_heads, o_k, o_v, m_k, m_v, DK, DV, HAS_BETA, BY_ROW,
                                )  # fmt: skip
                            b_state = _advance(b_state, a_k, a_v, a_g, a_beta, HAS_BETA, BY_ROW)
                b_state = _advance(b_state, b_k, b_v, b_g, b_beta, HAS_BETA, BY_ROW)
                _read(b_state, b_q, p_out, i_t, stride_ot, o_v, m_v)
                i_last, last_node = i_t, node


@triton.jit(do_not_specialize=[*COUNTS, *OF_PATHS])
def fold_recurrence_kernel(
    state, rows, source, cache_len, states,
    num_seqs, num_states, num_rows, num_columns, stride_source, key_heads, group,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_BETA: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    i_h = tl.program_id(1)
    i_l = (tl.program_id(2) // num_seqs).to(tl.int64)
    i_b = tl.program_id(2) % num_seqs
    i_k = i_h // group
    num_heads = key_heads * group
    length, place, certain = place_of(cache_len, states, i_b, num_states)
    p_source = source + i_b.to(tl.int64) * stride_source
    i_p, node = first_new(p_source, length, certain, num_columns)
    if node >= 0:
        o_k = tl.arange(0, BK)
        o_v = tl.program_id(0) * BV + tl.arange(0, BV)
        m_k, m_v = o_k < DK, o_v < DV
        place = i_l * num_states + place
        p_state = state + (place * num_heads + i_h) * DK * DV
        p_state = p_state + o_k[:, None] * DV + o_v[None, :]
        m_state = m_k[:, None] & m_v[None, :]
        width = _row_width(key_heads, num_heads, DK, DV, HAS_BETA, BY_ROW)
        p_rows = rows + place * num_rows * width
        b_state = tl.load(p_state, mask=m_state, other=0.0)  # [BK, BV]
        while node >= 0:
            if node < num_rows:
                b_k, b_v, b_g, b_beta = _load_row(
                    p_rows + node.to(tl.int64) * width, i_h, i_k, key_heads, num_heads,
                    o_k, o_v, m_k, m_v, DK, DV, HAS_BETA, BY_ROW,
                )  # fmt: skip
                b_state = _advance(b_state, b_k, b_v, b_g, b_beta, HAS_BETA, BY_ROW)
            i_p += 1
            node = node_of_path(p_source, i_p, length, num_columns)
        tl.store(p_state, b_state, mask=m_state)
