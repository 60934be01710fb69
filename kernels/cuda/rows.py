"""`specc::tree_rows`, `commit_rows` and `next_tokens`, one launch each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.dependent import launch_options, wait_for_earlier, with_dependent
from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import check, check_tensors, row_strides, said

BLOCK = 1024


@triton.jit(do_not_specialize=["len_stride", "node_stride", "depth_stride", "num_nodes", "count"])
def tree_rows_kernel(
    cache_len,
    nodes,
    depths,
    slot,
    position,
    len_stride,
    node_stride,
    depth_stride,
    num_nodes,
    count,
    BLOCK: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < count
    o_b = (o // num_nodes).to(tl.int64)
    o_n = (o % num_nodes).to(tl.int64)
    b_len = tl.load(cache_len + o_b * len_stride, mask=m, other=0)
    b_node = tl.load(nodes + o_n * node_stride, mask=m, other=0)
    b_depth = tl.load(depths + o_n * depth_stride, mask=m, other=0)
    tl.store(slot + o, b_len + b_node, mask=m)
    tl.store(position + o, tl.maximum(b_len + b_depth, 0).to(tl.int64), mask=m)


@triton.jit(
    do_not_specialize=[
        "path_stride",
        "len_stride",
        "slot_stride",
        "slot_step",
        "num_nodes",
        "width",
        "batch",
    ]
)
def commit_rows_kernel(
    path,
    cache_len,
    slot_of,
    source,
    length,
    path_stride,
    len_stride,
    slot_stride,
    slot_step,
    num_nodes,
    width,
    batch,
    BB: tl.constexpr,
    BP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_earlier(IS_DEPENDENT)
    o_b = (tl.program_id(0) * BB + tl.arange(0, BB)).to(tl.int64)
    m_b = o_b < batch
    o_p = tl.arange(0, BP)
    m = m_b[:, None] & (o_p < width)[None, :]  # [BB, BP]
    b_path = tl.load(path + o_b[:, None] * path_stride + o_p[None, :], mask=m, other=-1)
    b_len = tl.load(cache_len + o_b * len_stride, mask=m_b, other=-1)
    m_node = (b_path >= 0) & (b_path < num_nodes) & (b_len >= 0)[:, None]
    p_slot = slot_of + o_b[:, None] * slot_stride + b_path.to(tl.int64) * slot_step
    b_slot = tl.load(p_slot, mask=m_node, other=-1)
    # nodes before the first one without a row
    b_kept = tl.min(tl.where(b_slot >= 0, BP, o_p[None, :]), 1)
    b_source = tl.where(o_p[None, :] < b_kept[:, None], b_slot + b_len[:, None], -1)
    tl.store(source + o_b[:, None] * width + o_p[None, :], b_source, mask=m)
    tl.store(length + o_b, b_len + b_kept, mask=m_b)


@triton.jit(
    do_not_specialize=[
        "last_stride",
        "output_stride",
        "accepted_stride",
        "width",
        "columns",
        "count",
    ]
)
def next_tokens_kernel(
    last_tokens,
    output_tokens,
    num_accepted,
    out,
    last_stride,
    output_stride,
    accepted_stride,
    width,
    columns,
    count,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_earlier(IS_DEPENDENT)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < count
    o_b = (o // columns).to(tl.int64)
    # place in the accepted run, which the last tokens before it precede
    b_accepted = tl.load(num_accepted + o_b * accepted_stride, mask=m, other=0)
    b_place = b_accepted + 1 + o % columns - columns
    p_output = output_tokens + o_b * output_stride + b_place
    b_run = tl.load(p_output, mask=m & (b_place >= 0) & (b_place < width), other=-1)
    p_last = last_tokens + o_b * last_stride + columns + b_place
    b_last = tl.load(p_last, mask=m & (b_place < 0) & (b_place >= -columns), other=-1)
    tl.store(out + o, tl.where(b_place < 0, b_last, b_run), mask=m)


def config(width: int) -> dict[str, int]:
    """Sequences and path nodes of a program of `commit_rows`."""
    block_p = triton.next_power_of_2(width)
    return {"BB": max(1, BLOCK // block_p), "BP": block_p}


def tree_rows(cache_len: Tensor, nodes: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    check_tensors("tree_rows", torch.int32, ("B",), cache_len=cache_len)
    check_tensors("tree_rows", torch.int32, ("N",), nodes=nodes)
    check_tensors("tree_rows", torch.int32, nodes.shape, depths=depths)
    count = len(cache_len) * len(nodes)
    slot = torch.empty(count, dtype=torch.int32, device=cache_len.device)
    position = torch.empty(count, dtype=torch.int64, device=cache_len.device)
    if count:
        tree_rows_kernel[(triton.cdiv(count, BLOCK),)](
            cache_len,
            nodes,
            depths,
            slot,
            position,
            *row_strides(cache_len, nodes, depths),
            len(nodes),
            count,
            BLOCK=BLOCK,
        )
    return slot, position


def commit_rows(path: Tensor, cache_len: Tensor, slot_of: Tensor) -> tuple[Tensor, Tensor]:
    check_tensors("commit_rows", torch.int32, ("B", "P"), path=path)
    batch, width = path.shape
    check(1 <= width <= BLOCK, "commit_rows", f"paths of {width}", f"1 … {BLOCK}")
    check_tensors("commit_rows", torch.int32, (batch,), cache_len=cache_len)
    is_right = slot_of.dim() == 1 or slot_of.shape[:-1] == (batch,)
    check(
        is_right and slot_of.dtype == torch.int32, "commit_rows",
        said("slot_of", slot_of), f"[N] or [{batch}, N] of torch.int32",
    )  # fmt: skip
    source = torch.empty(batch, width, dtype=torch.int32, device=path.device)
    length = torch.empty(batch, dtype=torch.int32, device=path.device)
    if batch:
        sizes = config(width)
        commit_rows_kernel[(triton.cdiv(batch, sizes["BB"]),)](
            path,
            cache_len,
            slot_of,
            source,
            length,
            *row_strides(path, cache_len),
            slot_of.stride(0) if slot_of.dim() == 2 else 0,
            slot_of.stride(-1),
            slot_of.shape[-1],
            width,
            batch,
            **sizes,
            **launch_options(None),
        )
    return source, length


def next_tokens(last_tokens: Tensor, output_tokens: Tensor, num_accepted: Tensor) -> Tensor:
    check_tensors("next_tokens", torch.int32, ("B",), num_accepted=num_accepted)
    batch = len(num_accepted)
    tokens = {"last_tokens": last_tokens, "output_tokens": output_tokens}
    check_tensors("next_tokens", torch.int64, (batch, "any"), **tokens)
    columns = last_tokens.shape[1]
    check(columns > 0, "next_tokens", "last_tokens without a column", "1 or more")
    out = torch.empty(batch, columns, dtype=torch.int64, device=last_tokens.device)
    if batch:
        next_tokens_kernel[(triton.cdiv(batch * columns, BLOCK),)](
            last_tokens,
            output_tokens,
            num_accepted,
            out,
            *row_strides(last_tokens, output_tokens, num_accepted),
            output_tokens.shape[1],
            columns,
            batch * columns,
            BLOCK=BLOCK,
            **launch_options(None),
        )
    return out


def shipped(capability: int) -> Iterator[Shipped]:
    """A few integers."""
    integers = ("cache_len", "nodes", "depths", "slot")
    types = {torch.int32: integers, torch.int64: ("position",)}
    yield Shipped.of("tree_rows", tree_rows_kernel, types, BLOCK=BLOCK)
    types = {torch.int32: ("path", "cache_len", "slot_of", "source", "length")}
    for width in (1, 8, 64, 1024):
        name = f"commit_rows-width{width}"
        item = Shipped.of(name, commit_rows_kernel, types, **config(width))
        yield from with_dependent(item, capability, None)
    tokens = ("last_tokens", "output_tokens", "out")
    types = {torch.int64: tokens, torch.int32: ("num_accepted",)}
    item = Shipped.of("next_tokens", next_tokens_kernel, types, BLOCK=BLOCK)
    yield from with_dependent(item, capability, None)
