"""`specc::accept_greedy` in two launches: the argmax of parts of all rows, then the walk.

Which rows the walk will visit is known on the device alone, so all of them are reduced; the walk
then reads a few integers a node.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.tree_expand import DTYPES, NO_KEY, check_logits, order_key, token_of
from specc.tree import MAX_NODES

# programs beyond this many gain nothing: parts of rows grow instead
MAX_PROGRAMS = 2048


@triton.jit
def best_of_parts_kernel(
    logits, best, row_stride, vocab, num_parts, NUM_BLOCKS: tl.constexpr, BV: tl.constexpr
):
    i_r = (tl.program_id(0) // num_parts).to(tl.int64)
    i_p = tl.program_id(0) % num_parts
    o_v = i_p * (NUM_BLOCKS * BV) + tl.arange(0, BV)
    # a token beyond the row is -inf behind all tokens of the row: it never wins
    b_best = tl.full([BV], -float("inf"), tl.float32)
    b_token = o_v
    for i in range(NUM_BLOCKS):
        o_t = o_v + i * BV
        b_logit = tl.load(
            logits + i_r * row_stride + o_t, mask=o_t < vocab, other=-float("inf")
        ).to(tl.float32)
        m_better = (b_logit > b_best) | ((b_logit != b_logit) & (b_best == b_best))
        b_best = tl.where(m_better, b_logit, b_best)
        b_token = tl.where(m_better, o_t, b_token)
    tl.store(best + i_r * num_parts + i_p, tl.max(order_key(b_best, b_token), 0))


@triton.jit
def decide_greedy(best, i_row, num_parts, BS: tl.constexpr):
    """Token that the target wants after a node: the seam for other rules."""
    o_s = tl.arange(0, BS)
    b_key = tl.load(best + i_row * num_parts + o_s, mask=o_s < num_parts, other=NO_KEY)
    return token_of(tl.max(b_key, 0))


@triton.jit
def walk_kernel(
    best,
    tokens,
    parents,
    path,
    num_accepted,
    output_tokens,
    token_stride,
    parent_stride,
    num_nodes,
    max_depth,
    num_parts,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    m_n = o_n < num_nodes
    b_token = tl.load(tokens + i_b * token_stride + o_n, mask=m_n, other=-1)  # [BN]
    b_parent = tl.load(parents + i_b * parent_stride + o_n, mask=m_n, other=-1)  # [BN]
    o_d = tl.arange(0, BD)
    b_path = tl.where(o_d == 0, 0, -1)  # [BD]
    b_output = tl.full([BD], -1, tl.int64)
    node = tl.full([], 0, tl.int32)
    depth = tl.full([], 0, tl.int32)
    is_alive = tl.full([], 1, tl.int32)
    while is_alive > 0:
        wanted = decide_greedy(best, i_b * num_nodes + node, num_parts, BS)
        b_output = tl.where(o_d == depth, wanted, b_output)
        m_child = (b_parent == node) & (b_token == wanted)
        child = tl.min(tl.where(m_child, o_n, BN), 0)
        is_alive = ((child < BN) & (depth < max_depth)).to(tl.int32)
        node = tl.where(is_alive > 0, child, node)
        depth += is_alive
        b_path = tl.where((o_d == depth) & (is_alive > 0), node, b_path)
    m_d = o_d <= max_depth
    tl.store(path + i_b * (max_depth + 1) + o_d, b_path, mask=m_d)
    tl.store(output_tokens + i_b * (max_depth + 1) + o_d, b_output, mask=m_d)
    tl.store(num_accepted + i_b, depth)


def config(num_rows: int, vocab: int) -> dict[str, int]:
    """Block of tokens and blocks a part: as many parts as fill a device, and no more."""
    block = 256 if vocab <= 4096 else 2048
    total = triton.cdiv(vocab, block)
    num_blocks = 1
    while num_blocks < total and num_rows * triton.cdiv(total, num_blocks) > MAX_PROGRAMS:
        num_blocks *= 2
    return {
        "BV": block,
        "NUM_BLOCKS": num_blocks,
        "num_parts": triton.cdiv(total, num_blocks),
        "num_warps": 4,
    }


def walk_warps(num_nodes: int) -> int:
    """One warp reduces without a barrier; wide trees do not fit its registers."""
    return 1 if num_nodes <= 256 else 4


def accept_greedy(
    logits: Tensor, tokens: Tensor, parents: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    check_logits(logits)
    _check_trees(logits, tokens, parents, max_depth)
    batch, num_nodes = tokens.shape
    num_rows, vocab = logits.shape
    device = logits.device
    path = torch.empty(batch, max_depth + 1, dtype=torch.int32, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int32, device=device)
    output_tokens = torch.empty(batch, max_depth + 1, dtype=torch.int64, device=device)
    if batch == 0:
        return path, num_accepted, output_tokens
    sizes = config(num_rows, vocab)
    num_parts = sizes["num_parts"]
    best = torch.empty(num_rows, num_parts, dtype=torch.int64, device=device)
    best_of_parts_kernel[(num_rows * num_parts,)](
        logits,
        best,
        logits.stride(0),
        vocab,
        num_parts,
        NUM_BLOCKS=sizes["NUM_BLOCKS"],
        BV=sizes["BV"],
        num_warps=sizes["num_warps"],
    )
    walk_kernel[(batch,)](
        best,
        tokens,
        parents,
        path,
        num_accepted,
        output_tokens,
        tokens.stride(0),
        parents.stride(0),
        num_nodes,
        max_depth,
        num_parts,
        BN=triton.next_power_of_2(num_nodes),
        BD=triton.next_power_of_2(max_depth + 1),
        BS=triton.next_power_of_2(num_parts),
        num_warps=walk_warps(num_nodes),
    )
    return path, num_accepted, output_tokens


def _check_trees(logits: Tensor, tokens: Tensor, parents: Tensor, max_depth: int) -> None:
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or parents.dtype != torch.int32:
        raise ValueError(
            f"accept_greedy: found tokens {list(tokens.shape)} of {tokens.dtype}, parents of"
            f" {parents.dtype}; needed [B, N] of int64, int32"
        )
    num_nodes = tokens.shape[1]
    if parents.shape != tokens.shape or logits.shape[0] != tokens.numel():
        raise ValueError(
            f"accept_greedy: found tokens {list(tokens.shape)}, parents {list(parents.shape)},"
            f" {logits.shape[0]} rows of logits; needed [B, N], [B, N], B * N"
        )
    if not 1 <= num_nodes <= MAX_NODES or not 0 <= max_depth < MAX_NODES:
        raise ValueError(
            f"accept_greedy: found {num_nodes} nodes, max_depth {max_depth}; needed 1 …"
            f" {MAX_NODES}, 0 … {MAX_NODES - 1}"
        )
    if num_nodes > 1 and (tokens.stride(1) != 1 or parents.stride(1) != 1):
        raise ValueError(
            f"accept_greedy: found strides {tokens.stride()} and {parents.stride()};"
            " needed rows of one piece, (any, 1)"
        )


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability: comparisons alone."""
    for dtype in DTYPES:
        for num_blocks in (1, 2, 4, 8, 16, 32, 64, 128):
            yield Shipped(
                name=f"best-{TYPE_NAMES[dtype]}-blocks{num_blocks}",
                kernel=best_of_parts_kernel,
                signature={
                    "logits": f"*{TYPE_NAMES[dtype]}",
                    "best": "*i64",
                    "row_stride": "i32",
                    "vocab": "i32",
                    "num_parts": "i32",
                },
                constexprs={"NUM_BLOCKS": num_blocks, "BV": 2048},
                num_warps=4,
                num_stages=3,
                divisible=("logits", "best", "row_stride", "vocab"),
            )
    for block_n, block_d in ((1, 1), (8, 8), (32, 8), (64, 8), (256, 16), (1024, 64), (1024, 1024)):
        # the parts of one sequence's rows: those of a larger batch are fewer
        num_parts = config(block_n, 131072)["num_parts"]
        yield Shipped(
            name=f"walk-nodes{block_n}-depth{block_d}",
            kernel=walk_kernel,
            signature={
                **dict.fromkeys(("best", "tokens", "output_tokens"), "*i64"),
                **dict.fromkeys(("parents", "path", "num_accepted"), "*i32"),
                **dict.fromkeys(("token_stride", "parent_stride", "num_nodes"), "i32"),
                **dict.fromkeys(("max_depth", "num_parts"), "i32"),
            },
            constexprs={"BN": block_n, "BD": block_d, "BS": triton.next_power_of_2(num_parts)},
            num_warps=walk_warps(block_n),
            num_stages=3,
            divisible=("best", "tokens", "parents", "path", "num_accepted", "output_tokens"),
        )
