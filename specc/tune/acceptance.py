"""What the target would have accepted: by depth and sibling rank of each draft, on real outputs.

A draft's rank at a position is that of the token that came among its best children, drawn as the
request's rule and seed draw them. Depth d counts the positions that a tree would have reached:
those after d tokens that were all among the children.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.runtime.backends.step import Model
from specc.runtime.drafts.suffix_index import OutputIndex, SuffixIndex
from specc.runtime.engine import Engine
from specc.runtime.execution.batch_rows import sampling_rows
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SUFFIX, lookup_ngram
from specc.speculation.self_drafts import SelfDraft

NONE = -1


@dataclass(frozen=True)
class Trajectory:
    """A finished request: prompt, output, and how the output was drawn."""

    request: Request
    num_prompt: int

    @property
    def token_ids(self) -> list[int]:
        return self.request.token_ids


def draft_acceptance(
    engine: Engine,
    draft: int,
    trajectories: Sequence[Trajectory],
    width: int,
    depth: int,
    progress: Callable[[int], object] = lambda count: None,
) -> list[list[float]]:
    """Acceptance table of a draft model, [depth][width].

    Args:
        engine: with nobody else at work.
        draft: number.
        trajectories: outputs of the target.
        width: children of a node at most.
        depth: levels at most.
        progress: called with the number of trajectories that are done.
    """
    ranks = []
    for count, trajectory in enumerate(trajectories, start=1):
        ranks.append(_ranks(engine, draft, trajectory, width))
        progress(count)
    return acceptance_of(ranks, width, depth)


def self_acceptance(
    engine: Engine,
    draft: SelfDraft,
    trajectories: Sequence[Trajectory],
    width: int,
    depth: int,
    progress: Callable[[int], object] = lambda count: None,
) -> list[list[float]]:
    """Acceptance table of a self-draft, [depth][width].

    Every token is proposed from the target's own rows before it. Rows of draft tokens are a
    little different, which acceptance hardly shows.

    Args:
        engine: with nobody else at work, and a cache in blocks.
        draft: one whose program the engine has.
        trajectories: outputs of the target.
        width: children of a node at most.
        depth: levels at most.
        progress: called with the number of trajectories that are done.
    """
    ranks = []
    for count, trajectory in enumerate(trajectories, start=1):
        ranks.append(_ranks_over(engine, draft, trajectory, width))
        progress(count)
    return acceptance_of(ranks, width, depth)


def lookup_acceptance(
    source: str, trajectories: Sequence[Trajectory], depth: int
) -> list[list[float]]:
    """Acceptance table of a lookup, [depth][1]; earlier trajectories are earlier outputs.

    Args:
        source: `lookup-N` or `suffix`.
        trajectories: in the order of the requests.
        depth: tokens it proposes.
    """
    outputs = OutputIndex()
    ngram = lookup_ngram(source)
    reached, accepted = [0] * depth, [0] * depth
    for trajectory in trajectories:
        tokens, start = trajectory.token_ids, trajectory.num_prompt
        index = SuffixIndex()
        index.extend(tokens[:start])
        for position in range(start, len(tokens)):
            proposed, length = index.propose(depth, ngram)
            if source == SUFFIX:
                other, other_length = outputs.propose(tokens[:position], depth)
                proposed = other if other_length > length else proposed
            for level in range(min(depth, len(tokens) - position)):
                reached[level] += 1
                is_right = level < len(proposed) and proposed[level] == tokens[position + level]
                accepted[level] += is_right
                if not is_right:
                    break
            index.extend(tokens[position : position + 1])
        outputs.add(tokens)
    return [[a / n] if n else [0.0] for a, n in zip(accepted, reached, strict=True)]


def acceptance_of(ranks: Sequence[Sequence[int]], width: int, depth: int) -> list[list[float]]:
    """Table of ranks by depth.

    Args:
        ranks: of each output's tokens in order, -1 where a token was not among the children.
        width: children of a node.
        depth: levels.
    """
    counts = [[0] * width for _ in range(depth)]
    reached = [0] * depth
    for line in ranks:
        for root in range(len(line)):
            for level in range(min(depth, len(line) - root)):
                reached[level] += 1
                rank = line[root + level]
                if rank == NONE:
                    break
                counts[level][rank] += 1
    return [
        [count / total for count in row] if total else [0.0] * width
        for row, total in zip(counts, reached, strict=True)
    ]


@torch.inference_mode()
def _ranks(engine: Engine, draft: int, trajectory: Trajectory, width: int) -> list[int]:
    """Rank of each output token among the draft's children, given all tokens before it."""
    tokens, start = trajectory.token_ids, trajectory.num_prompt
    cache = engine.cache
    blocks = cache.allocator.allocate(cache.shape.blocks_per_sequence)
    try:
        table = cache.block_table([blocks]).to(cache.device)
        found: list[int] = []
        for first in range(0, len(tokens) - 1, engine.prefill_chunk):
            last = min(len(tokens) - 1, first + engine.prefill_chunk)
            # row r predicts the token at position r + 1
            rows = torch.arange(min(max(start - 1, first), last), last)
            model, chunk = engine.drafts[draft], tokens[first:last]
            logits = _causal_pass(model, engine, chunk, first, rows - first, table)
            if len(rows):
                found += _ranks_of(engine, logits, trajectory.request, rows, width)
        return found
    finally:
        cache.allocator.free(blocks)


