"""What nodes of a verified tree stand on: depths, and tokens that penalties count.

Penalties touch few tokens of a row. Their counts, of a sequence's history, are one dense row
[V] of scratch a sequence that all of its nodes share and that a program writes only where the
sequence has penalties; the tokens of a node's path, which differ from node to node, are compared
with as a block of the row is read. So no list has to be sorted, nor a row of logits be copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.row_options import FREQUENCY, NUM_PROMPT, PRESENCE, REPETITION
from specc.kernels.cuda.shipped import ALIGNMENT, Shipped, with_any_vocab
from specc.kernels.cuda.strided_rows import row_strides

# tokens of the vocabulary whose counts a program owns, at least; more than MAX_SLICES gain nothing
SLICE = 2048
MAX_SLICES = 16


@triton.jit
def has_penalty(p_values):
    is_changed = tl.load(p_values + REPETITION) != 1.0
    is_changed = is_changed | (tl.load(p_values + PRESENCE) != 0.0)
    return is_changed | (tl.load(p_values + FREQUENCY) != 0.0)


@triton.jit
def _history_tokens(history, p_table, o_p, last, history_stride, num_blocks, block_size):
    """Tokens at positions, -1 beyond `last` and where a block is none of the history's."""
    m_p = o_p < last
    o_p = tl.where(m_p, o_p, 0)
    b_block = tl.load(p_table + o_p // block_size, mask=m_p, other=-1)
    m_p = m_p & (b_block >= 0) & (b_block < num_blocks)
    p_row = history + tl.where(m_p, b_block, 0).to(tl.int64) * history_stride
    return tl.load(p_row + o_p % block_size, mask=m_p, other=-1)


@triton.jit(
    do_not_specialize=[
        "parent_stride",
        "len_stride",
        "value_stride",
        "word_stride",
        "history_stride",
        "table_stride",
        "num_nodes",
        "max_depth",
        "num_slices",
        "num_blocks",
        "block_size",
        "table_width",
    ]
)
def tree_context_kernel(
    parents,
    cache_len,
    values,
    words,
    history,
    block_table,
    depths,
    counts,
    parent_stride,
    len_stride,
    value_stride,
    word_stride,
    history_stride,
    table_stride,
    num_nodes,
    max_depth,
    vocab,
    slice_size,
    num_slices,
    num_blocks,
    block_size,
    table_width,
    BN: tl.constexpr,
    BV: tl.constexpr,
):
    i_b = (tl.program_id(0) // num_slices).to(tl.int64)
    i_s = tl.program_id(0) % num_slices
    length = tl.load(cache_len + i_b * len_stride)
    if i_s == 0:
        o_n = tl.arange(0, BN)
        p_parents = parents + i_b * parent_stride
        b_at = tl.where((o_n < num_nodes) & (length >= 0), o_n, -1)  # [BN]
        b_depth = tl.where(b_at == 0, 0, -1)
        step = tl.full([], 0, tl.int32)
        # nodes that no walk reaches stay at -1
        while (step < max_depth) & (tl.max(b_at, 0) > 0):
            step += 1
            b_at = tl.load(p_parents + b_at, mask=b_at > 0, other=-1)
            b_at = tl.where(b_at < num_nodes, b_at, -1)
            b_depth = tl.where(b_at == 0, step, b_depth)
        tl.store(depths + i_b * num_nodes + o_n, b_depth, mask=o_n < num_nodes)
    if (length >= 0) & has_penalty(values + i_b * value_stride):
        first = i_s * slice_size
        last = tl.minimum(first + slice_size, vocab)
        p_counts = counts + i_b * vocab
        o_v = tl.arange(0, BV)
        for start in range(first, last, BV):
            b_zero = tl.zeros([BV], tl.int32)
            tl.store(p_counts + start + o_v, b_zero, mask=start + o_v < last)
        tl.debug_barrier()
        length = tl.minimum(length, table_width * block_size)
        num_prompt = tl.load(words + i_b * word_stride + NUM_PROMPT)
        num_prompt = tl.minimum(tl.maximum(num_prompt, 0), length.to(tl.int64)).to(tl.int32)
        p_table = block_table + i_b * table_stride
        # bit 0: the prompt has the token; above it, how often the output has
        for start in range(0, num_prompt, BV):
            o_p = start + o_v
            b_token = _history_tokens(
                history, p_table, o_p, num_prompt, history_stride, num_blocks, block_size
            )
            m_token = (b_token >= first) & (b_token < last)
            tl.store(p_counts + b_token, 1, mask=m_token)
        tl.debug_barrier()
        for start in range(num_prompt, length, BV):
            o_p = start + o_v
            b_token = _history_tokens(
                history, p_table, o_p, length, history_stride, num_blocks, block_size
            )
            m_token = (b_token >= first) & (b_token < last)
            tl.atomic_add(p_counts + b_token, 2, mask=m_token, sem="relaxed")


@triton.jit
def _penalize(b_logit, o_t, m_t, context):
    p_counts, p_tokens, p_parents, p_values, num_prompt, node, place = context
    b_count = tl.load(p_counts + o_t, mask=m_t, other=0)
    at = node
    while at >= 0:
        token = tl.load(p_tokens + at)
        b_more = tl.where(place >= num_prompt, b_count + 2, b_count | 1)
        b_count = tl.where(o_t == token, b_more, b_count)
        place -= 1
        at = tl.load(p_parents + at, mask=at > 0, other=-1)
    repetition = tl.load(p_values + REPETITION)
    b_times = b_logit * repetition
    b_repeated = tl.where(b_logit > 0.0, tl.div_rn(b_logit, repetition), b_times)
    b_logit = tl.where(b_count > 0, b_repeated, b_logit)
    b_output = (b_count >> 1).to(tl.float32)
    b_presence = tl.where(b_count > 1, tl.load(p_values + PRESENCE), 0.0)
    b_penalty = tl.load(p_values + FREQUENCY) * b_output + b_presence
    return tl.where(b_count > 1, b_logit - b_penalty, b_logit)


@triton.jit
def scores_at(o_t, row):
    """Logits of a row after penalties, times a factor, in float32; -inf beyond the vocabulary.

    A row is: pointer, size of the vocabulary, factor; where penalties may be, too, whether they
    are, and their context: counts of its sequence, tokens and parents of its tree, sampling
    values, length of the prompt, the row's node, and the position of the node's token.
    """
    m_t = (o_t >= 0) & (o_t < row[1])
    b_logit = tl.load(row[0] + o_t, mask=m_t, other=-float("inf")).to(tl.float32)
    if len(row) > 3 and row[3]:
        b_logit = _penalize(b_logit, o_t, m_t, row[4])
    return b_logit * row[2]


def config(num_nodes: int, vocab: int) -> dict[str, int]:
    """Slices of the vocabulary that programs count, and blocks of nodes and of tokens."""
    num_slices = min(MAX_SLICES, triton.cdiv(vocab, SLICE))
    # aligned rows of any vocabulary; the last slices may be empty then
    slice_size = triton.cdiv(triton.cdiv(vocab, num_slices), ALIGNMENT) * ALIGNMENT
    return {
        "num_slices": num_slices,
        "slice_size": slice_size,
        "BN": max(16, triton.next_power_of_2(num_nodes)),
        "BV": 1024,
    }


def tree_context(
    parents: Tensor,
    max_depth: int,
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    history: Tensor,
    block_table: Tensor,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """Depths of nodes and counts of tokens, in one launch; inputs are those of `accept`.

    Returns:
        depths: [B, N] int32; -1 for nodes that no walk of max_depth levels reaches, and padding.
        counts: [B, V] int32, written for sequences with penalties alone: twice the number of
            times that the output has a token so far, plus one where the prompt has it. The tree's
            tokens are not among them.
    """
    batch, num_nodes = parents.shape
    depths = torch.empty(batch, num_nodes, dtype=torch.int32, device=parents.device)
    counts = torch.empty(batch, vocab, dtype=torch.int32, device=parents.device)
    sizes = config(num_nodes, vocab)
    num_slices = sizes["num_slices"]
    tree_context_kernel[(batch * num_slices,)](
        parents,
        cache_len,
        values,
        words,
        history,
        block_table,
        depths,
        counts,
        *row_strides(parents, cache_len, values, words, history, block_table),
        num_nodes,
        max_depth,
        vocab,
        sizes["slice_size"],
        num_slices,
        *history.shape,
        block_table.shape[1],
        BN=sizes["BN"],
        BV=sizes["BV"],
        num_warps=4,
    )
    return depths, counts


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability: integers alone."""
    integers = ("parents", "cache_len", "history", "block_table", "depths", "counts")
    types = {torch.int32: integers, torch.int64: ("words",), torch.float32: ("values",)}
    for block_n in (16, 64, 256, 1024):
        name, block_v = f"context-nodes{block_n}", config(block_n, 131072)["BV"]
        context = Shipped.of(name, tree_context_kernel, types, BN=block_n, BV=block_v)
        yield from with_any_vocab(context)
