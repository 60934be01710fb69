"""What the target would have accepted: by depth and sibling rank of each draft, on real outputs.

A draft's rank at a position is that of the token that came among its best children, drawn as the
request's rule and seed draw them. Depth d counts the positions that a tree would have reached:
those after d tokens that were all among the children. A draft model keeps rows of its own, so that
one causal pass tells its ranks everywhere; a self-draft writes rows where the target's come, so
that it is asked for chains from some positions on, fed the tokens that came (teacher forcing).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.drafters.drafter import Drafter
from specc.kernels.operators.block_mass import MOST_VOTERS
from specc.runtime.backends.step import Model
from specc.runtime.drafters.block_choice import BlockChoice
from specc.runtime.drafters.host_drafter import host_drafter
from specc.runtime.drafters.suffix_index import SuffixIndex
from specc.runtime.engine import Engine
from specc.runtime.execution.batch_rows import sampling_rows
from specc.runtime.execution.state_rows import states_of_one
from specc.runtime.requests.salt import Salt
from specc.runtime.scheduling.request import Request
from specc.speculation.tree import pack_bits
from specc.tune.sharpness import FACTORS, chains_with, choose_factors

NONE = -1
# a self-draft's chains begin at every so many tokens
STRIDE = 4


@dataclass(frozen=True)
class Trajectory:
    """A finished request: prompt, output, and how the output was drawn."""

    request: Request
    num_prompt: int

    @property
    def token_ids(self) -> list[int]:
        return self.request.token_ids


def draft_acceptance(
    engine: Engine, draft: int, trajectories: Sequence[Trajectory], width: int, depth: int
) -> list[list[float]]:
    """Acceptance table of a draft model, [depth][width].

    Args:
        engine: with nobody else at work.
        draft: number.
        trajectories: outputs of the target.
        width: children of a node at most.
        depth: levels at most.
    """
    ranks = _all_ranks(engine, draft, trajectories, width, (1.0,))
    return acceptance_of(chains_with(ranks, [1.0] * depth), width, depth)


def sharpened_acceptance(
    engine: Engine, draft: int, trajectories: Sequence[Trajectory], width: int, depth: int
) -> tuple[list[list[float]], list[float]]:
    """Acceptance table of a draft model with the factors that suit it, and these by depth.

    Args: as of `draft_acceptance`; outputs of sampled requests.
    """
    ranks = _all_ranks(engine, draft, trajectories, width, FACTORS)
    factors = choose_factors(ranks, depth)
    return acceptance_of(chains_with(ranks, factors), width, depth), factors


def self_acceptance(
    engine: Engine,
    drafts: Sequence[Drafter],
    trajectories: Sequence[Trajectory],
    width: int,
    depth: int,
) -> list[list[list[float]]]:
    """Acceptance tables of self-drafts, [drafts][depth][width].

    Chains of `depth` levels begin at every fourth token of the outputs. A level sees what a step's
    would: the target's rows up to the root, and after them the draft's own. Then the target writes
    its rows over those. A prompt is read once for all of them.

    Args:
        engine: with nobody else at work, and a cache in blocks.
        drafts: whose programs the engine has.
        trajectories: outputs of the target.
        width: children of a node at most.
        depth: levels at most.
    """
    chains: list[list[list[int]]] = [[] for _ in drafts]
    for trajectory in trajectories:
        found = chains_over(engine, drafts, trajectory, width, depth)
        for every, own in zip(chains, found, strict=True):
            every += own
    return [acceptance_of(own, width, depth) for own in chains]


@torch.inference_mode()
def chains_over(
    engine: Engine, drafts: Sequence[Drafter], trajectory: Trajectory, width: int, depth: int
) -> list[list[list[int]]]:
    """Ranks of the tokens after each root of an output, [drafts][roots][depth or fewer].

    Args:
        engine: with nobody else at work, and a cache in blocks.
        drafts: whose programs the engine has.
        trajectory: an output of the target.
        width: children of a node at most.
        depth: levels at most.
    """
    tokens, start = trajectory.token_ids, max(1, trajectory.num_prompt)
    device, choice = engine.cache.device, BlockChoice()
    views = [draft.view for draft in drafts if draft.view is not None]
    choosing = any(view.chosen for view in views)
    roots = range(start - 1, len(tokens) - 1, STRIDE)
    logits: list[list[Tensor]] = [[] for _ in drafts]
    with blocks_of_a_sequence(engine) as table:
        for first, chunk in chunks_of(engine, tokens[: start - 1]):
            votes = choosing and first + len(chunk) == start - 1
            _target_pass(engine, chunk, first, table, choice if votes else None)
        for root in roots:
            fed = tokens[root : min(root + depth, len(tokens) - 1)]
            for draft, own in zip(drafts, logits, strict=True):
                program = engine.self_drafts.get(draft.name, engine.target)
                for level in range(len(fed)):
                    inputs = _level_inputs(
                        engine, draft, table, root, fed[: level + 1], choice.mass
                    )
                    own.append(program(*(x.to(device) for x in inputs)))
            # the target's own rows, up to the next root and in place of the drafts'
            again = tokens[root : root + max(STRIDE, len(fed))]
            if engine.cache.states is not None:
                # the states are those up to the next root; its own levels write the rows after it
                again = again[:STRIDE]
            votes = choosing and choice.is_due(root, views)
            again = again[: len(tokens) - 1 - root]
            _target_pass(engine, again, root, table, choice if votes else None)
    return [ranks_of_chains(engine, own, trajectory, roots, width, depth) for own in logits]


def lookup_acceptance(
    drafter: Drafter, trajectories: Sequence[Trajectory], depth: int
) -> list[list[float]]:
    """Acceptance table of a lookup, [depth][1]; earlier trajectories are earlier outputs.

    Args:
        drafter: that looks tokens up.
        trajectories: in the order of the requests.
        depth: tokens it proposes.
    """
    host = host_drafter(drafter.facts, block_size=0, shares_outputs=True)
    reached, accepted = [0] * depth, [0] * depth
    for trajectory in trajectories:
        tokens, start = trajectory.token_ids, trajectory.num_prompt
        request = _Seen(tokens[:start], tokens[start:])
        for position in range(start, len(tokens)):
            proposed, _ = host.propose(request, depth, drafter)
            for level in range(min(depth, len(tokens) - position)):
                reached[level] += 1
                is_right = level < len(proposed) and proposed[level] == tokens[position + level]
                accepted[level] += is_right
                if not is_right:
                    break
            request.token_ids = tokens[: position + 1]
        host.finish(request)
    return [[a / n] if n else [0.0] for a, n in zip(accepted, reached, strict=True)]


@dataclass
class _Seen:
    """A request as lookups see it; `output_token_ids` are those that it ends with."""

    token_ids: list[int]
    output_token_ids: list[int]
    suffix_index: SuffixIndex | None = None
    salt: Salt | None = None


def acceptance_of(chains: Iterable[Sequence[int]], width: int, depth: int) -> list[list[float]]:
    """Table of ranks by depth.

    Args:
        chains: ranks of the tokens that follow a root, in order, at most `depth` of them; -1 where
            a token was not among the children, after which nothing counts.
        width: children of a node.
        depth: levels.
    """
    counts = [[0] * width for _ in range(depth)]
    reached = [0] * depth
    for chain in chains:
        for level, rank in enumerate(chain):
            reached[level] += 1
            if rank == NONE:
                break
            counts[level][rank] += 1
    return [
        [count / total for count in row] if total else [0.0] * width
        for row, total in zip(counts, reached, strict=True)
    ]


def _all_ranks(
    engine: Engine,
    draft: int,
    trajectories: Sequence[Trajectory],
    width: int,
    factors: Sequence[float],
) -> dict[float, list[list[int]]]:
    """Factor of a draft's logits → ranks of the tokens of each output."""
    found: dict[float, list[list[int]]] = {factor: [] for factor in factors}
    for trajectory in trajectories:
        ranks = _ranks(engine, draft, trajectory, width, factors)
        for factor, own in zip(factors, ranks, strict=True):
            found[factor].append(own)
    return found


