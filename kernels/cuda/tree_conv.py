"""`specc::tree_conv` and `specc::fold_conv`: some channels of a sequence a program, one launch.

A program goes through the tokens of its sequence a few at a time, and each of them back along its
path: nodes that are not certain by their ancestors, then the certain ones of the pass, then what
the state holds. So all tokens have one sum in one order, wherever their inputs come from.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, Types
from specc.kernels.cuda.state_tokens import (
    SLOTS,
    bits_before,
    check_pass,
    check_path,
    first_new,
    highest_bit,
    node_of_path,
    nodes_of,
    place_of,
    tokens_of,
)
from specc.kernels.cuda.strided_rows import FLOATS, check

# registers: ptxas would spill for one more resident program
_NUM_WARPS, _REGISTERS = 4, 128
# channels of a program, and tokens that it takes at a time
_CHANNELS, _TOKENS = 64, 16

_COUNTS = ("num_seqs", "num_states", "num_rows", "channels")
_OF_PASS = ("num_tokens", "num_words", "stride_words", "stride_wc", "stride_wk")
_OF_PATHS = ("num_columns", "stride_source")


@triton.jit
def _before(p_words, b_at, certain, num_words, m_at):
    """The last node before each that is on its path and not certain; -1 where there is none."""
    b_found = tl.full(b_at.shape, -1, tl.int32)
    for i_w in range(certain // 64, num_words):
        b_word = tl.load(p_words + i_w, mask=m_at, other=0)
        b_word = b_word & bits_before(b_at - i_w * 64) & ~bits_before(certain - i_w * 64)
        b_bit = highest_bit(tl.where(b_word != 0, b_word, 1))
        b_found = tl.where(b_word != 0, i_w * 64 + b_bit, b_found)
    return b_found


@triton.jit
def _find_tokens(slot, b_slot, b_guess, m_wanted, first, last):
    """The tokens of a sequence with these slots, -1 where the pass has none."""
    m_there = m_wanted & (b_guess >= first) & (b_guess < last)
    b_there = tl.load(slot + b_guess, mask=m_there, other=-1)
    b_found = tl.where(m_there & (b_there == b_slot), b_guess, -1)
    # mostly tokens follow each other as nodes do
    if tl.max((m_wanted & (b_found < 0)).to(tl.int32), 0) > 0:
        for i_t in range(first, last):
            other = tl.load(slot + i_t)
            b_found = tl.where(m_wanted & (other == b_slot), i_t, b_found)
    return b_found


@triton.jit
def _load_inputs(
    p_x, p_rows, p_state, b_node, b_token, certain, is_begun, o_c, m_c, channels, stride_x,
    m_node, K: tl.constexpr,
):  # fmt: skip
    """Inputs [BT, BC] of nodes: of the pass, of rows, or below node 0 of the state."""
    m_token = m_node & (b_token >= 0)
    o_x = b_token.to(tl.int64)[:, None] * stride_x + o_c[None, :]
    b_x = tl.load(p_x + o_x, mask=m_token[:, None] & m_c[None, :], other=0.0)
    m_row = m_node & (b_token < 0) & (b_node >= certain)
    o_row = b_node.to(tl.int64)[:, None] * channels + o_c[None, :]
    b_row = tl.load(p_rows + o_row, mask=m_row[:, None] & m_c[None, :], other=0.0)
    b_x = tl.where(m_row[:, None], b_row, b_x)
    m_state = m_node & (b_node < 0) & ~is_begun
    o_state = (K - 1 + b_node).to(tl.int64)[:, None] * channels + o_c[None, :]
    b_state = tl.load(p_state + o_state, mask=m_state[:, None] & m_c[None, :], other=0.0)
    return tl.where(m_state[:, None], b_state, b_x)


@triton.jit(do_not_specialize=[*_COUNTS, *_OF_PASS])
def tree_conv_kernel(
    x, weight, bias, state, rows, q_start, slot, cache_len, ancestors, states, out,
    num_tokens, num_seqs, num_states, num_rows, num_words, channels,
    stride_x, stride_wc, stride_wk, stride_words,
    K: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
    IS_SILU: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(1)
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    m_c = o_c < channels
    first, last = tokens_of(q_start, i_b, num_tokens)
    length, place, certain = place_of(cache_len, states, i_b, num_states)
    zero = tl.full([], 0, tl.int32)
    # certain nodes of the pass, the last one's token, and whether the sequence begins
    num_seen, i_seen, num_roots = zero, zero, zero
    for i in range(first, last, BS):
        o_t = i + tl.arange(0, BS)
        b_slot = tl.load(slot + o_t, mask=o_t < last, other=-1)
        b_node = nodes_of(b_slot, length, certain, num_rows)
        m_certain = (b_node >= 0) & (b_node < certain)
        num_seen = tl.maximum(num_seen, tl.max(tl.where(m_certain, b_node + 1, 0), 0))
        i_seen = tl.maximum(i_seen, tl.max(tl.where(m_certain, o_t, 0), 0))
        num_roots += tl.sum((b_node == 0).to(tl.int32), 0)
    is_begun = (length == 0) & (num_roots > 0)

    p_state = state + place * (K - 1) * channels
    p_rows = rows + place * num_rows * channels
    end = tl.where(i_b == num_seqs - 1, num_tokens, last)
    for i in range(first, end, BT):
        o_t = i + tl.arange(0, BT)
        b_slot = tl.load(slot + o_t, mask=o_t < last, other=-1)
        b_node = nodes_of(b_slot, length, certain, num_rows)
        m_live = b_node >= 0
        m_other = b_node >= certain
        o_x = o_t.to(tl.int64)[:, None] * stride_x + o_c[None, :]
        b_x = tl.load(x + o_x, mask=m_live[:, None] & m_c[None, :], other=0.0)
        o_row = b_node.to(tl.int64)[:, None] * channels + o_c[None, :]
        tl.store(p_rows + o_row, b_x, mask=m_other[:, None] & m_c[None, :])
        p_weight = weight + o_c * stride_wc
        b_weight = tl.load(p_weight + (K - 1) * stride_wk, mask=m_c, other=0.0).to(tl.float32)
        b_sum = b_x.to(tl.float32) * b_weight[None, :]
        b_at = b_node
        for i_k in range(1, K):
            # certain nodes of the pass follow each other; those before them are the state's
            b_next = tl.where(b_at >= certain, num_seen - 1, b_at - 1)
            if ancestors is None:
                b_next = tl.where(b_at > certain, b_at - 1, b_next)
            else:
                p_words = ancestors + o_t.to(tl.int64) * stride_words
                b_other = _before(p_words, b_at, certain, num_words, m_live & (b_at > certain))
                b_next = tl.where(b_other >= 0, b_other, b_next)
            b_at = b_next
            m_wanted = m_live & (b_at >= 0)
            b_guess = o_t - b_node + b_at
            b_token = _find_tokens(slot, length + b_at, b_guess, m_wanted, first, last)
            b_x = _load_inputs(
                x, p_rows, p_state, b_at, b_token, certain, is_begun, o_c, m_c, channels,
                stride_x, m_live, K,
            )  # fmt: skip
            b_factor = tl.load(p_weight + (K - 1 - i_k) * stride_wk, mask=m_c, other=0.0)
            b_factor = tl.broadcast_to(b_factor.to(tl.float32)[None, :], b_sum.shape)
            b_sum = tl.fma(b_x.to(tl.float32), b_factor, b_sum)
        if bias is not None:
            b_sum += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
        if IS_SILU:
            b_sum = b_sum / (1.0 + tl.exp(-b_sum))
        b_sum = tl.where(m_live[:, None], b_sum, 0.0)
        p_out = out + o_t.to(tl.int64)[:, None] * channels + o_c[None, :]
        tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=(o_t < end)[:, None] & m_c[None, :])

    if (num_seen > 0) | is_begun:
        o_e = tl.arange(0, BE)
        m_e = o_e < K - 1
        b_at = num_seen - (K - 1) + o_e
        m_wanted = m_e & (b_at >= 0)
        b_guess = i_seen + 1 - num_seen + b_at
        b_token = _find_tokens(slot, length + b_at, b_guess, m_wanted, first, last)
        b_x = _load_inputs(
            x, p_rows, p_state, b_at, b_token, certain, is_begun, o_c, m_c, channels,
            stride_x, m_e, K,
        )  # fmt: skip
        # other threads have read what this one overwrites
        tl.debug_barrier()
        p_new = p_state + o_e.to(tl.int64)[:, None] * channels + o_c[None, :]
        tl.store(p_new, b_x, mask=m_e[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=[*_COUNTS, *_OF_PATHS])
def fold_conv_kernel(
    state, rows, source, cache_len, states,
    num_seqs, num_states, num_rows, num_columns, stride_source, channels,
    KEPT: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    m_c = o_c < channels
    i_l = (tl.program_id(1) // num_seqs).to(tl.int64)
    i_b = tl.program_id(1) % num_seqs
    length, place, certain = place_of(cache_len, states, i_b, num_states)
    p_source = source + i_b.to(tl.int64) * stride_source
    i_first, first = first_new(p_source, length, certain, num_columns)
    if first >= 0:
        place = i_l * num_states + place
        p_state = state + place * KEPT * channels
        p_rows = rows + place * num_rows * channels
        o_e = tl.arange(0, BE)
        m_e = o_e < KEPT
        # the last of the new nodes; before the first of them what was there
        num_new = tl.full([], 0, tl.int32)
        b_from = tl.full([BE], 0, tl.int32)
        node = first
        while node >= 0:
            b_from = tl.where(o_e == num_new % KEPT, node, b_from)
            num_new += 1
            node = node_of_path(p_source, i_first + num_new, length, num_columns)
        b_new = num_new - KEPT + o_e
        b_from = tl.gather(b_from, tl.where(b_new >= 0, b_new % KEPT, 0), 0)
        m_row = (m_e & (b_new >= 0))[:, None] & m_c[None, :]
        o_row = b_from.to(tl.int64)[:, None] * channels + o_c[None, :]
        b_row = tl.load(p_rows + o_row, mask=m_row, other=0.0)
        m_old = (m_e & (b_new < 0))[:, None] & m_c[None, :]
        o_old = (o_e + num_new).to(tl.int64)[:, None] * channels + o_c[None, :]
        b_old = tl.load(p_state + o_old, mask=m_old, other=0.0)
        b_row = tl.where(m_row, b_row, b_old)
        # other threads have read what this one overwrites
        tl.debug_barrier()
        p_new = p_state + o_e.to(tl.int64)[:, None] * channels + o_c[None, :]
        tl.store(p_new, b_row, mask=m_e[:, None] & m_c[None, :])


def tree_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: Tensor,
    q_start: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    states: Tensor,
    *,
    activation: str = "",
) -> Tensor:
    """Causal convolution of each token over its path; see `tree_conv_reference`."""
    if activation not in ("", "silu"):
        raise ValueError(f"found activation {activation!r}, needed 'silu' or ''")
    num_tokens, channels = x.shape if x.dim() == 2 else (0, 0)
    width = weight.shape[1] if weight.dim() == 2 else 0
    given = {"x": x, "weight": weight, "state": state, "rows": rows}
    given |= {} if bias is None else {"bias": bias}
    is_right = x.dim() == 2 and weight.shape == (channels, width) and width > 0
    is_right = is_right and (bias is None or (bias.shape == (channels,) and bias.is_contiguous()))
    is_right = is_right and state.shape[1:] == (width - 1, channels)
    is_right = is_right and rows.shape[2:] == (channels,)
    is_right = is_right and {y.dtype for y in given.values()} == {x.dtype} and x.dtype in FLOATS
    found = ", ".join(f"{n} {list(y.shape)} of {y.dtype}" for n, y in given.items())
    check(
        is_right, "tree_conv", found,
        "x [Nt, C], weight [C, K], bias [C], state [S, K - 1, C], rows [S, R, C] of one type",
    )  # fmt: skip
    check_pass("tree_conv", num_tokens, state, rows, q_start, slot, cache_len, ancestors, states)
    batch = len(cache_len)
    if batch == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tree_conv_kernel[(triton.cdiv(channels, _CHANNELS), batch)](
        x, weight, bias, state, rows, q_start, slot, cache_len, ancestors, states, out,
        num_tokens, batch, len(state), rows.shape[1],
        0 if ancestors is None else ancestors.shape[1], channels,
        x.stride(0), *weight.stride(), 0 if ancestors is None else ancestors.stride(0),
        K=width, BE=triton.next_power_of_2(max(width - 1, 1)), BT=_TOKENS, BC=_CHANNELS, BS=SLOTS,
        IS_SILU=activation == "silu", num_warps=_NUM_WARPS, maxnreg=_REGISTERS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def fold_conv(
    state: Tensor, rows: Tensor, source: Tensor, cache_len: Tensor, states: Tensor
) -> None:
    """Let the states of all layers see accepted nodes; see `fold_conv_reference`."""
    check_path("fold_conv", state, rows, source, cache_len, states)
    is_right = state.dim() == 4 and state.shape[3] == rows.shape[3] and state.dtype == rows.dtype
    is_right = is_right and state.dtype in FLOATS
    check(
        is_right, "fold_conv",
        f"state {list(state.shape)} of {state.dtype}, rows {list(rows.shape)} of {rows.dtype}",
        "[L, S, K - 1, C] and [L, S, R, C] of one type",
    )  # fmt: skip
    num_layers, num_states, kept, channels = state.shape
    batch, num_columns = source.shape
    if state.numel() == 0 or source.numel() == 0 or rows.shape[2] == 0:
        return
    fold_conv_kernel[(triton.cdiv(channels, _CHANNELS), num_layers * batch)](
        state, rows, source, cache_len, states,
        batch, num_states, rows.shape[2], num_columns, source.stride(0), channels,
        KEPT=kept, BE=triton.next_power_of_2(kept), BC=_CHANNELS,
        num_warps=_NUM_WARPS,
    )  # fmt: skip


# of models in bfloat16: inputs of an output, whether there is a bias, whether SiLU follows; of
# Qwen3-Next and 3.5, of Mamba-2, of LFM2
SHIPPED = ((4, False, True), (4, True, True), (3, False, False))


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability."""
    dtype = torch.bfloat16
    tree: Types = {dtype: ("x", "weight", "bias", "state", "rows", "out")}
    tree |= {torch.int32: ("q_start", "slot", "cache_len", "states"), torch.int64: ("ancestors",)}
    fold = {dtype: ("state", "rows"), torch.int32: ("source", "cache_len", "states")}
    for width, has_bias, is_silu in SHIPPED:
        name = f"{TYPE_NAMES[dtype]}-width{width}"
        sizes = {"BE": triton.next_power_of_2(width - 1), "BC": _CHANNELS}
        for words in (False, True):
            absent = {} if has_bias else {"bias": None}
            absent |= {} if words else {"ancestors": None}
            yield Shipped.of(
                f"tree-{name}{'-bias' * has_bias}{'-silu' * is_silu}{'-words' * words}",
                tree_conv_kernel, tree,
                K=width, BT=_TOKENS, BS=SLOTS, IS_SILU=is_silu, **sizes, **absent,
                num_warps=_NUM_WARPS, maxnreg=_REGISTERS, enable_fp_fusion=False,
            )  # fmt: skip
        if not has_bias:
            yield Shipped.of(f"fold-{name}", fold_conv_kernel, fold, KEPT=width - 1, **sizes)
