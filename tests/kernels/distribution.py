"""What typed trees put out against the target's own distribution: a toy pair and a step loop.

Target and drafts are tables of logits after the last two tokens, so that the joint distribution of
several tokens is a product that can be written down. Each of many sequences, which differ in their
seeds, drafts, verifies and commits by the operators, as an engine does, until it has put out enough
tokens; their counts are compared with the product.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.kernels.reference.processing import process_reference
from specc.kernels.reference.sampling import gumbel_reference
from specc.sampling.rows import Rule, Value, Word
from tests.kernels.slow_sampling import slow_penalties, slow_probabilities

VOCAB = 6
NUM_TOKENS = 3
NUM_DRAWS = 200_000
# a batch whose tensors stay in the cache
CHUNK = 20_000
# probability that one comparison of sampled counts fails by chance
FALSE_ALARM = 1e-9
# its last two tokens came before, followed by 3, 0, 1
PROMPT = (0, 1, 2, 0, 1, 3, 0, 1)
BLOCK_SIZE = 4
PADDING = -(1 << 30)


@dataclass(frozen=True)
class World:
    """Logits [V, V, V] after two tokens, of the target and of each draft."""

    target: Tensor
    drafts: tuple[Tensor, ...]


@dataclass(frozen=True)
class Options:
    rule: Rule
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def values(self) -> list[float]:
        return [float(getattr(self, column.name.lower())) for column in Value]


@dataclass(frozen=True)
class State:
    """Of a batch between two steps; the operators' arguments of these names."""

    values: Tensor
    words: Tensor
    cache_len: Tensor
    last_tokens: Tensor
    history: Tensor
    block_table: Tensor


@dataclass(frozen=True)
class Proposals:
    """A verified tree and where it comes from, as `accept` takes it; parents are [B, N]."""

    tokens: Tensor
    parents: Tensor
    max_depth: int
    image: Tensor | None = None
    q_rows: Sequence[int] | None = None
    draft_logits: Sequence[Tensor] = ()


# namespace of operators, world, state → tree
Propose = Callable[[Any, World, State], Proposals]


@dataclass(frozen=True)
class Outcome:
    """Counts of emitted tokens against their exact probabilities.

    Args:
        total_variation: half the sum of the absolute differences of frequency and probability.
        variation_bound: what it stays under, but for one comparison in 1 / `FALSE_ALARM`.
        chi_square: Pearson's statistic; infinite where something impossible was put out.
        chi_square_bound: the same of it.
        p_value: of the statistic; the bound stands at `FALSE_ALARM`.
        num_draws: sequences.
        accepted_per_step: draft tokens.
    """

    total_variation: float
    variation_bound: float
    chi_square: float
    chi_square_bound: float
    p_value: float
    num_draws: int
    accepted_per_step: float

    @property
    def is_lossless(self) -> bool:
        is_near = self.total_variation < self.variation_bound
        return is_near and self.chi_square < self.chi_square_bound


