"""One pass of the target over chunks of prompts and the trees of several plans.

Everything outside of attention is token-wise, so tokens of any kind can be rows of one flat pass:
the weights are read once for all of them. A chunk of a prompt is a chain after its committed rows.
Tokens that name their ancestors see all of them, so a chunk must not be longer than the window of
any layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specc.runtime.backends.step_io import ADAPTERS, STATES, Drafted, StepInputs
from specc.runtime.execution.adapter_rows import adapters_of, rows_of_tokens
from specc.runtime.execution.state_rows import states_of_spans
from specc.runtime.scheduling.batch import Span
from specc.speculation.live_nodes import DEAD
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import WORD_BITS, TokenTree, pack_bits

_ROOT = TokenTree.chain(0)

# begins a pass over flat tokens; what it returns waits for what the pass yields
Begin = Callable[..., Callable[[], Tensor]]


class FlatTokens(NamedTuple):
    """Tokens of some requests, in the order of a flat pass.

    Args:
        tokens: [Nt] int64.
        positions: [Nt] int64.
        slots: [Nt] int32 cache rows.
        ancestors: [Nt, W] int64.
        counts: tokens of each of B requests.
        cache_len: [B] int32 committed rows.
        block_table: [B, n] int32.
        logit_rows: [R] int64 tokens of these that get logits.
        states: [B, 2] int32, see `state_rows`; None where no layer keeps states.
        adapters: [B] int32, see `adapters_of`; None where the target has none.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    ancestors: Tensor
    counts: list[int]
    cache_len: Tensor
    block_table: Tensor
    logit_rows: Tensor
    states: Tensor | None = None
    adapters: Tensor | None = None


def tree_tokens(
    plan: SpecPlan, inputs: StepInputs, drafted: Drafted, live: Sequence[int] = ()
) -> FlatTokens:
    """The nodes of a step's trees, as its own verification would pass them; all get logits.

    Args:
        plan: of the step.
        inputs: of the step.
        drafted: of its drafts.
        live: nodes of each tree that are left, the first ones; () is all.
    """
    batch, count = len(inputs.rows), plan.num_nodes
    cache_len = torch.tensor([row[-1] for row in inputs.rows], dtype=torch.int32)
    if not plan.speculates:
        tokens = torch.tensor([row[-2:-1] for row in inputs.rows])
    else:
        tokens = drafted.values["tokens"]
    if plan.is_static or not plan.speculates:
        known, words = _known_tree(plan.tree if plan.speculates else _ROOT)
        depths, ancestors = known.expand(batch, count), words.repeat(batch, 1)
    else:
        depths = drafted.values["depths"].reshape(batch, count)
        ancestors = drafted.values["ancestors"]
    slots = cache_len[:, None] + torch.arange(count, dtype=torch.int32)
    # positions of dead nodes are data, and may be far below zero
    positions = (cache_len[:, None] + depths).clamp(min=0)
    nodes = FlatTokens(
        tokens.reshape(-1),
        positions.reshape(-1).long(),
        slots.reshape(-1).int(),
        ancestors,
        [count] * batch,
        cache_len,
        inputs.block_table,
        torch.arange(batch * count),
        inputs.extra.get(STATES),
        inputs.extra.get(ADAPTERS),
    )
    if not live:
        return nodes
    rows = _is_live(live, count).flatten().nonzero()[:, 0]
    return nodes._replace(
        tokens=nodes.tokens[rows],
        positions=nodes.positions[rows],
        slots=nodes.slots[rows],
        ancestors=nodes.ancestors[rows],
        counts=list(live),
        logit_rows=torch.arange(len(rows)),
    )


