"""`specc::node_winners`: the launches of `accept` before its walk, and one that ends them.

1. `tree_context`. 2. `row_filters` of the tile's rows. 3. `node_best`. 4. The best of their parts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.accept import check_history, check_trees
from specc.kernels.cuda.accept_walk import KEYS
from specc.kernels.cuda.node_best import node_best
from specc.kernels.cuda.row_filters import row_filters
from specc.kernels.cuda.row_options import check_options
from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import check
from specc.kernels.cuda.tree_context import tree_context
from specc.kernels.cuda.tree_expand import NO_KEY, token_of
from specc.sampling.rows import Rule


@triton.jit(do_not_specialize=["vocab", "num_parts"])
def winners_kernel(best, depths, winners, vocab, num_parts, BS: tl.constexpr):
    i_r = tl.program_id(0).to(tl.int64)
    winner = tl.full([], -1, tl.int64)
    # the keys of other rows were never written
    if tl.load(depths + i_r) >= 0:
        o_s = tl.arange(0, BS)
        b_key = tl.load(best + i_r * num_parts + o_s, mask=o_s < num_parts, other=NO_KEY)
        winner = tl.minimum(token_of(tl.max(b_key, 0)), vocab - 1)
    tl.store(winners + i_r, winner)


def node_winners(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    first_node: int,
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    history: Tensor,
    block_table: Tensor,
) -> Tensor:
    """See `specc.kernels.reference.accept.node_winners_reference`."""
    check_trees("node_winners", logits, tokens, parents)
    batch, num_nodes = tokens.shape
    check_options("node_winners", batch, values, words, cache_len)
    check_history("node_winners", batch, history, block_table)
    num_rows, vocab = logits.shape
    size = num_rows // max(batch, 1)
    check(
        size * batch == num_rows and 0 <= first_node <= num_nodes - size,
        "node_winners",
        f"{num_rows} rows of logits from node {first_node} on",
        f"B * T of {batch} trees of {num_nodes} nodes",
    )
    if num_rows == 0:
        return tokens.new_empty(0)
    rows = (values, words, cache_len)
    depths, counts = tree_context(parents, num_nodes - 1, *rows, history, block_table, vocab)
    depths = depths[:, first_node : first_node + size].contiguous()
    tree = (depths, counts, tokens, parents)
    stats = row_filters(
        logits, *rows, filtered=tuple(Rule), weighed=(), tree=tree, first_node=first_node
    )
    best = node_best(logits, *rows, stats, tree, all_rules=True, first_node=first_node)
    return row_winners(best, depths, vocab)


def row_winners(best: Tensor, depths: Tensor, vocab: int) -> Tensor:
    """Tokens [R] int64 of the best of R rows, in one launch; -1 where a depth is -1.

    `best` are keys [R, parts] of `node_best`, `depths` R of `tree_context`.
    """
    num_rows, num_parts = best.shape
    winners = torch.empty(num_rows, dtype=torch.int64, device=best.device)
    winners_kernel[(num_rows,)](
        best, depths, winners, vocab, num_parts,
        BS=max(KEYS, triton.next_power_of_2(num_parts)),
        num_warps=1,
    )  # fmt: skip
    return winners


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability: integers alone."""
    types = {torch.int64: ("best", "winners"), torch.int32: ("depths",)}
    yield Shipped.of("winners", winners_kernel, types, BS=KEYS, num_warps=1)
