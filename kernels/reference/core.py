"""Oracles of specc's operators in plain torch; every other lowering is tested against these.

They favor clarity over speed and may read values on the host, which no GPU lowering does.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from specc.artifact.weight_layout import from_blocks
from specc.kernels.reference.dense import capped, position_bias, softmax_beside
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
    slopes: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    sink: int = 0,
    softcap: float = 0.0,
    rounds_bias: bool = False,
    most_rows: int = 0,
    chunk: int = 0,
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
        ancestors: [Nt, W] int64; bit j of word w allows region node 64w + j, and nodes beyond all
            words are not seen. None is causal: a token attends to slots 0 … position, which needs
            slot == position.
        block_table: [B, n] int32 block ids of each sequence, in slot order.
        scale: factor of the scores.
        window: keys at positions ≤ position - window are cut; 0 is no limit.
        sink: the first `sink` keys are never cut.
        sink_logits: [H] in the dtype of q: a score of each head that takes its share of the
            softmax and has no value, or None.
        slopes: [H] float32: scores of head h get slopes[h] · (position of the key - position of
            the token), after the softcap; or None. A key's position is not its slot: region nodes
            that a token sees are its path from the root, and count back from it.
        softcap: scores are softcap · tanh(score / softcap), after the scale; 0 is none.
        rounds_bias: positions are rounded to bfloat16, so are their products with slopes, and
            their difference is scaled as scores are:
            scale · (bf16(slope · bf16(key)) - bf16(slope · bf16(token))).
        most_rows: of a sequence that has more tokens than this in the pass, rows are written, and
            outputs are zero: `attend_expanded` attends to them. 0 is no limit.
        chunk: a token sees no key before position - position % chunk, where its chunk begins, with
            a window, the first `sink` keys and a path through the region, too; 0 is no limit.
    Returns:
        [H, Nt, DV] in the dtype of q, laid out as [Nt, H, DV], which the next projection reads in
        one piece; softmax and accumulation are in float32.
    Source: tree attention of SpecInfer, arXiv:2305.09781 §4; slopes of ALiBi, arXiv:2108.12409 §3.
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
        slopes,
        scale=scale,
        window=window,
        sink=sink,
        softcap=softcap,
        rounds_bias=rounds_bias,
        most_rows=most_rows,
        chunk=chunk,
    )


def write_kv_reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
    *,
    values_in_keys: bool = False,
) -> None:
    """Write the in-flight K and V to the paged cache; arguments as of `tree_attention_reference`.

    Dead tokens write nothing. With `values_in_keys` K alone is written, as `attend_reference` says.
    """
    flat_k = k_cache.view(-1, *k_cache.shape[2:])
    flat_v = v_cache.view(-1, *v_cache.shape[2:])
    for b, (first, last) in enumerate(itertools.pairwise(q_start.tolist())):
        slots = slot[first:last].long()
        live = slots >= 0
        rows = rows_of_slots(block_table[b], slots[live], k_cache.shape[1])
        flat_k[rows] = store_rows(k[:, first:last][:, live].transpose(0, 1), flat_k.dtype)
        if not values_in_keys:
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
    slopes: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    sink: int = 0,
    softcap: float = 0.0,
    rounds_bias: bool = False,
    most_rows: int = 0,
    chunk: int = 0,
    values_in_keys: bool = False,
) -> Tensor:
    """Attend to prefix and tree ancestors, all of them in the cache by now.

    Arguments and result are those of `tree_attention_reference`. With `values_in_keys` a value is
    the first DV columns of its key, and of `v_cache` nothing but that width is read.

    Raises:
        ValueError: with `values_in_keys`, DV is more than D.
    """
    if values_in_keys:
        if v_cache.shape[3] > k_cache.shape[3]:
            raise ValueError("values that keys begin with are wider than these")
        v_cache = k_cache[..., : v_cache.shape[3]]
    num_heads, num_tokens, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    flat_k = k_cache.view(-1, *k_cache.shape[2:])
    flat_v = v_cache.flatten(0, 1)
    out = q.new_zeros(num_tokens, num_heads, columns_of(v_cache)).transpose(0, 1)
    beside = None if sink_logits is None else sink_logits.view(num_kv_heads, group, 1)
    starts = q_start.tolist()
    lens = cache_len.tolist()
    for b, (first, last) in enumerate(itertools.pairwise(starts)):
        if first == last or 0 < most_rows < last - first:
            continue
        length = int(slot[first:last].max()) + 1
        if length <= 0:
            continue
        columns = torch.arange(length, device=q.device)
        rows = rows_of_slots(block_table[b], columns, k_cache.shape[1])
        keys = read_rows(flat_k[rows]).permute(1, 2, 0)  # [HK, D, S]
        own_values = read_rows(flat_v[rows])
        step = rows_at_once(num_heads, length)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            positions = position[begin:end, None]
            key_positions = columns
            if ancestors is None:
                allowed = columns <= positions  # [T, S]
                in_prefix = torch.ones_like(columns, dtype=torch.bool)
            else:
                node = (columns - lens[b]).clamp(min=0)
                most = ancestors.shape[1] * WORD_BITS
                words = ancestors[begin:end][:, node.clamp(max=most - 1) // WORD_BITS]
                in_prefix = columns < lens[b]
                on_path = ((words >> (node % WORD_BITS)) & 1).bool() & (node < most)
                allowed = in_prefix | on_path
                # on the path from a node to the token, the token itself not counted
                after = (on_path & ~in_prefix).flip(-1).cumsum(-1).flip(-1) - 1
                key_positions = torch.where(in_prefix, columns, positions - after)
            if window:
                allowed = allowed & ((columns > positions - window) | (columns < sink) | ~in_prefix)
            if chunk:
                allowed = allowed & (key_positions >= positions - positions % chunk)
            live = slot[begin:end] >= 0
            # rows that no live token sees may hold anything, and 0 · NaN is NaN
            seen = (allowed & live[:, None]).any(dim=0)
            values = own_values.masked_fill(~seen[:, None, None], 0.0).transpose(0, 1)  # [HK, S, D]
            queries = q[:, begin:end].float().reshape(num_kv_heads, -1, head_dim)  # [HK, G·T, D]
            scores = capped((queries @ keys) * scale, softcap)
            scores = scores.view(num_kv_heads, group, end - begin, length)
            if slopes is not None:
                own = scale if rounds_bias else None
                bias = position_bias(slopes, key_positions, positions, own)
                scores = scores + bias.view(num_kv_heads, group, *bias.shape[1:])
            scores = scores.masked_fill(~allowed, float("-inf"))
            probs = softmax_beside(scores, beside).view(num_kv_heads, -1, length)
            result = (probs @ values).view(num_heads, end - begin, -1)
            out[:, begin:end] = torch.where(live[None, :, None], result, 0.0).to(out.dtype)
    return out


# id of a weight → its version, and its rows
_rows: dict[int, tuple[int, Tensor]] = {}


def _in_rows(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """A weight in blocks as rows: a copy, kept for as long as the weight is there, unchanged.

    Passes of the oracle read the same weights again and again.
    """
    if weight.device.type == "meta" or weight.is_inference() or type(weight) is not Tensor:
        return from_blocks(weight, shape)
    key = id(weight)
    version, rows = _rows.get(key, (-1, weight))
    if version != weight._version:
        if key not in _rows:
            weakref.finalize(weight, _rows.pop, key, None)
        rows = from_blocks(weight, shape)
        _rows[key] = weight._version, rows
    return rows


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
    weight = _in_rows(weight, (out_features, input.shape[1]))
    return torch.nn.functional.linear(input, weight, bias)


def grouped_linear_reference(x: Tensor, weight: Tensor, ends: Tensor, out_features: int) -> Tensor:
    """Project each run of rows by its expert's weight, as `linear_reference` does.

    Args:
        x: [M, K] rows sorted by expert.
        weight: [E, N, K] in blocks, see `specc.artifact.weight_layout`.
        ends: [E] int32, E ≥ 1, ascending; expert e owns rows ends[e - 1] … ends[e] - 1.
        out_features: N, of each expert.
    Returns:
        [M, N] in the dtype of x; rows from ends[E - 1] on are zero. The operator for the CPU gives
        a row the bits that `specc::linear` gives it, however many others its expert has.
    """
    shape = (ends.shape[0], out_features, x.shape[1])
    return grouped_mm_reference(x, _in_rows(weight, shape).transpose(1, 2), ends)


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
    rows = _in_rows(weight, (num_embeddings, width))
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


def rows_of_slots(blocks: Tensor, slots: Tensor, block_size: int) -> Tensor:
    """Rows of the flat cache that slots of one sequence lie in."""
    return blocks.long()[slots // block_size] * block_size + slots % block_size
