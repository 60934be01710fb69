"""What the target would have accepted of a draft of one pass: passes at roots along its outputs.

One pass tells the logits of all depths. It reads what a step's would: the tokens since the last
root, or hidden states of them, and the root. Logits that depend on the tokens before are those
after the tokens that came.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
        width: children of a node at most.
        depth: levels at most, no more than a block proposes.
    """
    tokens, last = trajectory.token_ids, len(trajectory.token_ids) - 1
    # of candidates, none beyond them is ever proposed
    width = min(width, block.candidates or width)
    roots = roots_of(trajectory)
    drafter: Any = engine.drafts[block.number]
    logits: list[Tensor] = []
    with blocks_of_a_sequence(engine) as table:
        for first, chunk in chunks_of(engine, tokens[:-1]):
            causal_pass(engine.target, engine, chunk, first, torch.tensor([0]), table)
        if roots and block.has_rows:
            # rows pair hidden states with the token after them, or not
            text = tokens[int(block.facts.pairs) : roots[0]]
            for first, chunk in chunks_of(engine, text):
                rows = torch.arange(first, first + len(chunk), dtype=torch.int32)
                features = torch.stack([rows, torch.full_like(rows, -1)], 1)
                more = features if block.facts.reads_hidden else None
                causal_pass(drafter, engine, chunk, first, torch.tensor([0]), table, more)
        read = roots[0] if roots else 0
        for root in roots:
            fed = tokens[root : min(root + depth, last)]
            inputs = block.pass_inputs(tokens[read : root + 1], root, table, depth)
            made = drafter(*(None if x is None else x.to(engine.cache.device) for x in inputs))
            before = tokens[max(root - 1, 0)]
            logits.append(block.logits_along(drafter.weights, made, fed, before))
            read = root
    return ranks_of_chains(engine, logits, trajectory, roots, width, depth)
