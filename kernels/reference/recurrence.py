"""Oracles of layers that keep a state: convolutions and recurrences over the tokens of a tree.

What such a layer remembers of a sequence is one state, always that of exactly its committed tokens.
The nodes of a pass that may be rejected leave it as it is: their inputs are kept as rows, from
which a later node's state is replayed, and from which accepted nodes are folded into the state.
Tokens are taken one after the other, in one order of operations: a node of a tree, a fold and plain
decoding have the same bits.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specc.speculation.tree import WORD_BITS


def tree_conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: Tensor,
    q_start: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    states: Tensor,
    *,
    activation: str = "",
) -> Tensor:
    """Causal depthwise convolution of each token over the last tokens of its path.

    Args:
        x: [Nt, C] inputs of the in-flight tokens of all B sequences, flat.
        weight: [C, K] in the dtype of x; the last column is that of the token itself.
        bias: [C] in the dtype of x, or None.
        state: [num_states, K - 1, C] in the dtype of x, the inputs before the next token, oldest
            first; mutated.
        rows: [num_states, R, C] in the dtype of x, replay rows: inputs of nodes that are not
            certain; mutated.
        q_start: [B + 1] int32; sequence b owns tokens q_start[b] … q_start[b + 1] - 1.
        slot: [Nt] int32; that of region node j of sequence b is cache_len[b] + j. -1 is a dead
            token, which writes nothing and whose output is zero, as one that no sequence owns.
        cache_len: [B] int32 committed tokens: those that the state has seen.
        ancestors: [Nt, W] int64; bit j of word w says that region node 64w + j is on the token's
            path; bits from the token itself on are not read. None: all nodes before it are.
        states: [B, 2] int32: place of a sequence in `state` and `rows`, no two have the same; and
            how many of its first nodes are certain, which is to say committed in any case.
        activation: of the result, `silu` or none.
    Returns:
        [Nt, C] in the dtype of x; sums and activation are in float32.

    Certain nodes of the pass come in order, from node 0 on. The state is that after the last of
    them when the call returns. A node that is not certain writes its row, and reads those of its
    ancestors: they may have come in an earlier pass of the same step. The state of a sequence with
    cache_len 0 whose pass has node 0 is zeros, whatever it was before.

    Raises:
        ValueError: an activation that is not known.
    Source: short convolutions before the recurrence of Mamba, arXiv:2312.00752 §3.4.
    """
    if activation not in ("", "silu"):
        raise ValueError(f"found activation {activation!r}, needed 'silu' or ''")
    out = torch.zeros_like(x)
    width = weight.shape[1]
    factors = weight.float().t()  # [K, C]

    def convolve(before: Tensor, newest: Tensor) -> Tensor:
        window = torch.cat([before, newest[None]])[-width:].float()
        total = (window * factors).sum(dim=0)
        if bias is not None:
            total = total + bias.float()
        return torch.nn.functional.silu(total) if activation else total

    for b, (first, last) in enumerate(itertools.pairwise(q_start.tolist())):
        place, certain = states[b].tolist()
        nodes = _live_nodes(slot, first, last, int(cache_len[b]))
        if not nodes:
            continue  # its place may be anything
        _begin(state[place], int(cache_len[b]), nodes)
        current = state[place].clone()
        for token, node in nodes:
            if node < certain:
                out[token] = convolve(current, x[token]).to(x.dtype)
                current = torch.cat([current, x[token, None]])[1:]
            else:
                rows[place, node] = x[token]
        state[place] = current
        for token, node in nodes:
            if node >= certain:
                path = _path(node, certain, ancestors, token)
                before = torch.cat([current, rows[place, path]])
                out[token] = convolve(before, x[token]).to(x.dtype)
    return out


def tree_recurrence_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: Tensor,
    rows: Tensor,
    q_start: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    states: Tensor,
) -> Tensor:
    """Linear attention with decay along each token's path: gated delta rule, Mamba-2, KDA.

    Each head has a state S [DK, DV]. A token decays it, writes to it, and reads it, in float32:

        S ← exp(g) S
        δ = β (v - Sᵀ k)      with beta: what the key finds there is corrected
        δ = v                 without
        S ← S + k δᵀ
        o = Sᵀ q

    Args:
        q: [Nt, HK, DK] queries, scaled and normalized as the model has it.
        k: [Nt, HK, DK] keys, normalized as the model has it; HK divides HV, and value head h has
            key head h // (HV // HK).
        v: [Nt, HV, DV] values; of Mamba-2, inputs times their step.
        g: [Nt, HV] decay of a head, its natural logarithm, or [Nt, HV, DK] of each row of its state
            (KDA).
        beta: [Nt, HV] share of the correction that is made; or None.
        state: [num_states, HV, DK, DV] float32, mutated.
        rows: [num_states, R, W] float32 replay rows, mutated: k, v, g and beta of a node, in that
            order, each flat.
        q_start: [B + 1] int32, this and the rest as of `tree_conv_reference`, and so is what nodes
            do to `state` and `rows`.
        slot: [Nt] int32.
        cache_len: [B] int32.
        ancestors: [Nt, W] int64, or None.
        states: [B, 2] int32.
    Returns:
        [Nt, HV, DV] in the dtype of v.
    Source: gated delta rule, arXiv:2412.06464; Mamba-2, arXiv:2405.21060; decay of each row of Kimi
        Delta Attention, arXiv:2510.26692.
    """
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    group = v.shape[1] // k.shape[1]

    def read(current: Tensor, token: int) -> Tensor:
        queries = q[token].float().repeat_interleave(group, dim=0)  # [HV, DK]
        return (current * queries[:, :, None]).sum(dim=1).to(v.dtype)

    def row_of(token: int) -> Tensor:
        parts = [k, v, g] if beta is None else [k, v, g, beta]
        return torch.cat([part[token].flatten().float() for part in parts])

    for b, (first, last) in enumerate(itertools.pairwise(q_start.tolist())):
        place, certain = states[b].tolist()
        nodes = _live_nodes(slot, first, last, int(cache_len[b]))
        if not nodes:
            continue  # its place may be anything
        _begin(state[place], int(cache_len[b]), nodes)
        current = state[place].clone()
        for token, node in nodes:
            if node < certain:
                current = _advance(current, row_of(token), k.shape[1], beta is not None)
                out[token] = read(current, token)
            else:
                rows[place, node] = row_of(token)
        state[place] = current
        for token, node in nodes:
            if node >= certain:
                of_node = current
                for each in [*_path(node, certain, ancestors, token), node]:
                    of_node = _advance(of_node, rows[place, each], k.shape[1], beta is not None)
                out[token] = read(of_node, token)
    return out


def fold_conv_reference(
    state: Tensor, rows: Tensor, source: Tensor, cache_len: Tensor, states: Tensor
) -> None:
    """Let the states of all layers see the accepted nodes of a step.

    Args:
        state: [L, num_states, K - 1, C], mutated; see `tree_conv_reference`.
        rows: [L, num_states, R, C] that the step's passes have written.
        source: [B, P] int32 slots of accepted nodes from the root on, -1 after the last: what
            `commit_rows_reference` says.
        cache_len: [B] int32 committed tokens before the step; a sequence with fewer than 0 commits
            nothing.
        states: [B, 2] int32 of the step's passes; nodes that were certain have been seen.
    """
    width = state.shape[2]
    for place, nodes in _accepted(source, cache_len, states):
        seen = torch.cat([state[:, place], rows[:, place, nodes]], dim=1)
        state[:, place] = seen[:, seen.shape[1] - width :]


def fold_recurrence_reference(
    state: Tensor,
    rows: Tensor,
    source: Tensor,
    cache_len: Tensor,
    states: Tensor,
    *,
    key_heads: int,
    has_beta: bool,
) -> None:
    """Let the states of all layers see the accepted nodes of a step, as passes would.

    Args:
        state: [L, num_states, HV, DK, DV] float32, mutated; see `tree_recurrence_reference`.
        rows: [L, num_states, R, W] float32 that the step's passes have written.
        source: [B, P] int32, this and the rest as of `fold_conv_reference`.
        cache_len: [B] int32.
        states: [B, 2] int32.
        key_heads: HK.
        has_beta: whether rows end with beta.
    """
    for place, nodes in _accepted(source, cache_len, states):
        for layer, of_layer in enumerate(state[:, place]):
            for node in nodes:
                row = rows[layer, place, node]
                of_layer.copy_(_advance(of_layer, row, key_heads, has_beta))


def _advance(state: Tensor, row: Tensor, key_heads: int, has_beta: bool) -> Tensor:
    """States [HV, DK, DV] of all heads after the token of a replay row [W]."""
    heads, key_dim, value_dim = state.shape
    group = heads // key_heads
    k, v, g, beta = row.split(
        [
            key_heads * key_dim,
            heads * value_dim,
            len(row) - key_heads * key_dim - heads * value_dim - has_beta * heads,
            has_beta * heads,
        ]
    )
    k = k.view(key_heads, key_dim).repeat_interleave(group, dim=0)[:, :, None]
    delta = v.view(heads, value_dim)
    state = state * g.view(heads, -1, 1).exp()
    if has_beta:
        delta = beta[:, None] * (delta - (state * k).sum(dim=1))
    return state + k * delta[:, None, :]


def _live_nodes(slot: Tensor, first: int, last: int, length: int) -> list[tuple[int, int]]:
    """Tokens of a sequence that are not dead, each with the region node that it is."""
    slots = enumerate(slot[first:last].tolist(), first)
    return [(token, place - length) for token, place in slots if place >= 0]


def _begin(state: Tensor, length: int, nodes: list[tuple[int, int]]) -> None:
    """Of a sequence's first pass, the state is that of no token."""
    if length == 0 and any(node == 0 for _, node in nodes):
        state.zero_()


def _path(node: int, certain: int, ancestors: Tensor | None, token: int) -> list[int]:
    """Ancestors of a node whose inputs the state has not seen, from the root on."""
    before = range(certain, node)
    if ancestors is None:
        return list(before)
    words = ancestors[token].tolist()
    most = WORD_BITS * len(words)
    return [j for j in before if j < most and words[j // WORD_BITS] >> j % WORD_BITS & 1]


def _accepted(source: Tensor, cache_len: Tensor, states: Tensor) -> list[tuple[int, list[int]]]:
    """Of each sequence, its place and the accepted nodes that its state has not seen."""
    accepted = []
    for b, slots in enumerate(source.tolist()):
        place, certain = states[b].tolist()
        length = int(cache_len[b])
        path = [s - length for s in itertools.takewhile(lambda s: s >= 0, slots)]
        nodes = [node for node in path if node >= certain]
        if length >= 0 and nodes:
            accepted.append((place, nodes))
    return accepted