@torch.inference_mode()
def _ranks(
    engine: Engine, draft: int, trajectory: Trajectory, width: int, factors: Sequence[float]
) -> list[list[int]]:
    """By factor, the rank of each output token among the children, given all tokens before it."""
    tokens, start = trajectory.token_ids, trajectory.num_prompt
    found: list[list[int]] = [[] for _ in factors]
    with blocks_of_a_sequence(engine) as table:
        for first, chunk in chunks_of(engine, tokens[:-1]):
            last = first + len(chunk)
            # row r predicts the token at position r + 1
            rows = torch.arange(min(max(start - 1, first), last), last)
            logits = causal_pass(engine.drafts[draft], engine, chunk, first, rows - first, table)
            if len(rows):
                for own, factor in zip(found, factors, strict=True):
                    scaled = logits if factor == 1 else logits * factor
                    own += ranks_of(engine, scaled, trajectory.request, rows, width)
    return found


def _level_inputs(
    engine: Engine,
    draft: Drafter,
    table: Tensor,
    root: int,
    fed: Sequence[int],
    mass: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Of a pass over the last one of some tokens, which sees them and rows before the root.

    Args:
        engine: whose blocks it counts in.
        draft: what the pass sees of the rows before the root.
        table: [1, blocks] of the sequence.
        root: position of the first of these tokens: so many rows are the target's.
        fed: tokens, the last of which is read.
        mass: what it chooses blocks by, see `View.choose`.
    """
    size, last = engine.cache.shape.block_size, len(fed) - 1
    windowed = engine.manifest.windowed if engine.manifest else ()
    columns, seen = list(range(root // size + 1)), root
    if draft.view is not None and draft.name not in windowed:
        columns, seen = draft.view.columns(root, size, mass)
    # a level may begin another block
    further = range(columns[-1] + 1, (root + last) // size + 1)
    states = [] if engine.cache.states is None else [torch.zeros(1, 2, dtype=torch.int32)]
    return (
        torch.tensor(fed[-1:]), torch.tensor([root + last]),
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([seen + last], dtype=torch.int32),
        torch.tensor([seen], dtype=torch.int32), pack_bits(torch.ones(1, last + 1).bool()),
        table[:, [*columns, *further]], torch.tensor([0]), *states,
    )  # fmt: skip


@contextlib.contextmanager
def blocks_of_a_sequence(engine: Engine) -> Iterator[Tensor]:
    """A block table of as many rows as a sequence can have, [1, blocks]."""
    cache = engine.cache
    blocks = cache.allocator.allocate(cache.shape.blocks_per_sequence)
    try:
        yield cache.block_table([blocks]).to(cache.device)
    finally:
        cache.allocator.free(blocks)


def chunks_of(engine: Engine, tokens: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Position of the first token, and tokens, of each pass that reads some."""
    for first in range(0, len(tokens), engine.prefill_chunk):
        yield first, list(tokens[first : first + engine.prefill_chunk])


def _target_pass(
    engine: Engine, tokens: list[int], first: int, table: Tensor, choice: BlockChoice | None
) -> None:
    """Let the target write rows of tokens; the last of them vote on its blocks, where asked to."""
    rows = torch.tensor([0])
    if choice is None:
        causal_pass(engine.target, engine, tokens, first, rows, table)
        return
    mass = torch.zeros(1, engine.cache.shape.blocks_per_sequence, device=engine.cache.device)
    causal_pass(engine.target, engine, tokens, first, rows, table, mass)
    choice.add(mass[0].cpu(), min(len(tokens), MOST_VOTERS), first + len(tokens))


def causal_pass(
    model: Model,
    engine: Engine,
    tokens: list[int],
    first: int,
    rows: Tensor,
    table: Tensor,
    more: Tensor | None = None,
) -> Tensor:
    """Feed a sequence's tokens, each of which sees those before it.

    Args:
        model: of the engine.
        engine: whose caches it has.
        tokens: to read.
        first: position of the first of them; so many rows are there.
        rows: [R] int64, of those tokens, that get logits.
        table: [1, blocks] of the sequence.
        more: of a target whose tokens vote, what they add to; of a head, rows that its tokens read.
    Returns:
        [R, V] logits.
    """
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
    states = states_of_one(engine.states_of(model), len(tokens))
    moved = [x.to(device) for x in (*states, *([] if more is None else [more]))]
    return model(*(x if x is None else x.to(device) for x in inputs), *moved)


def ranks_of(
    engine: Engine, logits: Tensor, request: Request, rows: Tensor, width: int
) -> list[int]:
    """Rank among a draft's children of the token after each position.

    Args:
        engine: whose operators draw.
        logits: [n, V] of the draft.
        request: by whose rule and seed children are drawn.
        rows: [n] int64 positions that the logits follow.
        width: children of a node.
    Returns:
        n ranks, -1 where the token is not among the children.
    """
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


def roots_of(trajectory: Trajectory) -> range:
    """Places along an output from which a draft with hidden states is asked for chains.

    The first token of an output comes without a tree.
    """
    return range(max(1, trajectory.num_prompt), len(trajectory.token_ids) - 1, STRIDE)


def ranks_of_chains(
    engine: Engine,
    logits: Sequence[Tensor],
    trajectory: Trajectory,
    roots: Sequence[int],
    width: int,
    depth: int,
) -> list[list[int]]:
    """Ranks of the tokens after each root of an output, [roots][depth or fewer].

    Args:
        engine: whose operators draw.
        logits: [n, V] each, of all levels of a root's chain before those of the next.
        trajectory: the output.
        roots: ascending places along it.
        width: children of a node.
        depth: levels of a chain, of which none is beyond the end.
    """
    if not logits:
        return []
    last = len(trajectory.token_ids) - 1
    rows = [torch.arange(root, min(root + depth, last), dtype=torch.int64) for root in roots]
    ranks = ranks_of(engine, torch.cat(list(logits)), trajectory.request, torch.cat(rows), width)
    return [[ranks.pop(0) for _ in chain] for chain in rows]