def span_tokens(
    spans: Sequence[Span], block_table: Tensor, keeps_states: bool = True
) -> FlatTokens:
    """Chunks of prompts; tokens get logits as `Span.logit_places` says.

    Args:
        spans: of requests.
        block_table: [B, n] int32 of these.
        keeps_states: the target's layers do, if those of any model do.
    """
    tokens = [token for s in spans for token in s.request.token_ids[s.start : s.end]]
    positions = torch.tensor([p for s in spans for p in range(s.start, s.end)])
    counts = [s.end - s.start for s in spans]
    width = -(-max(counts) // WORD_BITS)
    causal = _causal_words(1 << (max(counts) - 1).bit_length())
    words = [causal[:count, :width] for count in counts]
    return FlatTokens(
        torch.tensor(tokens),
        positions,
        positions.int(),
        torch.cat(words),
        counts,
        torch.tensor([s.start for s in spans], dtype=torch.int32),
        block_table,
        logit_rows(spans),
        states_of_spans(spans) if keeps_states else None,
        adapters_of([span.request for span in spans]),
    )


def logit_rows(spans: Sequence[Span]) -> Tensor:
    """[R] tokens of the pass of these spans that get logits."""
    rows, first = [], 0
    for span in spans:
        rows += [first + place for place in span.logit_places]
        first += span.end - span.start
    return torch.tensor(rows, dtype=torch.int64)


def run_together(
    model: Callable[..., Tensor],
    parts: Sequence[FlatTokens],
    device: torch.device | str = "cpu",
    mass: Tensor | None = None,
) -> list[Tensor]:
    """Pass all parts through a model at once.

    Args:
        model: a program that takes flat tokens, or what draws from its logits.
        parts: of different requests.
        device: that the model's caches lie on.
        mass: [B, n] float32 on the device, changed, see `BlockVotes.mass`; None: nobody votes.
    Returns:
        what the model yields of each part: [R, V] logits.
    """
    return begin_together(at_once(model), parts, device, mass)()


def at_once(model: Callable[..., Tensor]) -> Begin:
    """A model whose passes are done when they have begun."""

    def begin(*inputs: Tensor | None) -> Callable[[], Tensor]:
        found = model(*inputs)
        return lambda: found

    return begin


@torch.inference_mode()
def begin_together(
    begin: Begin,
    parts: Sequence[FlatTokens],
    device: torch.device | str = "cpu",
    mass: Tensor | None = None,
) -> Callable[[], list[Tensor]]:
    """Begin a pass of all parts; arguments as of `run_together`, whose result it returns later.

    Args:
        begin: a pass of a model; what it returns waits for the result.
        parts: see there.
        device: see there.
        mass: see there.
    """
    width = max(part.ancestors.shape[1] for part in parts)
    offsets = torch.tensor([0, *(len(part.tokens) for part in parts)]).cumsum(0).tolist()
    counts = torch.tensor([0, *(count for part in parts for count in part.counts)])
    inputs = (
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.positions for part in parts]),
        counts.cumsum(0).int(),
        torch.cat([part.slots for part in parts]),
        torch.cat([part.cache_len for part in parts]),
        torch.cat([_padded(part.ancestors, width) for part in parts]),
        torch.cat([part.block_table for part in parts]),
        torch.cat([part.logit_rows + offset for part, offset in zip(parts, offsets, strict=False)]),
    )
    states = [part.states for part in parts if part.states is not None]
    more = [torch.cat(states)] if states else []
    if adapters := [part.adapters for part in parts if part.adapters is not None]:
        more.append(rows_of_tokens(torch.cat(adapters), counts[1:].tolist()))
    votes = [] if mass is None else [mass]
    taken = begin(*(value.to(device) for value in (*inputs, *more)), *votes)
    rows = [len(part.logit_rows) for part in parts]
    return lambda: list(taken().split(rows))


def accepted_values(
    plan: SpecPlan,
    found: Tensor,
    inputs: StepInputs,
    drafted: Drafted | None = None,
    live: Sequence[int] = (),
) -> Mapping[str, Tensor]:
    """What acceptance reads instead of the verification that it did not see.

    Args:
        plan: of the step.
        found: [B * N, V] logits of the nodes, or [B * N] int64 tokens that were drawn of them; of
            live nodes alone, where they are fewer.
        inputs: of the step.
        drafted: of its drafts; asked where not all nodes are live.
        live: as of `tree_tokens`.
    """
    is_drawn = found.ndim == 1
    if live:
        assert drafted is not None, "whose nodes are dead"
        return _live_values(plan.num_nodes, found, drafted.values["tokens"], live)
    values = {"winners": found.view(-1, plan.num_nodes)} if is_drawn else {"logits": found}
    if plan.speculates:
        return values
    return {**values, "tokens": torch.tensor([row[-2:-1] for row in inputs.rows])}


def _live_values(
    count: int, found: Tensor, tokens: Tensor, live: Sequence[int]
) -> Mapping[str, Tensor]:
    """The same for trees of `count` nodes [B, N] of which some are dead."""
    is_live = _is_live(live, count)
    rows = is_live.flatten().nonzero()[:, 0]
    tokens = tokens.masked_fill(~is_live, DEAD)
    if found.ndim == 1:
        winners = found.new_full((is_live.numel(),), -1)
        return {"winners": winners.index_copy(0, rows, found).view(-1, count), "tokens": tokens}
    # rows of dead nodes stay as they are: no walk comes to where they are read
    logits = found.new_empty(is_live.numel(), found.shape[1])
    logits.index_copy_(0, rows, found)
    return {"logits": logits, "tokens": tokens}


def _is_live(live: Sequence[int], count: int) -> Tensor:
    """[B, N] of trees of N nodes."""
    return torch.arange(count) < torch.tensor(live)[:, None]


@functools.lru_cache(maxsize=64)
def _known_tree(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """[N] int32 depths and [N, W] int64 ancestors of a tree that is the same in every step."""
    return torch.tensor(tree.depths, dtype=torch.int32), tree.ancestor_words()


@functools.lru_cache(maxsize=4)
def _causal_words(count: int) -> Tensor:
    """[count, W]: every node is the child of the one before it."""
    return pack_bits(torch.ones(count, count, dtype=torch.bool).tril())


def _padded(words: Tensor, width: int) -> Tensor:
    missing = width - words.shape[1]
    return torch.nn.functional.pad(words, (0, missing)) if missing else words
