"""Oracles of specc's operators in plain torch; every other lowering is tested against these.

They favor clarity over speed and may read values on the host, which no GPU lowering does.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specc.artifact.weight_layout import from_blocks
from specc.kernels.reference.dense import capped, softmax_beside
from specc.kernels.reference.kv_rows import columns_of, read_rows, store_rows
from specc.speculation.tree import WORD_BITS

# scores of a sequence that exist at one time, of all heads: 256 MiB, and as much of probabilities
_MOST_SCORES = 1 << 26


def tree_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
    sink_logits: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    sink: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Write the in-flight K and V to the paged cache, then attend to prefix and tree ancestors.

    Args:
        q: [H, Nt, D] queries of the in-flight tokens of all B sequences, flat.
        k: [HK, Nt, D] keys; HK divides H.
        v: [HK, Nt, DV] values.
        k_cache: [blocks, block_size, HK, D], mutated; of int8 [blocks, block_size, HK, D + 4], see
            `store_rows`. All tokens, those of this pass, too, are read as they are stored.
        v_cache: likewise with rows of DV, mutated.
        q_start: [B + 1] int32; sequence b owns tokens q_start[b] … q_start[b + 1] - 1.
        position: [Nt] int64 position of each token in its sequence (what rotary embedding used).
        slot: [Nt] int32 row of its sequence's cache that each token is written to; -1 is a dead
            token: nothing is written and its output is zero.
        cache_len: [B] int32 committed rows. Region node j lives in slot cache_len + j.
        ancestors: [Nt, W] int64; bit j of word w allows region node 64w + j. None is causal: a
            token attends to slots 0 … position, which needs slot == position.
        block_table: [B, n] int32 block ids of each sequence, in slot order.
        scale: factor of the scores.
        window: keys at positions ≤ position - window are cut; 0 is no limit.
        sink: the first `sink` keys are never cut.
        sink_logits: [H] in the dtype of q: a score of each head that takes its share of the
            softmax and has no value, or None.
        softcap: scores are softcap · tanh(score / softcap), after the scale; 0 is none.
    Returns:
        [H, Nt, DV] in the dtype of q, laid out as [Nt, H, DV], which the next projection reads in
        one piece; softmax and accumulation are in float32.
    Source: tree attention of SpecInfer, arXiv:2305.09781 §4.
    """
    write_kv_reference(k, v, k_cache, v_cache, q_start, slot, block_table)
    return attend_reference(
        q,
        k_cache,
        v_cache,
        q_start,
        position,
        slot,
        cache_len,
        ancestors,
        block_table,
        sink_logits,
        scale=scale,
        window=window,
        sink=sink,
        softcap=softcap,
    )


def write_kv_reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
) -> None:
    """Write the in-flight K and V to the paged cache; arguments as of `tree_attention_reference`.

    Dead tokens write nothing.
    """
    flat_k = k_cache.view(-1, *k_cache.shape[2:])
    flat_v = v_cache.view(-1, *v_cache.shape[2:])
    for b, (first, last) in enumerate(itertools.pairwise(q_start.tolist())):
        slots = slot[first:last].long()
        live = slots >= 0
        rows = _cache_rows(block_table[b], slots[live], k_cache.shape[1])
        flat_k[rows] = store_rows(k[:, first:last][:, live].transpose(0, 1), flat_k.dtype)
        flat_v[rows] = store_rows(v[:, first:last][:, live].transpose(0, 1), flat_v.dtype)