def make_world(likeness: float = 0.7, noise: float = 0.7, seed: int = 1) -> World:
    """Random tables of a target and three drafts.

    Args:
        likeness: factor of the target's logits in those of the drafts.
        noise: of each draft's own.
        seed: of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    target, *own = (torch.randn((VOCAB,) * 3, generator=generator) for _ in range(4))
    target = target * 1.3
    return World(target, tuple(likeness * target + noise * numbers for numbers in own))


def logits_after(table: Tensor, tokens: Tensor, parents: Tensor, state: State) -> Tensor:
    """[B, N, V] of nodes [B, N]: after the parent's token, or the one before the root, and its own.

    Dead nodes have the root as their parent.
    """
    # [B, 1 + N]: what stands before the root lies in column 0
    line = torch.cat([state.last_tokens[:, -2:-1], tokens], dim=1)
    above = torch.where(parents >= 0, parents + 1, 0)
    return table[line.gather(1, above.long()), tokens]


def run(
    operators: Any,
    world: World,
    propose: Propose,
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
) -> tuple[Tensor, float]:
    """Step until every sequence has put out `NUM_TOKENS` tokens.

    Args:
        values: [B, 6].
        words: [B, 4].
        cache_len: [B] int32; negative rows are padding, and their output is not looked at.
    Returns:
        [B, NUM_TOKENS] int64, and accepted draft tokens per step.
    """
    state = _start(values, words, cache_len)
    found = torch.full((len(words), NUM_TOKENS + 1), -1, dtype=torch.int64)
    # rows of `found` that are in the batch, and how much each has
    row = torch.arange(len(words))
    count = torch.zeros_like(row)
    num_accepted = num_steps = 0
    while bool((state.cache_len >= 0).any()):
        is_live = state.cache_len >= 0
        tree = propose(operators, world, state)
        q_rows = None if tree.q_rows is None else torch.tensor(tree.q_rows, dtype=torch.int32)
        logits = logits_after(world.target, tree.tokens, tree.parents, state)
        path, accepted, output = operators.accept(
            logits.flatten(0, 1), tree.tokens, tree.parents, tree.max_depth, tree.image,
            q_rows, list(tree.draft_logits), state.values, state.words, state.cache_len,
            state.history, state.block_table,
        )  # fmt: skip
        # the last column takes what is beyond, and -1 after an output is written over
        place = (count[:, None] + torch.arange(output.shape[1])).clamp(max=NUM_TOKENS)
        found[row] = found[row].scatter(1, place, output)
        num_accepted += int(accepted[is_live].sum())
        num_steps += int(is_live.sum())
        where = state.block_table, state.cache_len, state.last_tokens
        operators.record_tokens(state.history, *where, output, accepted)
        last_tokens = operators.next_tokens(state.last_tokens, output, accepted)
        length = torch.where(is_live, (path >= 0).sum(dim=1), 0)
        state = replace(state, cache_len=(state.cache_len + length).int(), last_tokens=last_tokens)
        count = count + length
        # a request that has enough leaves the batch; padding stays
        stays = (count < NUM_TOKENS).nonzero()[:, 0]
        state, row, count = _select(state, stays), row[stays], count[stays]
    return found[:, :NUM_TOKENS], num_accepted / num_steps


def _select(state: State, rows: Tensor) -> State:
    """Some of the sequences; their blocks stay where they are."""
    names = ("values", "words", "cache_len", "last_tokens", "block_table")
    return replace(state, **{name: getattr(state, name)[rows] for name in names})


def _start(values: Tensor, words: Tensor, cache_len: Tensor) -> State:
    batch = len(words)
    num_blocks = -(-(len(PROMPT) + 6 * NUM_TOKENS) // BLOCK_SIZE)
    history = torch.full((batch * num_blocks, BLOCK_SIZE), -1, dtype=torch.int32)
    rows = history.view(batch, -1)
    rows[:, : len(PROMPT) - 1] = torch.tensor(PROMPT[:-1], dtype=torch.int32)
    table = torch.arange(batch * num_blocks, dtype=torch.int32).view(batch, -1)
    last_tokens = torch.tensor(PROMPT[-2:]).expand(batch, -1).contiguous()
    return State(values, words, cache_len, last_tokens, history, table)


def rows_of(options: Sequence[Options | None], num_rows: int, seed: int) -> tuple[Tensor, ...]:
    """Values, words and cache_len of a batch that goes through the options in turn.

    Args:
        options: None is padding.
        num_rows: B.
        seed: of the first row; the others count up.
    """
    turn = torch.arange(num_rows) % len(options)
    rows = [one or Options(Rule.COUPLED) for one in options]
    values = torch.tensor([one.values() for one in rows])[turn]
    words = torch.tensor([[0, one.top_k, int(one.rule), len(PROMPT)] for one in rows])[turn]
    words[:, Word.SEED] = seed + torch.arange(num_rows)
    lens = [PADDING if one is None else len(PROMPT) - 1 for one in options]
    return values, words, torch.tensor(lens, dtype=torch.int32)[turn]


def measure(
    operators: Any,
    world: World,
    propose: Propose,
    options: Options,
    seed: int,
    num_draws: int = NUM_DRAWS,
) -> Outcome:
    """Run sequences of one kind and compare; `seed` is that of the first, the others count up."""
    return measure_mixed(operators, world, propose, [options], seed, num_draws)[0]


def measure_mixed(
    operators: Any,
    world: World,
    propose: Propose,
    options: Sequence[Options | None],
    seed: int,
    num_draws: int = NUM_DRAWS,
) -> list[Outcome]:
    """Sequences of several kinds in the same calls, taking turns; None is padding.

    Returns:
        an outcome of each kind but padding; accepted tokens are those of all kinds.
    """
    drawn, rates = [], []
    chunk = CHUNK - CHUNK % len(options)
    for first in range(0, num_draws, chunk):
        rows = rows_of(options, min(chunk, num_draws - first), seed + first)
        tokens, rate = run(operators, world, propose, *rows)
        drawn.append(tokens)
        rates.append(rate)
    tokens, rate = torch.cat(drawn), statistics.mean(rates)
    return [
        compare(tokens[i :: len(options)], joint(world, one), rate)
        for i, one in enumerate(options)
        if one is not None
    ]


def joint(world: World, options: Options) -> Tensor:
    """[V ** NUM_TOKENS] float64 probability of all continuations of the prompt, in float64.

    Raises:
        AssertionError: float32 might filter in another way; another world will do.
    """
    probs: list[float] = []
    found: dict[tuple[int, ...], list[float]] = {}
    for line in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        value = 1.0
        for i, token in enumerate(line):
            if line[:i] not in found:
                found[line[:i]] = _conditional(world, options, [*PROMPT, *line[:i]])
            value *= found[line[:i]][token]
        probs.append(value)
    return torch.tensor(probs, dtype=torch.float64)


def _conditional(world: World, options: Options, context: list[int]) -> list[float]:
    logits = world.target[context[-2], context[-1]].tolist()
    logits = slow_penalties(logits, context, len(PROMPT), vars(options))
    filters = options.min_p, options.top_k, options.top_p
    probs = slow_probabilities(logits, options.temperature, *filters)
    assert probs is not None, f"rounding decides after {context}"
    return probs


def compare(tokens: Tensor, probs: Tensor, accepted_per_step: float) -> Outcome:
    """Counts of [n, NUM_TOKENS] tokens against probabilities [V ** NUM_TOKENS].

    The expected total variation is at most ½ Σ √(p (1 - p) / n) (Jensen), and as one draw moves it
    by 1 / n at most, it exceeds its expectation by t with probability exp(-2 n t²) (McDiarmid).
    """
    weights = VOCAB ** torch.arange(NUM_TOKENS - 1, -1, -1)
    counts = torch.bincount((tokens * weights).sum(dim=1), minlength=len(probs)).double()
    n = len(tokens)
    spread = float((probs * (1 - probs) / n).sqrt().sum()) / 2
    chi_square, freedom = _chi_square(counts, probs * n)
    return Outcome(
        total_variation=float((counts / n - probs).abs().sum()) / 2,
        variation_bound=spread + math.sqrt(-math.log(FALSE_ALARM) / (2 * n)),
        chi_square=chi_square,
        chi_square_bound=chi_square_bound(freedom),
        p_value=p_value(chi_square, freedom),
        num_draws=n,
        accepted_per_step=accepted_per_step,
    )


def _chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare cells are one cell."""
    if bool((counts[expected == 0] > 0).any()):
        return math.inf, 1
    is_rare = expected < 10
    counts, expected = (
        torch.cat([cells[~is_rare], cells[is_rare].sum()[None]]) for cells in (counts, expected)
    )
    if float(expected[-1]) < 10:
        counts, expected = counts[:-1], expected[:-1]
    return float(((counts - expected).square() / expected).sum()), len(expected) - 1


