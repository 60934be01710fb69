"""Trees whose shape is data: several drafts' trees merged, the best nodes of a candidate tree.

One program a sequence; every node is looked at once, in order, by vectors over all nodes. Shapes
are the worst case, and what is not needed is dead.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.shipped import Shipped, Types
from specc.kernels.cuda.strided_rows import check, check_tensors, row_strides, said
from specc.kernels.cuda.tree_expand import NO_KEY, order_key
from specc.speculation.tree import MAX_NODES, WORD_BITS

MAX_CANDIDATES = 4096


@triton.jit(do_not_specialize=["token_stride", "parent_stride", "start_stride", "num_nodes"])
def merge_trees_kernel(
    tokens,
    parents,
    start,
    out_tokens,
    out_parents,
    image,
    count,
    token_stride,
    parent_stride,
    start_stride,
    num_nodes,
    T: tl.constexpr,
    S: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    o_t = tl.arange(0, BT)
    o_n = tl.arange(0, BN)
    o_s = tl.arange(0, BS)
    b_start = tl.load(start + o_s * start_stride, mask=o_s < S, other=T)  # [BS]
    b_image = tl.full([BT], -1, tl.int32)
    b_token = tl.zeros([BN], tl.int64)
    b_parent = tl.full([BN], -1, tl.int32)
    b_count = tl.zeros([BN], tl.int32)
    num_found = tl.full([], 0, tl.int32)
    for i in range(T):
        first = tl.max(tl.where(b_start <= i, b_start, 0), 0)
        token = tl.load(tokens + i_b * token_stride + i)
        local = tl.load(parents + i_b * parent_stride + i)
        is_root = first == i
        is_child = (local >= 0) & (local < i - first) & (is_root == 0)
        # node of the parent: -1 for roots, -2 where there is none
        above = tl.max(tl.where(o_t == first + local, b_image, -1), 0)
        above = tl.where(is_root, -1, tl.where(is_child & (above >= 0), above, -2))
        m_equal = (b_parent == above) & ((b_token == token) | is_root) & (o_n < num_found)
        node = tl.min(tl.where(m_equal, o_n, BN), 0)
        is_new = (node == BN) & (above > -2)
        node = tl.where(is_new, num_found, node)
        m_new = (o_n == node) & is_new
        b_token = tl.where(m_new, token, b_token)
        b_parent = tl.where(m_new, above, b_parent)
        num_found += is_new.to(tl.int32)
        b_count += ((o_n == node) & (above > -2)).to(tl.int32)
        b_image = tl.where((o_t == i) & (above > -2), node, b_image)
    m_n = o_n < num_nodes
    tl.store(out_tokens + i_b * num_nodes + o_n, b_token, mask=m_n)
    tl.store(out_parents + i_b * num_nodes + o_n, b_parent, mask=m_n)
    tl.store(count + i_b * num_nodes + o_n, b_count, mask=m_n)
    tl.store(image + i_b * T + o_t, b_image, mask=o_t < T)


@triton.jit(do_not_specialize=["token_stride", "parent_stride", "score_stride", "num_candidates"])
def rerank_tree_kernel(
    tokens,
    parents,
    scores,
    out_tokens,
    out_parents,
    kept,
    token_stride,
    parent_stride,
    score_stride,
    num_candidates,
    N: tl.constexpr,
    BM: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    o_m = tl.arange(0, BM)
    m_m = o_m < num_candidates
    b_score = tl.load(scores + i_b * score_stride + o_m, mask=m_m, other=0.0)
    b_key = order_key(b_score, o_m)
    # NaN, which sorts above all, is least here: after -inf, by descending index as well
    b_key = tl.where(b_score != b_score, NO_KEY + (BM - o_m).to(tl.int64), b_key)
    b_key = tl.where(o_m == 0, 0x7FFFFFFFFFFFFFFF, b_key)
    b_key = tl.where(m_m, b_key, NO_KEY)  # [BM]
    if BM == 1:
        bound = tl.max(b_key, 0)
    else:
        b_best = tl.sort(b_key, descending=True)
        bound = tl.min(tl.where(o_m < N, b_best, 0x7FFFFFFFFFFFFFFF), 0)
    m_kept = (b_key >= bound) & m_m
    b_place = tl.cumsum(m_kept.to(tl.int32), 0) - 1
    b_parent = tl.load(parents + i_b * parent_stride + o_m, mask=m_m, other=-1)
    m_parent = (b_parent >= 0) & (b_parent < num_candidates)
    b_place = tl.where(m_kept, b_place, -1)
    b_above = tl.gather(b_place, tl.where(m_parent, b_parent, 0), 0)
    b_above = tl.where(m_parent, b_above, -1)
    b_token = tl.load(tokens + i_b * token_stride + o_m, mask=m_m, other=0)
    o_out = i_b * N + b_place
    tl.store(out_tokens + o_out, b_token, mask=m_kept)
    tl.store(out_parents + o_out, b_above, mask=m_kept)
    tl.store(kept + o_out, o_m, mask=m_kept)


@triton.jit(do_not_specialize=["parent_stride", "num_nodes", "num_words"])
def ancestor_words_kernel(
    parents,
    words,
    depths,
    parent_stride,
    num_nodes,
    num_words,
    BN: tl.constexpr,
    BW: tl.constexpr,
):
    i_b = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_w = tl.arange(0, BW)
    m_n = o_n < num_nodes
    p_parents = parents + i_b * parent_stride
    b_at = tl.where(m_n, o_n, -1)
    b_words = tl.zeros([BN, BW], tl.int64)
    b_steps = tl.zeros([BN], tl.int32)
    # a parent comes before its child; what does not is no parent, so that the walk ends
    while tl.max(b_at, 0) >= 0:
        b_next = tl.load(p_parents + b_at, mask=b_at >= 0, other=-1)
        # dead nodes have no parent and are not the root
        m_at = (b_at == 0) | (b_next >= 0)
        b_bit = tl.full([BN], 1, tl.int64) << (b_at & 63).to(tl.int64)
        m_word = m_at[:, None] & ((b_at >> 6)[:, None] == o_w[None, :])
        b_words = b_words | tl.where(m_word, b_bit[:, None], 0)
        b_steps += m_at.to(tl.int32)
        b_at = tl.where(b_next < b_at, b_next, -1)
    o_row = i_b * num_nodes + o_n
    m_out = m_n[:, None] & (o_w < num_words)[None, :]
    tl.store(words + o_row[:, None] * num_words + o_w[None, :], b_words, mask=m_out)
    tl.store(depths + o_row, tl.maximum(b_steps - 1, 0), mask=m_n)


def merge_config(total: int, num_nodes: int, num_trees: int) -> dict[str, int]:
    """Launch sizes: one warp, which reduces without barriers, unless registers would spill."""
    return {
        "BT": triton.next_power_of_2(total),
        "BN": triton.next_power_of_2(num_nodes),
        "BS": triton.next_power_of_2(num_trees),
        "num_warps": 1 if total <= 256 else 4,
    }


def rerank_config(num_candidates: int) -> dict[str, int]:
    block = triton.next_power_of_2(num_candidates)
    return {"BM": block, "num_warps": 8 if block > 2048 else 4 if block > 128 else 1}


def words_config(num_nodes: int) -> dict[str, int]:
    num_words = triton.cdiv(num_nodes, WORD_BITS)
    block_w = triton.next_power_of_2(num_words)
    return {"BN": min(triton.next_power_of_2(num_nodes), 128), "BW": block_w, "num_warps": 4}


def merge_trees(
    tokens: Tensor, parents: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_trees("merge_trees", tokens, parents, MAX_NODES)
    batch, total = tokens.shape
    is_right = start.dim() == 1 and start.dtype == torch.int32 and 2 <= len(start) <= total + 1
    needed = f"[S + 1] of torch.int32, 1 to {total} trees"
    check(is_right, "merge_trees", said("start", start), needed)
    num_trees = len(start) - 1
    num_nodes = 1 + total - num_trees
    out_tokens = torch.empty(batch, num_nodes, dtype=torch.int64, device=tokens.device)
    out_parents = torch.empty(batch, num_nodes, dtype=torch.int32, device=tokens.device)
    image = torch.empty(batch, total, dtype=torch.int32, device=tokens.device)
    count = torch.empty(batch, num_nodes, dtype=torch.int32, device=tokens.device)
    if batch:
        sizes = merge_config(total, num_nodes, num_trees)
        merge_trees_kernel[(batch,)](
            tokens,
            parents,
            start,
            out_tokens,
            out_parents,
            image,
            count,
            *row_strides(tokens, parents, start),
            num_nodes,
            T=total,
            S=num_trees,
            **sizes,
        )
    return out_tokens, out_parents, image, count


def rerank_tree(
    tokens: Tensor, parents: Tensor, scores: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check_trees("rerank_tree", tokens, parents, MAX_CANDIDATES)
    batch, num_candidates = tokens.shape
    check_tensors("rerank_tree", torch.float32, tokens.shape, scores=scores)
    found = f"{num_nodes} nodes of {num_candidates} candidates"
    most = min(num_candidates, MAX_NODES)
    check(1 <= num_nodes <= most, "rerank_tree", found, f"1 … {most}")
    out_tokens = torch.empty(batch, num_nodes, dtype=torch.int64, device=tokens.device)
    out_parents = torch.empty(batch, num_nodes, dtype=torch.int32, device=tokens.device)
    kept = torch.empty(batch, num_nodes, dtype=torch.int32, device=tokens.device)
    if batch:
        rerank_tree_kernel[(batch,)](
            tokens,
            parents,
            scores,
            out_tokens,
            out_parents,
            kept,
            *row_strides(tokens, parents, scores),
            num_candidates,
            N=num_nodes,
            **rerank_config(num_candidates),
        )
    return out_tokens, out_parents, kept


def ancestor_words(parents: Tensor) -> tuple[Tensor, Tensor]:
    check_tensors("ancestor_words", torch.int32, ("B", "N"), parents=parents)
    batch, num_nodes = parents.shape
    check_nodes("ancestor_words", num_nodes)
    num_words = triton.cdiv(num_nodes, WORD_BITS)
    words = torch.empty(batch * num_nodes, num_words, dtype=torch.int64, device=parents.device)
    depths = torch.empty(batch * num_nodes, dtype=torch.int32, device=parents.device)
    if batch:
        sizes = words_config(num_nodes)
        ancestor_words_kernel[(triton.cdiv(num_nodes, sizes["BN"]), batch)](
            parents, words, depths, parents.stride(0), num_nodes, num_words, **sizes
        )
    return words, depths


def check_nodes(operator: str, num_nodes: int, most: int = MAX_NODES) -> None:
    """Refuse more nodes than a tree has."""
    check(1 <= num_nodes <= most, operator, f"{num_nodes} nodes", f"1 … {most}")


def _check_trees(operator: str, tokens: Tensor, parents: Tensor, most: int) -> None:
    check_tensors(operator, torch.int64, ("B", "N"), tokens=tokens)
    check_tensors(operator, torch.int32, tokens.shape, parents=parents)
    check_nodes(operator, tokens.shape[1], most)


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability: a few integers."""
    tokens = ("tokens", "out_tokens")
    types: Types = {torch.int64: tokens}
    types |= {torch.int32: ("parents", "start", "out_parents", "image", "count")}
    for num_trees, tree_nodes in ((2, 8), (2, 32), (3, 64), (4, 256)):
        name, total = f"merge-{num_trees}x{tree_nodes}", num_trees * tree_nodes
        sizes = merge_config(total, 1 + total - num_trees, num_trees)
        yield Shipped.of(name, merge_trees_kernel, types, T=total, S=num_trees, **sizes)
    types = {torch.int64: tokens, torch.float32: ("scores",)}
    types |= {torch.int32: ("parents", "out_parents", "kept")}
    for num_candidates, num_nodes in ((43, 16), (511, 60), (1024, 256), (4096, 1024)):
        name = f"rerank-{num_candidates}-to-{num_nodes}"
        sizes = rerank_config(num_candidates)
        yield Shipped.of(name, rerank_tree_kernel, types, N=num_nodes, **sizes)
    types = {torch.int64: ("words",), torch.int32: ("parents", "depths")}
    for num_nodes in (8, 60, 256, 1024):
        name = f"ancestor-words-{num_nodes}"
        yield Shipped.of(name, ancestor_words_kernel, types, **words_config(num_nodes))