@torch.inference_mode()
def _ranks_over(engine: Engine, draft: SelfDraft, trajectory: Trajectory, width: int) -> list[int]:
    """Rank of each output token among a self-draft's children, given all tokens before it."""
    tokens, start = trajectory.token_ids, max(1, trajectory.num_prompt)
    cache, last = engine.cache, len(trajectory.token_ids) - 1
    program = engine.self_drafts.get(draft.name, engine.target)
    windowed = engine.manifest.windowed if engine.manifest else ()
    view = None if draft.name in windowed else draft.view
    blocks = cache.allocator.allocate(cache.shape.blocks_per_sequence)
    try:
        table = cache.block_table([blocks])
        moved = table.to(cache.device)
        for first in range(0, start - 1, engine.prefill_chunk):
            chunk = tokens[first : min(start - 1, first + engine.prefill_chunk)]
            _causal_pass(engine.target, engine, chunk, first, torch.tensor([0]), moved)
        found = []
        for row in range(start - 1, last):
            columns, seen = list(range(table.shape[1])), row
            if view is not None:
                columns, seen = view.columns(row, cache.shape.block_size)
            slot = torch.tensor([seen], dtype=torch.int32)
            inputs = (
                torch.tensor(tokens[row : row + 1]), torch.tensor([row]),
                torch.tensor([0, 1], dtype=torch.int32), slot, slot,
                torch.ones(1, 1, dtype=torch.int64), table[:, columns], torch.tensor([0]),
            )  # fmt: skip
            found.append(program(*(x.to(cache.device) for x in inputs)))
            # the target's own row in place of the draft's
            own = tokens[row : row + 1]
            _causal_pass(engine.target, engine, own, row, torch.tensor([0]), moved)
        if not found:
            return []
        rows = torch.arange(start - 1, last)
        return _ranks_of(engine, torch.cat(found), trajectory.request, rows, width)
    finally:
        cache.allocator.free(blocks)


def _causal_pass(
    model: Model, engine: Engine, tokens: list[int], first: int, rows: Tensor, table: Tensor
) -> Tensor:
    positions = torch.arange(first, first + len(tokens))
    inputs = (
        torch.tensor(tokens),
        positions,
        torch.tensor([0, len(tokens)], dtype=torch.int32),
        positions.int(),
        torch.tensor([first], dtype=torch.int32),
        None,
        table,
        rows,
    )
    device = engine.cache.device
    return model(*(x if x is None else x.to(device) for x in inputs))


def _ranks_of(
    engine: Engine, logits: Tensor, request: Request, rows: Tensor, width: int
) -> list[int]:
    device, count = logits.device, len(rows)
    values, words = (row.expand(count, -1).contiguous() for row in sampling_rows([request]))
    children, _ = engine.operators.draft_children(
        logits,
        width,
        rows.int().to(device),
        torch.zeros(1, dtype=torch.int32, device=device),
        0,
        values.to(device),
        words.to(device),
        False,
    )
    wanted = torch.tensor([request.token_ids[row + 1] for row in rows.tolist()], device=device)
    is_it = children == wanted[:, None]
    ranks = torch.where(is_it.any(dim=1), is_it.int().argmax(dim=1), NONE)
    return ranks.tolist()