def chi_square_bound(freedom: int) -> float:
    """Wilson and Hilferty's approximation."""
    if freedom == 0:
        return 1e-9
    quantile = statistics.NormalDist().inv_cdf(1 - FALSE_ALARM)
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + quantile * math.sqrt(spread)) ** 3


def p_value(chi_square: float, freedom: int) -> float:
    """Probability that a right implementation has a statistic as large."""
    half = torch.tensor([freedom / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])) if freedom else 1.0


def sampled_alone(world: World, values: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """What sequences put out without speculation, by the noise of their seeds; no penalties.

    Returns:
        [B, NUM_TOKENS] int64, and [B] whether the two best tokens were ever nearly equal.
    """
    batch = len(words)
    line = torch.tensor(PROMPT[-2:]).repeat(batch, 1)
    is_near = torch.zeros(batch, dtype=torch.bool)
    for i in range(NUM_TOKENS):
        scores = process_reference(world.target[line[:, -2], line[:, -1]], values, words)
        position = torch.tensor(len(PROMPT) + i)
        scores = scores + gumbel_reference(words[:, :1], position, torch.arange(VOCAB))
        best = scores.topk(2, dim=1)
        is_near |= best.values[:, 0] - best.values[:, 1] < 1e-5
        line = torch.cat([line, best.indices[:, :1]], dim=1)
    return line[:, 2:], is_near


def write_figures(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write outcomes, and how near to their bounds they are; losing schemes have `is_wrong`."""
    path.parent.mkdir(exist_ok=True)
    ratios = {
        is_wrong: [
            row["total_variation"] / row["variation_bound"]
            for row in rows
            if row.get("is_wrong", False) == is_wrong
        ]
        for is_wrong in (False, True)
    }
    summary = {
        "num_cases": len(rows),
        "num_draws": sum(row["num_draws"] for row in rows),
        "false_alarm": FALSE_ALARM,
        "largest_variation_over_bound": max(ratios[False]),
        "smallest_variation_over_bound_of_losing_schemes": min(ratios[True]),
        "smallest_p_value": min(row["p_value"] for row in rows if not row.get("is_wrong")),
        "cases": rows,
    }
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