def rows_at_once(num_heads: int, length: int) -> int:
    """Tokens of a sequence whose scores over `length` keys are kept at one time; at least 1."""
    return max(1, _MOST_SCORES // (num_heads * max(length, 1)))


def attend_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
    sink_logits: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    sink: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attend to prefix and tree ancestors, all of them in the cache by now.

    Arguments and result are those of `tree_attention_reference`.
    """
    num_heads, num_tokens, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    flat_k = k_cache.view(-1, *k_cache.shape[2:])
    flat_v = v_cache.view(-1, *v_cache.shape[2:])
    out = q.new_zeros(num_tokens, num_heads, columns_of(v_cache)).transpose(0, 1)
    beside = None if sink_logits is None else sink_logits.view(num_kv_heads, group, 1)
    starts = q_start.tolist()
    lens = cache_len.tolist()
    for b, (first, last) in enumerate(itertools.pairwise(starts)):
        if first == last:
            continue
        length = int(slot[first:last].max()) + 1
        if length <= 0:
            continue
        columns = torch.arange(length, device=q.device)
        rows = _cache_rows(block_table[b], columns, k_cache.shape[1])
        keys = read_rows(flat_k[rows]).permute(1, 2, 0)  # [HK, D, S]
        own_values = read_rows(flat_v[rows])
        step = rows_at_once(num_heads, length)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            positions = position[begin:end, None]
            if ancestors is None:
                allowed = columns <= positions  # [T, S]
                in_prefix = torch.ones_like(columns, dtype=torch.bool)
            else:
                node = (columns - lens[b]).clamp(min=0)
                words = ancestors[begin:end][:, node // WORD_BITS]
                in_prefix = columns < lens[b]
                allowed = in_prefix | ((words >> (node % WORD_BITS)) & 1).bool()
            if window:
                allowed = allowed & ((columns > positions - window) | (columns < sink) | ~in_prefix)
            live = slot[begin:end] >= 0
            # rows that no live token sees may hold anything, and 0 · NaN is NaN
            seen = (allowed & live[:, None]).any(dim=0)
            values = own_values.masked_fill(~seen[:, None, None], 0.0).transpose(0, 1)  # [HK, S, D]
            queries = q[:, begin:end].float().reshape(num_kv_heads, -1, head_dim)  # [HK, G·T, D]
            scores = capped((queries @ keys) * scale, softcap)
            scores = scores.view(num_kv_heads, group, end - begin, length)
            scores = scores.masked_fill(~allowed, float("-inf"))
            probs = softmax_beside(scores, beside).view(num_kv_heads, -1, length)
            result = (probs @ values).view(num_heads, end - begin, -1)
            out[:, begin:end] = torch.where(live[None, :, None], result, 0.0).to(out.dtype)
    return out


def linear_reference(
    input: Tensor, weight: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """Project rows: what CPU lowerings put in place of `aten.linear`.

    Args:
        input: [M, K]; M may be 0.
        weight: [N, K] in blocks, see `specc.artifact.weight_layout`.
        bias: [N], or None.
        out_features: N.
    Returns:
        [M, N] in the dtype of the input, accumulated in float32.
    """
    weight = from_blocks(weight, (out_features, input.shape[1]))
    return torch.nn.functional.linear(input, weight, bias)


def embedding_of_blocks_reference(
    weight: Tensor, tokens: Tensor, num_embeddings: int, width: int
) -> Tensor:
    """Look tokens up in a table that lies as `specc.linear` reads it: a projection is tied to it.

    Args:
        weight: [N, K] in blocks, see `specc.artifact.weight_layout`.
        tokens: [T] int64, each in 0 … N - 1.
        num_embeddings: N.
        width: K.
    Returns:
        [T, K] in the dtype of the weight.
    """
    rows = from_blocks(weight, (num_embeddings, width))
    return torch.nn.functional.embedding(tokens, rows)


def tree_expand_reference(logits: Tensor, num_children: int) -> Tensor:
    """Children of each frontier node: its most likely tokens.

    Args:
        logits: [R, V] draft logits, one row a frontier node.
        num_children: k, at least 1.
    Returns:
        [R, k] int64 token ids by descending logit; equal logits by ascending id, so that a draft
        equal to its target proposes the target's own argmax even at an exact tie.
    """
    if num_children == 1:
        return logits.argmax(dim=-1, keepdim=True)
    # stable: equal logits keep the order of their ids
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :num_children].clone(memory_format=torch.contiguous_format)


def accept_winners_reference(
    winners: Tensor, tokens: Tensor, parents: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree from its root, from a node to the child that carries the target's token.

    Args:
        winners: [B, N] int64 token that the target puts out after each node; -1 is none: the walk
            ends there with token 0, as that of padding does.
        tokens: [B, N] int64 token of each node; node 0 is the root.
        parents: [B, N] int32, -1 at the root and at dead nodes; the first of siblings with one
            token is entered.
        max_depth: levels below the root that are walked.
    Returns:
        path: [B, max_depth + 1] int32 accepted node ids from the root on, then -1.
        num_accepted: [B] int32 accepted draft tokens, bonus not counted.
        output_tokens: [B, max_depth + 1] int64 accepted tokens and the bonus token, then -1.
    Source: greedy verification of SpecInfer, arXiv:2305.09781 algorithm 2.
    """
    batch, num_nodes = tokens.shape
    node = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    alive = torch.ones(batch, dtype=torch.bool, device=tokens.device)
    path = torch.full((batch, max_depth + 1), -1, dtype=torch.int32, device=tokens.device)
    output = torch.full((batch, max_depth + 1), -1, dtype=torch.int64, device=tokens.device)
    num_accepted = torch.zeros(batch, dtype=torch.int32, device=tokens.device)
    path[:, 0] = 0
    is_root = torch.arange(num_nodes, device=tokens.device) == 0
    for depth in range(max_depth + 1):
        wanted = winners.gather(1, node[:, None])  # [B, 1]
        output[:, depth] = torch.where(alive, wanted[:, 0].clamp(min=0), output[:, depth])
        if depth == max_depth:
            break
        match = (parents == node[:, None]) & (tokens == wanted) & (wanted >= 0) & ~is_root
        alive = alive & match.any(dim=1)
        node = torch.where(alive, match.int().argmax(dim=1), node)
        path[:, depth + 1] = torch.where(alive, node.int(), -1)
        num_accepted += alive.int()
    return path, num_accepted, output


def tree_rows_reference(cache_len: Tensor, nodes: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """Where nodes of a tree stand in each sequence: node -1 is the token before the root.

    Args:
        cache_len: [B] int32 committed rows; the root's row is the next one.
        nodes: [M] int32 node ids; a node's row is its id after the committed ones.
        depths: [M] int32 depth of each node.
    Returns:
        slot: [B * M] int32 row of each node, -1 where there is none.
        position: [B * M] int64 position of each node, at least 0.
    """
    slot = (cache_len[:, None] + nodes).flatten()
    position = (cache_len[:, None] + depths).flatten().clamp(min=0)
    return slot.int(), position.long()


def commit_rows_reference(
    path: Tensor, cache_len: Tensor, slot_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of a model's cache that a step commits: its path as far as the model was fed it.

    Args:
        path: [B, P] int32 accepted nodes from the root on, then -1.
        cache_len: [B] int32 committed rows; a sequence with fewer than 0 commits nothing.
        slot_of: [N] or [B, N] int32 row after the committed ones in which the model holds each
            node, -1 where it was never fed it.
    Returns:
        source: [B, P] int32 slot of each committed node, -1 from the first node without a row on.
        length: [B] int32 committed rows after the step.
    """
    slots = slot_of.expand(path.shape[0], -1).gather(1, path.clamp(min=0).long())
    is_kept = (path >= 0) & (slots >= 0) & (cache_len >= 0)[:, None]
    is_kept = is_kept.int().cumprod(dim=1).bool()
    source = torch.where(is_kept, slots + cache_len[:, None], -1)
    return source.int(), (cache_len + is_kept.sum(dim=1)).int()


def next_tokens_reference(
    last_tokens: Tensor, output_tokens: Tensor, num_accepted: Tensor
) -> Tensor:
    """The last tokens of each sequence after a step, as many as were known before it.

    Args:
        last_tokens: [B, C] int64 before it, C at least 1.
        output_tokens: [B, P] int64 accepted tokens and the bonus token, then -1.
        num_accepted: [B] int32.
    Returns:
        [B, C] int64; the last is the bonus token.
    """
    run = torch.cat([last_tokens, output_tokens], dim=1)
    places = torch.arange(1, last_tokens.shape[1] + 1, device=run.device)
    return run.gather(1, num_accepted[:, None].long() + places)


def leave_step_reference(
    results: Tensor,
    last_tokens: Tensor,
    cache_len: Tensor,
    num_accepted: Tensor,
    output_tokens: Tensor,
    next_cache_len: Tensor,
    next_last_tokens: Tensor,
    draft_lens: Tensor | None,
) -> None:
    """Leave what the host reads of a step, and the state that the next one starts from.

    Args:
        results: [B, R] int64, mutated: number of accepted tokens, output tokens, committed rows of
            the target, and of each draft; columns after these stay.
        last_tokens: [B, C] int64, mutated.
        cache_len: [B] int32, mutated.
        num_accepted: [B] int32.
        output_tokens: [B, P] int64.
        next_cache_len: [B] int32.
        next_last_tokens: [B, C] int64.
        draft_lens: [drafts, B] int32 or None.
    """
    columns = [num_accepted[:, None], output_tokens, next_cache_len[:, None]]
    if draft_lens is not None:
        columns.append(draft_lens.t())
    found = torch.cat([column.long() for column in columns], dim=1)
    results[:, : found.shape[1]] = found
    last_tokens.copy_(next_last_tokens)
    cache_len.copy_(next_cache_len)


def commit_kv_reference(slab: Tensor, source: Tensor, target: Tensor, block_table: Tensor) -> None:
    """Move accepted rows of all layers to the end of the committed prefix.

    Args:
        slab: [L, 2, blocks, block_size, HK, D], mutated; rows of int8 move with their scales.
            Of rows that hold K and V the second size is 1.
        source: [B, P] int64 slot to read of each move, -1 for none.
        target: [B, P] int64 slot to write of each move, -1 for none.
        block_table: [B, n] int32.

    All rows are read before any is written: sources and targets may overlap.
    """
    block_size = slab.shape[3]
    live = (source >= 0) & (target >= 0) & (source != target)
    sequence = live.nonzero()[:, 0]

    def rows(slots: Tensor) -> Tensor:
        slots = slots[live].long()
        return block_table[sequence, slots // block_size].long() * block_size + slots % block_size

    # a slab of no layer has no size that could be told from the others
    flat = slab.view(*slab.shape[:2], slab.shape[2] * slab.shape[3], *slab.shape[4:])
    flat[:, :, rows(target)] = flat[:, :, rows(source)]


def grouped_mm_reference(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each run of rows with its expert's matrix.

    Args:
        x: [M, K] rows sorted by expert.
        weight: [E, K, N], any strides.
        ends: [E] int32; expert e owns rows ends[e - 1] … ends[e] - 1.
    Returns:
        [M, N]; rows from ends[E - 1] on are zero.
    """
    out = x.new_zeros(x.shape[0], weight.shape[2])
    first = 0
    for expert, last in enumerate(ends.tolist()):
        if last > first:
            torch.mm(x[first:last], weight[expert], out=out[first:last])
        first = last
    return out


def _cache_rows(blocks: Tensor, slots: Tensor, block_size: int) -> Tensor:
    """Rows of the flat cache that slots of one sequence lie in."""
    return blocks.long()[slots // block_size] * block_size + slots % block_size
