"""What the target would have accepted of a draft over its own cache: chains along outputs, fed the
tokens that came.

The target reads a text once. From a root on the draft sees the rows before it alone, wherever its
chain has come to: what the target has written after the root, it does not see.
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


def assistant_acceptance(
    engine: Engine, draft: int, trajectories: Sequence[Trajectory], width: int, depth: int
) -> list[list[float]]:
    """Acceptance table, [depth][width]; arguments as of `head_acceptance`."""
    chains = (assistant_chains(engine, draft, own, width, depth) for own in trajectories)
    return acceptance_of(itertools.chain.from_iterable(chains), width, depth)


@torch.inference_mode()
def assistant_chains(
    engine: Engine, draft: int, trajectory: Trajectory, width: int, depth: int
) -> list[list[int]]:
    """Ranks of the tokens after each root of an output, [roots][depth or fewer]."""
    tokens, last = trajectory.token_ids, len(trajectory.token_ids) - 1
    roots, logits = roots_of(trajectory), list[Tensor]()
    with blocks_of_a_sequence(engine) as table:
        for first, chunk in chunks_of(engine, tokens[:-1]):
            causal_pass(engine.target, engine, chunk, first, torch.tensor([0]), table)
        for root in roots:
            for level in range(min(depth, last - root)):
                logits.append(_pass(engine, draft, tokens[root + level], root, level, table))
    return ranks_of_chains(engine, logits, trajectory, roots, width, depth)


def _pass(engine: Engine, draft: int, token: int, root: int, level: int, table: Tensor) -> Tensor:
    """Logits [1, V] after a token that is `level` tokens after the root."""
    row = root + level
    features = [[root - 1, -1] if level == 0 else [-1, row - 1]]
    inputs = (
        torch.tensor([token]),
        torch.tensor([root]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([row], dtype=torch.int32),
        torch.tensor([root], dtype=torch.int32),
        None,
        table,
        torch.tensor([0]),
        torch.tensor(features, dtype=torch.int32),
    )
    device = engine.cache.device
    return engine.drafts[draft](*(x if x is None else x.to(device) for x in inputs))
