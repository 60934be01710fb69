"""Tokens of a sequence as layers that keep states see them: certain nodes, and nodes with paths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.strided_rows import check, said
from specc.speculation.tree import MAX_NODES

# tokens whose slots a program looks at together
SLOTS = 64
# committed tokens of a sequence that has no state: none of its slots is a node's
_NOBODY = tl.constexpr(-(1 << 30))


@triton.jit
def place_of(cache_len, states, i_b, num_states):
    """Of a sequence its length, its place and how many nodes are certain.

    It has no nodes where it has no place, or fewer than 0 committed tokens: its length is negative.
    """
    length = tl.load(cache_len + i_b)
    place = tl.load(states + 2 * i_b)
    certain = tl.maximum(tl.load(states + 2 * i_b + 1), 0)
    has_state = (length >= 0) & (place >= 0) & (place < num_states)
    length = tl.where(has_state, length, _NOBODY)
    return length, tl.where(has_state, place, 0).to(tl.int64), tl.where(has_state, certain, 0)


@triton.jit
def tokens_of(q_start, i_b, num_tokens):
    """A sequence's first token, and the end of its tokens."""
    first = tl.maximum(tl.load(q_start + i_b), 0)
    return first, tl.minimum(tl.load(q_start + i_b + 1), num_tokens)


@triton.jit
def nodes_of(b_slot, length, certain, num_rows):
    """Region nodes of slots; -1 is dead, as is a node that would need a row that is not there."""
    b_node = b_slot - length
    m_live = (b_slot >= 0) & (b_node >= 0) & ((b_node < certain) | (b_node < num_rows))
    return tl.where(m_live, b_node, -1)


@triton.jit
def exponent(power):
    """Which bit of a word of 64 is set, of words that have one."""
    # exact, also that of the sign
    bits = power.to(tl.float32).to(tl.int32, bitcast=True)
    return ((bits >> 23) & 0xFF) - 127


@triton.jit
def highest_bit(word):
    """The last bit that is set, of words that have one."""
    bits = word.to(tl.uint64, bitcast=True)
    bits |= bits >> 1
    bits |= bits >> 2
    bits |= bits >> 4
    bits |= bits >> 8
    bits |= bits >> 16
    bits |= bits >> 32
    return exponent((bits ^ (bits >> 1)).to(tl.int64, bitcast=True))


@triton.jit
def bits_before(count):
    """A word of 64 bits of which the first are set: all, or none, if `count` says so or more."""
    count = tl.minimum(tl.maximum(count, 0), 64).to(tl.int64)
    half = count >> 1
    # a shift by 64 is undefined
    everything = tl.full([], -1, tl.int64)
    return ~((everything << half) << (count - half))


@triton.jit
def path_word(ancestors, i_t, i_w, stride_words, num_words, certain, node):
    """Word `i_w` of a token's ancestors, as far as they are not certain and before its node.

    Without words, all of these are its ancestors.
    """
    i_first = i_w * 64
    word = bits_before(node - i_first) & ~bits_before(certain - i_first)
    if ancestors is not None:
        p_word = ancestors + i_t.to(tl.int64) * stride_words + i_w
        word = word & tl.load(p_word, mask=i_w < num_words, other=0)
    return word


@triton.jit
def token_of(slot, wanted, guess, first, last, BS: tl.constexpr):
    """The token of a sequence with a slot, -1 where the pass has none; mostly it is the guess."""
    is_there = (guess >= first) & (guess < last)
    found = tl.where(tl.load(slot + guess, mask=is_there, other=-1) == wanted, guess, -1)
    if found < 0:
        for i in range(first, last, BS):
            o_t = i + tl.arange(0, BS)
            b_slot = tl.load(slot + o_t, mask=o_t < last, other=-1)
            found = tl.maximum(found, tl.max(tl.where(b_slot == wanted, o_t, -1), 0))
    return found


@triton.jit
def node_of_path(p_source, i_p, length, num_columns):
    """The node in a column of an accepted path; -1 after the last one."""
    i_slot = tl.load(p_source + i_p, mask=i_p < num_columns, other=-1)
    return tl.where((i_slot >= 0) & (length >= 0), i_slot - length, -1)


@triton.jit
def first_new(p_source, length, certain, num_columns):
    """The first column of an accepted path whose node the state has not seen, and that node."""
    i_p = tl.full([], 0, tl.int32)
    node = node_of_path(p_source, i_p, length, num_columns)
    while (node >= 0) & (node < certain):
        i_p += 1
        node = node_of_path(p_source, i_p, length, num_columns)
    return i_p, node


def check_pass(
    operator: str,
    num_tokens: int,
    state: Tensor,
    rows: Tensor,
    q_start: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    states: Tensor,
) -> None:
    """Refuse what says of tokens whose states are where, and slabs of other shapes.

    Raises:
        ValueError: found and needed.
    """
    check_slabs(operator, state, rows, 0)
    check_places(operator, cache_len, states)
    batch = len(cache_len)
    for name, value, size in (("q_start", q_start, batch + 1), ("slot", slot, num_tokens)):
        is_right = value.shape == (size,) and value.dtype == torch.int32 and value.is_contiguous()
        check(is_right, operator, said(name, value), f"[{size}] of torch.int32, contiguous")
    if ancestors is not None:
        is_right = ancestors.dim() == 2 and len(ancestors) == num_tokens
        is_right = is_right and ancestors.dtype == torch.int64
        is_right = is_right and (ancestors.shape[1] < 2 or ancestors.stride(1) == 1)
        needed = f"[{num_tokens}, W] of torch.int64, words beside each other"
        check(is_right, operator, said("ancestors", ancestors), needed)


def check_slabs(operator: str, state: Tensor, rows: Tensor, num_layers: int) -> None:
    """Refuse states and replay rows that a kernel cannot address; `num_layers` dimensions first."""
    is_right = rows.dim() == num_layers + 3 and state.dim() > num_layers + 2
    is_right = is_right and state.shape[: num_layers + 1] == rows.shape[: num_layers + 1]
    is_right = is_right and state.is_contiguous() and rows.is_contiguous()
    check(
        is_right, operator, f"{said('state', state)}, {said('rows', rows)}",
        "as many states as places of rows, both contiguous",
    )  # fmt: skip


def check_places(operator: str, cache_len: Tensor, states: Tensor) -> None:
    """Refuse lengths and places that are not one row for each sequence."""
    batch = len(cache_len)
    for name, value, shape in (("cache_len", cache_len, (batch,)), ("states", states, (batch, 2))):
        is_right = value.shape == shape and value.dtype == torch.int32 and value.is_contiguous()
        check(is_right, operator, said(name, value), f"{[*shape]} of torch.int32, contiguous")


def check_path(
    operator: str, state: Tensor, rows: Tensor, source: Tensor, cache_len: Tensor, states: Tensor
) -> None:
    """Refuse an accepted path, and slabs of all layers, of other shapes."""
    check_slabs(operator, state, rows, 1)
    check_places(operator, cache_len, states)
    is_right = source.dim() == 2 and len(source) == len(cache_len)
    is_right = is_right and source.dtype == torch.int32
    is_right = is_right and (source.shape[1] < 2 or source.stride(1) == 1)
    needed = f"[{len(cache_len)}, P] of torch.int32, at most {MAX_NODES} columns beside each other"
    is_right = is_right and source.shape[1] <= MAX_NODES
    check(is_right, operator, said("source", source), needed)
