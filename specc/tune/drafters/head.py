"""What the target would have accepted of a head: chains along outputs, fed the tokens that came.

A head's level reads what the level before it has handed on, so that no single pass tells what it
proposes at a depth: from some positions on it drafts as in a step. The target reads a text once,
and the head after it, with the target's hidden states everywhere; a chain writes rows of its own
over a few of those, and then they are computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

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


def head_acceptance(
    engine: Engine, draft: int, trajectories: Sequence[Trajectory], width: int, depth: int
) -> list[list[float]]:
    """Acceptance table of a head, [depth][width].

    Args:
        engine: with nobody else at work.
        draft: number.
        trajectories: outputs of the target.
        width: children of a node at most.
        depth: levels at most.
    """
    chains = (head_chains(engine, draft, own, width, depth) for own in trajectories)
    return acceptance_of(itertools.chain.from_iterable(chains), width, depth)


@torch.inference_mode()
def head_chains(
    engine: Engine, draft: int, trajectory: Trajectory, width: int, depth: int
) -> list[list[int]]:
    """Ranks of the tokens after each root of an output, [roots][depth or fewer].

    Args:
        engine: with nobody else at work.
        draft: number.
        width: children of a node at most.
        depth: levels at most.
    """
    tokens, last = trajectory.token_ids, len(trajectory.token_ids) - 1
    # the row of a root is one before it
    roots = roots_of(trajectory)
    logits: list[Tensor] = []
    with blocks_of_a_sequence(engine) as table:
        for first, chunk in chunks_of(engine, tokens[:-1]):
            causal_pass(engine.target, engine, chunk, first, torch.tensor([0]), table)
            _head_pass(engine, draft, tokens, first, len(chunk), table)
        for root in roots:
            count = min(depth, last - root)
            logits.append(_head_pass(engine, draft, tokens, root - 1, 1, table))
            logits += [
                _head_pass(engine, draft, tokens, root - 1 + level, 1, table, is_own=True)
                for level in range(1, count)
            ]
            # the next chain sees these as the target's
            if count > 1:
                _head_pass(engine, draft, tokens, root, count - 1, table)
    return ranks_of_chains(engine, logits, trajectory, roots, width, depth)


def _head_pass(
    engine: Engine,
    draft: int,
    tokens: Sequence[int],
    first: int,
    count: int,
    table: Tensor,
    is_own: bool = False,
) -> Tensor:
    """Let a head write rows; returns the logits of the last one, [1, V].

    Args:
        draft: number.
        tokens: of the sequence; row i reads token i + 1.
        first: row.
        count: rows.
        table: [1, blocks] of the sequence.
        is_own: a row reads what the head has handed on one row before, not the target's features.
    """
    rows = torch.arange(first, first + count, dtype=torch.int32)
    none = torch.full_like(rows, -1)
    features = torch.stack([none, rows - 1] if is_own else [rows, none], 1)
    last = torch.tensor([count - 1])
    fed = list(tokens[first + 1 : first + 1 + count])
    return causal_pass(engine.drafts[draft], engine, fed, first, last, table, features)
