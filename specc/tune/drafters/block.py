"""What the target would have accepted of a block drafter: blocks at roots along its outputs.

One pass tells the logits of all depths. It reads what a step's would: hidden states of the tokens
since the last block, and the block; for Medusa heads, those of the token before the root. Logits
that depend on the token before (DSpark) are those after the token that came.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specc.drafters.block import BIAS_TENSORS, GATED, JOINT_TENSORS, VANILLA, BlockDraft
from specc.drafters.one_pass import OnePass
from specc.runtime.engine import Engine
from specc.tune.acceptance import (
    Trajectory,
    acceptance_of,
    blocks_of_a_sequence,
    causal_pass,
    chunks_of,
    ranks_of_chains,
    roots_of,
)


def block_acceptance(
    engine: Engine, block: OnePass, trajectories: Sequence[Trajectory], width: int, depth: int
) -> list[list[float]]:
    """Acceptance table of a block drafter, [depth][width], no deeper than a block.

    Args:
        engine: with nobody else at work.
        block: of the drafter, with its name.
        trajectories: outputs of the target.
        width: children of a node at most.
        depth: levels at most.
    """
    depth = min(depth, block.num_proposed)
    chains = (block_chains(engine, block, own, width, depth) for own in trajectories)
    return acceptance_of(itertools.chain.from_iterable(chains), width, depth)


@torch.inference_mode()
def block_chains(
    engine: Engine, block: OnePass, trajectory: Trajectory, width: int, depth: int
) -> list[list[int]]:
    """Ranks of the tokens after each root of an output, [roots][depth or fewer].

    Args:
        engine: with nobody else at work.
        block: of the drafter, with its name.
        trajectory: an output of the target.
        width: children of a node at most.
        depth: levels at most, no more than a block proposes.
    """
    tokens, last = trajectory.token_ids, len(trajectory.token_ids) - 1
    roots = roots_of(trajectory)
    drafter: Any = engine.drafts[block.number]
    logits: list[Tensor] = []
    with blocks_of_a_sequence(engine) as table:
        for first, chunk in chunks_of(engine, tokens[:-1]):
            causal_pass(engine.target, engine, chunk, first, torch.tensor([0]), table)
        if roots and block.has_rows:
            for first, chunk in chunks_of(engine, tokens[: roots[0]]):
                rows = torch.arange(first, first + len(chunk), dtype=torch.int32)
                features = torch.stack([rows, torch.full_like(rows, -1)], 1)
                causal_pass(drafter, engine, chunk, first, torch.tensor([0]), table, features)
        read = roots[0] if roots else 0
        for root in roots:
            fed = tokens[root : min(root + depth, last)]
            if isinstance(block, BlockDraft):
                found = _block_pass(engine, drafter, block, tokens[read : root + 1], root, table)
            else:
                found = _flat_pass(engine, drafter, tokens[root], root, table)
            logits.append(_after(block, drafter.weights, found[: len(fed)], fed))
            read = root
    return ranks_of_chains(engine, logits, trajectory, roots, width, depth)


def _block_pass(
    engine: Engine,
    drafter: Any,
    block: BlockDraft,
    tokens: Sequence[int],
    root: int,
    table: Tensor,
) -> Tensor:
    """Logits of every depth, [D, V], which depend on no token after the root; see `block_levels`.

    Args:
        engine: whose drafter it is.
        drafter: its program.
        block: what a pass reads.
        tokens: that the drafter has not read, the root last.
        root: its position.
        table: [1, blocks] of the sequence.
    """
    before, size = len(tokens) - 1, block.size
    rows = torch.arange(root - before, root + size)
    tapped = torch.cat([rows[:before], torch.full((size,), -1)]).int()
    first = before + block.first_row
    inputs = (
        torch.tensor([*tokens, *[block.mask_token_id] * (size - 1)]),
        rows,
        torch.tensor([0, before + size], dtype=torch.int32),
        rows.int(),
        torch.tensor([root], dtype=torch.int32),
        block.rows_seen(before),
        table,
        torch.arange(first, first + block.num_proposed),
        torch.stack([tapped, block.offsets(before)], 1),
    )
    found: Tensor = drafter(*(x.to(engine.cache.device) for x in inputs))
    return found


def _flat_pass(engine: Engine, drafter: Any, token: int, root: int, table: Tensor) -> Tensor:
    """Logits of every head, [D, V], at a root of this token and position; see `medusa_levels`."""
    place = torch.tensor([root], dtype=torch.int32)
    inputs = (
        torch.tensor([token]),
        place.long(),
        torch.tensor([0, 1], dtype=torch.int32),
        place,
        place,
        table,
        torch.tensor([0]),
        torch.tensor([[root - 1, -1]], dtype=torch.int32),
    )
    moved = [x.to(engine.cache.device) for x in inputs]
    # causal: no ancestors
    found: Tensor = drafter(*moved[:5], None, *moved[5:])
    return found


def _after(block: OnePass, weights: Any, rows: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits [n, V] of rows after these tokens; see `passes/drafters/block_bias.py`."""
    if not block.is_biased:
        return rows
    known = F.embedding(torch.tensor(tokens, device=rows.device), weights[BIAS_TENSORS["bias_in"]])
    logits, hidden = rows.tensor_split([rows.shape[1] - block.hidden_columns], 1)
    if block.bias_kind != VANILLA:
        weight, offset = (weights[key] for key in JOINT_TENSORS[block.bias_kind].values())
        if block.bias_kind == GATED:
            known = F.linear(torch.cat([hidden, known], 1), weight, offset).sigmoid() * known
        else:
            known = _unrolled(known, hidden, weight, offset)
    bias = F.linear(known, weights[BIAS_TENSORS["bias_out"]])
    if block.is_partial:
        bias = F.pad(bias, (0, 1)).index_select(1, weights[BIAS_TENSORS["bias_columns"]])
    return logits + bias


def _unrolled(known: Tensor, hidden: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    """[n, r] of a drafter with a state, which goes from token to token."""
    state, found = torch.zeros_like(known[0]), []
    for own, row in zip(known, hidden, strict=True):
        gate, candidate, output = F.linear(torch.cat([state, own, row]), weight, offset).chunk(3)
        state = torch.lerp(candidate.tanh(), state, gate.sigmoid())
        found.append(output.tanh())
    return torch.stack(found)
