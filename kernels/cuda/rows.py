"""`specc::tree_rows`, `commit_rows` and `next_tokens`, one launch each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.dependent import launch_options, wait_for_earlier, with_dependent
from specc.kernels.cuda.shipped import Shipped

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
    _check_integers("tree_rows", cache_len=(cache_len, 1), nodes=(nodes, 1), depths=(depths, 1))
    if nodes.shape != depths.shape:
        raise ValueError(
            f"tree_rows: found {len(nodes)} nodes and {len(depths)} depths; needed as many of both"
        )
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
            cache_len.stride(0),
            nodes.stride(0),
            depths.stride(0),
            len(nodes),
            count,
            BLOCK=BLOCK,
        )
    return slot, position


def commit_rows(path: Tensor, cache_len: Tensor, slot_of: Tensor) -> tuple[Tensor, Tensor]:
    _check_integers(
        "commit_rows", path=(path, 2), cache_len=(cache_len, 1), slot_of=(slot_of, slot_of.dim())
    )
    batch, width = path.shape
    if len(cache_len) != batch or not 1 <= width <= BLOCK or (width > 1 and path.stride(1) != 1):
        raise ValueError(
            f"commit_rows: found path {list(path.shape)} of strides {path.stride()} and"
            f" {len(cache_len)} lengths; needed [B, 1 … {BLOCK}], rows of one piece, and B"
        )
    if slot_of.dim() != 1 and slot_of.shape[:-1] != (batch,):
        raise ValueError(
            f"commit_rows: found slot_of {list(slot_of.shape)}; needed [N] or [{batch}, N]"
        )
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
            path.stride(0),
            cache_len.stride(0),
            slot_of.stride(0) if slot_of.dim() == 2 else 0,
            slot_of.stride(-1),
            slot_of.shape[-1],
            width,
            batch,
            BB=sizes["BB"],
            BP=sizes["BP"],
            **launch_options(None),
        )
    return source, length


def next_tokens(last_tokens: Tensor, output_tokens: Tensor, num_accepted: Tensor) -> Tensor:
    _check_integers("next_tokens", num_accepted=(num_accepted, 1))
    batch = len(num_accepted)
    for name, tensor in (("last_tokens", last_tokens), ("output_tokens", output_tokens)):
        is_dense = tensor.dim() == 2 and (tensor.shape[1] == 1 or tensor.stride(1) == 1)
        if not is_dense or tensor.dtype != torch.int64 or len(tensor) != batch:
            raise ValueError(
                f"next_tokens: found {name} {list(tensor.shape)} of {tensor.dtype}, strides"
                f" {tensor.stride()}; needed [{batch}, any] of int64, rows of one piece"
            )
    columns = last_tokens.shape[1]
    if columns == 0:
        raise ValueError("next_tokens: found last_tokens without a column; needed 1 or more")
    out = torch.empty(batch, columns, dtype=torch.int64, device=last_tokens.device)
    if batch:
        next_tokens_kernel[(triton.cdiv(batch * columns, BLOCK),)](
            last_tokens,
            output_tokens,
            num_accepted,
            out,
            last_tokens.stride(0),
            output_tokens.stride(0),
            num_accepted.stride(0),
            output_tokens.shape[1],
            columns,
            batch * columns,
            BLOCK=BLOCK,
            **launch_options(None),
        )
    return out


def _check_integers(operator: str, **tensors: tuple[Tensor, int]) -> None:
    for name, (tensor, dim) in tensors.items():
        if tensor.dim() != dim or tensor.dtype != torch.int32:
            raise ValueError(
                f"{operator}: found {name} {list(tensor.shape)} of {tensor.dtype};"
                f" needed {dim} dimension{'s' * (dim > 1)} of int32"
            )


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
