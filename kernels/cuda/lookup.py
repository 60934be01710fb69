"""`specc::lookup` in two launches: the best place of each part of a context, then what followed it.

Parts are those of the longest context that the block table has room for, so that shapes do not
depend on lengths; a program whose part lies after its sequence's end ends at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import check
from specc.kernels.cuda.trees import check_history, token_places
from specc.speculation.tree import MAX_NODES

# places of a program
PART = 1024
# parts whose best places are compared at once
PARTS = 128
# of what lies in no block: differs from all tokens
NO_TOKEN = tl.constexpr(-(1 << 63))
_COUNTS = ("table_stride", "num_columns", "num_blocks", "block_size", "num_last", "num_parts")


@triton.jit
def tokens_at(b_place, history, p_table, block_size, num_columns, num_blocks):
    """int64 tokens of one sequence; `NO_TOKEN` at places that it does not have."""
    b_row = token_places(b_place, p_table, block_size, num_columns, num_blocks)
    b_token = tl.load(history + b_row, mask=b_row >= 0, other=0).to(tl.int64)
    return tl.where(b_row >= 0, b_token, NO_TOKEN)


@triton.jit(do_not_specialize=[*_COUNTS, "ngram"])
def lookup_parts_kernel(
    history,
    block_table,
    cache_len,
    last_tokens,
    keys,
    table_stride,
    num_columns,
    num_blocks,
    block_size,
    num_last,
    ngram,
    num_parts,
    PART: tl.constexpr,
):
    i_b = tl.program_id(1).to(tl.int64)
    i_p = tl.program_id(0)
    length = tl.load(cache_len + i_b)
    root = tl.load(last_tokens + (i_b + 1) * num_last - 1)
    p_table = block_table + i_b * table_stride
    # places where an earlier suffix may end
    o = i_p * PART + tl.arange(0, PART)
    b_place = tl.where(o < length, o, -1)
    b_token = tokens_at(b_place, history, p_table, block_size, num_columns, num_blocks)
    m_equal = (b_token == root) & (b_token != NO_TOKEN)
    b_matched = m_equal.to(tl.int32)
    back = 1
    while (back < ngram) & (tl.max(m_equal.to(tl.int32), 0) > 0):
        b_place = tl.where(m_equal, o - back, -1)
        b_token = tokens_at(b_place, history, p_table, block_size, num_columns, num_blocks)
        wanted = tokens_at(length - back, history, p_table, block_size, num_columns, num_blocks)
        m_equal = m_equal & (b_token == wanted) & (b_token != NO_TOKEN)
        b_matched += m_equal.to(tl.int32)
        back += 1
    # the longest, and of these the latest
    b_key = tl.where(b_matched > 0, (b_matched.to(tl.int64) << 32) | o, 0)
    tl.store(keys + i_b * num_parts + i_p, tl.max(b_key, 0))


@triton.jit(do_not_specialize=[*_COUNTS, "num_tokens"])
def lookup_tokens_kernel(
    history,
    block_table,
    cache_len,
    last_tokens,
    keys,
    tokens,
    parents,
    table_stride,
    num_columns,
    num_blocks,
    block_size,
    num_last,
    num_tokens,
    num_parts,
    PARTS: tl.constexpr,
    BL: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, PARTS)
    o_l = tl.arange(0, BL)
    b_key = tl.zeros([PARTS], tl.int64)
    for i in range(0, num_parts, PARTS):
        m_p = i + o_p < num_parts
        b_key = tl.maximum(b_key, tl.load(keys + i_b * num_parts + i + o_p, mask=m_p, other=0))
    key = tl.max(b_key, 0)
    is_found = key > 0
    last = (key & 0x7FFFFFFF).to(tl.int32)
    length = tl.load(cache_len + i_b)
    root = tl.load(last_tokens + (i_b + 1) * num_last - 1)
    # what followed; after the root, which is the last of it, it begins again
    period = tl.maximum(length - last, 1)
    b_place = last + 1 + (o_l - 1) % period
    is_read = is_found & (o_l > 0) & (b_place < length)
    p_table = block_table + i_b * table_stride
    b_read = tl.where(is_read, b_place, -1)
    b_token = tokens_at(b_read, history, p_table, block_size, num_columns, num_blocks)
    b_token = tl.where(b_token == NO_TOKEN, 0, b_token)
    b_token = tl.where(is_read, b_token, tl.where(is_found | (o_l == 0), root, 0))
    m_l = o_l <= num_tokens
    o_out = i_b * (num_tokens + 1) + o_l
    tl.store(tokens + o_out, b_token, mask=m_l)
    tl.store(parents + o_out, tl.where(is_found, o_l - 1, -1), mask=m_l)


def tokens_config(num_tokens: int) -> dict[str, int]:
    block = triton.next_power_of_2(num_tokens + 1)
    return {"PARTS": PARTS, "BL": block, "num_warps": 1 if block <= 128 else 4}


def lookup(
    history: Tensor,
    block_table: Tensor,
    cache_len: Tensor,
    last_tokens: Tensor,
    ngram: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    check_history("lookup", history, block_table, cache_len, last_tokens)
    is_right = ngram >= 1 and 1 <= num_tokens < MAX_NODES
    found = f"an ngram of {ngram} and {num_tokens} tokens"
    check(is_right, "lookup", found, f"1 or more, and 1 … {MAX_NODES - 1}")
    batch, device = len(cache_len), history.device
    num_blocks, block_size = history.shape
    num_columns = block_table.shape[1]
    tokens = torch.empty(batch, num_tokens + 1, dtype=torch.int64, device=device)
    parents = torch.empty(batch, num_tokens + 1, dtype=torch.int32, device=device)
    if not batch:
        return tokens, parents
    num_parts = triton.cdiv(num_columns * block_size, PART)
    keys = torch.empty(batch, num_parts, dtype=torch.int64, device=device)
    inputs = (history, block_table, cache_len, last_tokens, keys)
    shape = (block_table.stride(0), num_columns, num_blocks, block_size, last_tokens.shape[1])
    if num_parts:
        lookup_parts_kernel[(num_parts, batch)](*inputs, *shape, ngram, num_parts, PART=PART)
    lookup_tokens_kernel[(batch,)](
        *inputs,
        tokens,
        parents,
        *shape,
        num_tokens,
        num_parts,
        **tokens_config(num_tokens),
    )
    return tokens, parents


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability: a few integers."""
    integers, tokens = ("history", "block_table", "cache_len"), ("last_tokens", "keys")
    types = {torch.int32: integers, torch.int64: tokens}
    yield Shipped.of("parts", lookup_parts_kernel, types, PART=PART)
    types = {torch.int32: (*integers, "parents"), torch.int64: (*tokens, "tokens")}
    for num_tokens in (3, 7, 15, 63, 1023):
        sizes = tokens_config(num_tokens)
        yield Shipped.of(f"tokens-{num_tokens}", lookup_tokens_kernel, types, **sizes)
