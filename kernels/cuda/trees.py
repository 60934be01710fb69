"""Trees that come as data: where a draft's rows of merged nodes lie, a vote, and the token history.

One launch each; what a table, an image or a count does not allow is neither read nor written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.dependent import launch_options, wait_for_earlier, with_dependent
from specc.kernels.cuda.merge import check_nodes
from specc.kernels.cuda.shipped import Shipped, Types
from specc.kernels.cuda.strided_rows import check, check_tensors, said

BLOCK = 1024
MAX_DRAFTS = 64


@triton.jit
def token_places(b_place, p_table, block_size, num_columns, num_blocks):
    """Where tokens lie in the flat history; -1 for what is in no block of it."""
    b_column = b_place // block_size
    m_column = (b_place >= 0) & (b_column < num_columns)
    b_block = tl.load(p_table + b_column, mask=m_column, other=-1)
    m_block = (b_block >= 0) & (b_block < num_blocks)
    return tl.where(m_block, b_block.to(tl.int64) * block_size + b_place % block_size, -1)


@triton.jit(do_not_specialize=["image_stride", "slot_stride", "num_own", "num_nodes"])
def image_slots_kernel(
    image,
    slots,
    out,
    image_stride,
    slot_stride,
    num_own,
    num_nodes,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    i_b = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    p_image = image + i_b * image_stride
    p_slots = slots + i_b * slot_stride
    b_first = tl.full([BN], 0, tl.int32) + num_own
    for i in range(0, num_own, BT):
        o_t = i + tl.arange(0, BT)
        m_t = o_t < num_own
        b_image = tl.load(p_image + o_t, mask=m_t, other=-1)
        b_slot = tl.load(p_slots + o_t, mask=m_t, other=-1)
        m_own = (b_image[None, :] == o_n[:, None]) & (b_slot >= 0)[None, :]  # [BN, BT]
        b_first = tl.minimum(b_first, tl.min(tl.where(m_own, o_t[None, :], num_own), 1))
    b_row = tl.load(p_slots + b_first, mask=b_first < num_own, other=-1)
    tl.store(out + i_b * num_nodes + o_n, b_row, mask=o_n < num_nodes)


@triton.jit(do_not_specialize=["length"])
def vote_chain_kernel(
    tokens,
    weights,
    out,
    length,
    S: tl.constexpr,
    BS: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, BS)
    m_s = o_s < S
    p_tokens = tokens + i_b * S * length
    p_weights = weights + i_b * S
    b_agree = m_s.to(tl.int32)
    for i in range(length):
        b_own = tl.load(p_tokens + o_s * length + i, mask=m_s, other=-1)
        m_agree = (b_agree != 0) & (b_own >= 0)
        b_own = tl.where(m_agree, b_own, -1)
        b_votes = tl.zeros([BS], tl.float32)
        # one after the other: the order of a sum decides its last bit
        for s in range(S):
            token = tl.max(tl.where(o_s == s, b_own, -1), 0)
            b_votes += tl.where(b_own == token, tl.load(p_weights + s), 0.0)
        most = tl.max(tl.where(m_agree, b_votes, -1.0), 0)
        first = tl.min(tl.where(m_agree & (b_votes == most), o_s, BS), 0)
        token = tl.max(tl.where(o_s == first, b_own, -1), 0)
        tl.store(out + i_b * length + i, token)
        b_agree = (m_agree & (b_own == token)).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "table_stride",
        "num_last",
        "width",
        "num_columns",
        "num_blocks",
        "block_size",
        "count",
    ]
)
def record_tokens_kernel(
    history,
    block_table,
    cache_len,
    last_tokens,
    output_tokens,
    num_accepted,
    table_stride,
    num_last,
    width,
    num_columns,
    num_blocks,
    block_size,
    count,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_earlier(IS_DEPENDENT)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < count
    # the root, and then the output
    o_b = (o // (width + 1)).to(tl.int64)
    o_i = o % (width + 1)
    b_len = tl.load(cache_len + o_b, mask=m, other=-1)
    b_accepted = tl.load(num_accepted + o_b, mask=m, other=-1)
    m &= (b_len >= 0) & (o_i < b_accepted + 2)
    b_root = tl.load(last_tokens + (o_b + 1) * num_last - 1, mask=m & (o_i == 0))
    b_token = tl.load(output_tokens + o_b * width + o_i - 1, mask=m & (o_i > 0))
    b_place = tl.where(m, b_len + o_i, -1)
    p_table = block_table + o_b * table_stride
    b_row = token_places(b_place, p_table, block_size, num_columns, num_blocks)
    b_token = tl.where(o_i == 0, b_root, b_token).to(tl.int32)
    tl.store(history + b_row, b_token, mask=b_row >= 0)


def image_config(num_own: int, num_nodes: int) -> dict[str, int]:
    """A node takes the first of its own nodes: [BN, BT] pairs at a time."""
    block_n = min(triton.next_power_of_2(num_nodes), 32)
    return {"BT": min(triton.next_power_of_2(num_own), 64), "BN": block_n, "num_warps": 4}


def vote_config(num_drafts: int) -> dict[str, int]:
    """One warp reduces without a barrier."""
    return {"S": num_drafts, "BS": triton.next_power_of_2(num_drafts), "num_warps": 1}


def image_slots(image: Tensor, slots: Tensor, num_nodes: int) -> Tensor:
    check_tensors("image_slots", torch.int32, ("B", "T"), image=image)
    batch, num_own = image.shape
    check(num_own > 0, "image_slots", said("image", image), "1 column or more")
    is_right = slots.shape in ((num_own,), (batch, num_own)) and slots.dtype == torch.int32
    is_right = is_right and (num_own < 2 or slots.stride(-1) == 1)
    needed = f"[{num_own}] or {[batch, num_own]} of torch.int32, rows of one piece"
    check(is_right, "image_slots", said("slots", slots), needed)
    check_nodes("image_slots", num_nodes)
    out = torch.empty(batch, num_nodes, dtype=torch.int32, device=image.device)
    if batch:
        sizes = image_config(num_own, num_nodes)
        image_slots_kernel[(triton.cdiv(num_nodes, sizes["BN"]), batch)](
            image,
            slots,
            out,
            image.stride(0),
            slots.stride(0) if slots.dim() == 2 else 0,
            num_own,
            num_nodes,
            **sizes,
        )
    return out


def vote_chain(tokens: Tensor, weights: Tensor) -> Tensor:
    check_tensors("vote_chain", torch.int64, ("B", "S", "L"), is_contiguous=True, tokens=tokens)
    shape = tokens.shape[:2]
    check_tensors("vote_chain", torch.float32, shape, is_contiguous=True, weights=weights)
    batch, num_drafts, length = tokens.shape
    is_right = 1 <= num_drafts <= MAX_DRAFTS
    check(is_right, "vote_chain", f"{num_drafts} drafts", f"1 … {MAX_DRAFTS}")
    out = torch.empty(batch, length, dtype=torch.int64, device=tokens.device)
    if batch and length:
        vote_chain_kernel[(batch,)](tokens, weights, out, length, **vote_config(num_drafts))
    return out


def record_tokens(
    history: Tensor,
    block_table: Tensor,
    cache_len: Tensor,
    last_tokens: Tensor,
    output_tokens: Tensor,
    num_accepted: Tensor,
) -> None:
    check_history("record_tokens", history, block_table, cache_len, last_tokens)
    batch = len(cache_len)
    name, is_contiguous = "record_tokens", True
    output = {"output_tokens": output_tokens}
    check_tensors(name, torch.int64, (batch, "P"), is_contiguous=is_contiguous, **output)
    accepted = {"num_accepted": num_accepted}
    check_tensors(name, torch.int32, (batch,), is_contiguous=is_contiguous, **accepted)
    count = batch * (output_tokens.shape[1] + 1)
    if count:
        record_tokens_kernel[(triton.cdiv(count, BLOCK),)](
            history,
            block_table,
            cache_len,
            last_tokens,
            output_tokens,
            num_accepted,
            block_table.stride(0),
            last_tokens.shape[1],
            output_tokens.shape[1],
            block_table.shape[1],
            *history.shape,
            count,
            BLOCK=BLOCK,
            **launch_options(None),
        )


def check_history(
    operator: str, history: Tensor, block_table: Tensor, cache_len: Tensor, last_tokens: Tensor
) -> None:
    """Refuse what the kernels of the token history do not read.

    Raises:
        ValueError: a shape, a dtype or strides.
    """
    batch = len(cache_len)
    check_tensors(operator, torch.int32, ("blocks", "size"), is_contiguous=True, history=history)
    check_tensors(operator, torch.int32, (batch, "n"), block_table=block_table)
    check_tensors(operator, torch.int32, (batch,), is_contiguous=True, cache_len=cache_len)
    last = {"last_tokens": last_tokens}
    check_tensors(operator, torch.int64, (batch, "L"), is_contiguous=True, **last)
    found = f"history {list(history.shape)}, last_tokens {list(last_tokens.shape)}"
    has_columns = history.shape[1] > 0 and last_tokens.shape[1] > 0
    check(has_columns, operator, found, "1 column or more")


def shipped(capability: int) -> Iterator[Shipped]:
    """A few integers."""
    types: Types = {torch.int32: ("image", "slots", "out")}
    for num_own, num_nodes in ((8, 15), (64, 127)):
        name = f"image-slots-{num_own}-in-{num_nodes}"
        yield Shipped.of(name, image_slots_kernel, types, **image_config(num_own, num_nodes))
    types = {torch.int64: ("tokens", "out"), torch.float32: ("weights",)}
    for num_drafts in (2, 3, 4, 8):
        name = f"vote-{num_drafts}"
        yield Shipped.of(name, vote_chain_kernel, types, **vote_config(num_drafts))
    types = {torch.int32: ("history", "block_table", "cache_len", "num_accepted")}
    types |= {torch.int64: ("last_tokens", "output_tokens")}
    item = Shipped.of("record-tokens", record_tokens_kernel, types, BLOCK=BLOCK)
    yield from with_dependent(item, capability, None)
