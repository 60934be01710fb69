"""`specc::accept_winners` in one launch: the walk reads a few integers a node."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import check, check_tensors, row_strides
from specc.speculation.tree import MAX_NODES


@triton.jit(
    do_not_specialize=["winner_stride", "token_stride", "parent_stride", "num_nodes", "max_depth"]
)
def walk_kernel(
    winners,
    tokens,
    parents,
    path,
    num_accepted,
    output_tokens,
    winner_stride,
    token_stride,
    parent_stride,
    num_nodes,
    max_depth,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    m_n = (o_n > 0) & (o_n < num_nodes)
    b_token = tl.load(tokens + i_b * token_stride + o_n, mask=m_n, other=-1)  # [BN]
    b_parent = tl.load(parents + i_b * parent_stride + o_n, mask=m_n, other=-1)  # [BN]
    o_d = tl.arange(0, BD)
    b_path = tl.where(o_d == 0, 0, -1)  # [BD]
    b_output = tl.full([BD], -1, tl.int64)
    node = tl.full([], 0, tl.int32)
    depth = tl.full([], 0, tl.int32)
    is_alive = tl.full([], 1, tl.int32)
    while is_alive > 0:
        wanted = tl.load(winners + i_b * winner_stride + node)
        b_output = tl.where(o_d == depth, tl.maximum(wanted, 0), b_output)
        m_child = (b_parent == node) & (b_token == wanted)
        child = tl.min(tl.where(m_child, o_n, BN), 0)
        # a node without a winner ends the walk
        is_alive = ((child < BN) & (depth < max_depth) & (wanted >= 0)).to(tl.int32)
        node = tl.where(is_alive > 0, child, node)
        depth += is_alive
        b_path = tl.where((o_d == depth) & (is_alive > 0), node, b_path)
    m_d = o_d <= max_depth
    tl.store(path + i_b * (max_depth + 1) + o_d, b_path, mask=m_d)
    tl.store(output_tokens + i_b * (max_depth + 1) + o_d, b_output, mask=m_d)
    tl.store(num_accepted + i_b, depth)


def walk_warps(num_nodes: int) -> int:
    """One warp reduces without a barrier; wide trees do not fit its registers."""
    return 1 if num_nodes <= 256 else 4


def accept_winners(
    winners: Tensor, tokens: Tensor, parents: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specc.kernels.reference.core.accept_winners_reference`."""
    _check_trees(winners, tokens, parents, max_depth)
    batch, num_nodes = tokens.shape
    device = tokens.device
    path = torch.empty(batch, max_depth + 1, dtype=torch.int32, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int32, device=device)
    output_tokens = torch.empty(batch, max_depth + 1, dtype=torch.int64, device=device)
    if batch == 0:
        return path, num_accepted, output_tokens
    walk_kernel[(batch,)](
        winners,
        tokens,
        parents,
        path,
        num_accepted,
        output_tokens,
        *row_strides(winners, tokens, parents),
        num_nodes,
        max_depth,
        BN=triton.next_power_of_2(num_nodes),
        BD=triton.next_power_of_2(max_depth + 1),
        num_warps=walk_warps(num_nodes),
    )
    return path, num_accepted, output_tokens


def _check_trees(winners: Tensor, tokens: Tensor, parents: Tensor, max_depth: int) -> None:
    check_tensors("accept_winners", torch.int64, ("B", "N"), tokens=tokens)
    check_tensors("accept_winners", torch.int64, tokens.shape, winners=winners)
    check_tensors("accept_winners", torch.int32, tokens.shape, parents=parents)
    num_nodes = tokens.shape[1]
    check(
        1 <= num_nodes <= MAX_NODES and 0 <= max_depth < MAX_NODES,
        "accept_winners",
        f"{num_nodes} nodes, max_depth {max_depth}",
        f"1 … {MAX_NODES}, 0 … {MAX_NODES - 1}",
    )


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability: integers alone."""
    types = {torch.int64: ("winners", "tokens", "output_tokens")}
    types |= {torch.int32: ("parents", "path", "num_accepted")}
    for block_n, block_d in ((1, 1), (8, 8), (32, 8), (64, 8), (256, 16), (1024, 64), (1024, 1024)):
        name = f"walk-nodes{block_n}-depth{block_d}"
        sizes = {"BN": block_n, "BD": block_d, "num_warps": walk_warps(block_n)}
        yield Shipped.of(name, walk_kernel, types, **sizes)
