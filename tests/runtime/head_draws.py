"""What engines with a head put out and accept, against the exact probabilities of both.

Vocabularies have six tokens, so that the probability of every continuation can be written down. Two
things are compared, as each sees what the other does not. Outputs have to follow the target's own
distribution, whatever the head proposes. And of static trees it is known how often a proposal is
accepted, given the tokens before it: from the target's probabilities p, and q of a reference of the
head. Outputs cannot tell whether a head reads the right hidden states, or means the ids that it
proposes; acceptance does.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.sampling.rows import Rule
from specc.speculation.plans import SpecPlan
from tests.head_reference import Reference, hidden_states
from tests.heads import Case
from tests.kernels.distribution import (
    FALSE_ALARM,
    NUM_TOKENS,
    VOCAB,
    Outcome,
    chi_square_bound,
    compare,
    p_value,
)

PROMPT = (3, 0, 4, 1, 5, 2, 2)
# that a request puts out: the first comes from its prompt, the next three are compared, and the
# last lets the first step put out all that a chain of three may have accepted
NUM_OUTPUT = NUM_TOKENS + 2
TEMPERATURE = 0.8
# cells that are compared on their own: variance of how often they are accepted
LEAST_VARIANCE = 5.0
# logits [V] of a head after tokens and a path of drafted ones
Head = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Acceptance:
    """How often proposals of one depth were accepted, over all contexts.

    Args:
        depth: 1 is the first.
        num_steps: that could have accepted one.
        accepted: how many did.
        expected: how many should have.
    """

    depth: int
    num_steps: int
    accepted: int
    expected: float
    chi_square: float
    bound: float
    p_value: float


@dataclass(frozen=True)
class Drawn:
    """Outputs of all requests, and how many proposals each of their steps accepted.

    Args:
        tokens: [n, NUM_OUTPUT].
        steps: (output tokens before it, most that it could accept, how many it did) → how often.
        accepted_per_step: draft tokens, of all steps with a tree.
    """

    tokens: Tensor
    steps: Counter[tuple[tuple[int, ...], int, int]]
    accepted_per_step: float


def draw(engine: Engine, plan: SpecPlan, rule: Rule, num: int, first_seed: int) -> Drawn:
    """Let requests of one prompt put out tokens, a full batch at a time.

    Args:
        engine: with room for more than the batch in its limits.
        first_seed: of the first; the others count up.
    """
    core, batch = EngineCore(engine, plan.name), engine.cache.shape.max_num_seqs
    tokens: list[list[int]] = []
    steps: Counter[tuple[tuple[int, ...], int, int]] = Counter()
    for first in range(0, num, batch):
        requests = [
            core.requests.make(
                list(PROMPT),
                SamplingParams(
                    max_tokens=NUM_OUTPUT,
                    ignore_eos=True,
                    temperature=TEMPERATURE,
                    rule=rule.name.lower(),
                    seed=first_seed + first + i,
                ),
            )
            for i in range(min(batch, num - first))
        ]
        for request in requests:
            core.scheduler.add(request)
        while core.scheduler.has_work:
            before = [tuple(request.output_token_ids) for request in requests]
            assert core.advance()
            for had, request in zip(before, requests, strict=True):
                new = len(request.output_token_ids) - len(had)
                if had and new:
                    # the last place is the bonus token's
                    most = min(plan.max_depth, NUM_OUTPUT - len(had) - 1)
                    steps[had, most, new - 1] += 1
        tokens += [request.output_token_ids for request in requests]
    stats = core.scheduler.stats
    rate = stats.num_accepted_tokens / max(stats.num_spec_steps, 1)
    return Drawn(torch.tensor(tokens), steps, rate)


class Exact:
    """Probabilities of a target and of a head, at `TEMPERATURE`."""

    def __init__(self, target: Any, head: Head) -> None:
        lines = list(itertools.product(range(VOCAB), repeat=NUM_TOKENS))
        with torch.no_grad():
            logits = target(torch.tensor([[*PROMPT, *line] for line in lines])).logits
        probs = (logits[:, len(PROMPT) - 1 :].double() / TEMPERATURE).softmax(-1)
        self._probs = {
            line[:count]: row[count]
            for line, row in zip(lines, probs, strict=True)
            for count in range(NUM_TOKENS + 1)
        }
        self._head = head
        self._drafted: dict[Any, Tensor] = {}

    def p(self, output: tuple[int, ...]) -> Tensor:
        """[V] float64 after output tokens, at most `NUM_TOKENS`."""
        return self._probs[output]

    def q(self, output: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """[V] float64 of the head, after output tokens and a path of drafted ones."""
        if (output, path) not in self._drafted:
            logits = self._head((*PROMPT, *output), path)
            self._drafted[output, path] = (logits.double() / TEMPERATURE).softmax(0)
        return self._drafted[output, path]

    def outcome(self, drawn: Drawn) -> Outcome:
        """The tokens after the first, whatever it was, against the target's own distribution."""
        return compare(drawn.tokens[:, 1 : NUM_TOKENS + 1], self.joint(), drawn.accepted_per_step)

    def joint(self) -> Tensor:
        """[V ** NUM_TOKENS] float64 probability of the tokens after the first."""
        return torch.tensor(
            [
                sum(self._chance((first, *line)) for first in range(VOCAB))
                for line in itertools.product(range(VOCAB), repeat=NUM_TOKENS)
            ],
            dtype=torch.float64,
        )

    def acceptances(self, drawn: Drawn, rule: Rule, widths: Sequence[int]) -> list[Acceptance]:
        """How often a tree's proposals of each depth were accepted, and how often they had to be.

        Given the tokens before a step, whether it accepts is a toss of its own: rare contexts are
        one cell, with the sum of their variances. Depths that are hardly ever accepted, or always,
        are left out.

        Args:
            widths: of the tree, or of its first levels.
        """
        levels = (widths[:depth] for depth in range(1, len(widths) + 1))
        found = (self._acceptance(drawn, rule, level) for level in levels)
        return [one for one in found if one is not None]

    def _acceptance(self, drawn: Drawn, rule: Rule, widths: Sequence[int]) -> Acceptance | None:
        depth = len(widths)
        trials: Counter[tuple[int, ...]] = Counter()
        hits: Counter[tuple[int, ...]] = Counter()
        for (had, most, accepted), count in drawn.steps.items():
            if most >= depth:
                trials[had] += count
                hits[had] += count * (accepted >= depth)
        wanted, statistic, freedom = 0.0, 0.0, 0
        rare_off = rare_variance = 0.0
        for had, count in trials.items():
            chance = self.survival(had, (), rule, widths)
            off, variance = hits[had] - count * chance, count * chance * (1 - chance)
            assert chance > 0 or not hits[had], f"accepted at depth {depth} after {had}: impossible"
            wanted += count * chance
            if variance >= LEAST_VARIANCE:
                statistic, freedom = statistic + off**2 / variance, freedom + 1
            else:
                rare_off, rare_variance = rare_off + off, rare_variance + variance
        if rare_variance >= LEAST_VARIANCE:
            statistic, freedom = statistic + rare_off**2 / rare_variance, freedom + 1
        if not freedom:
            return None
        return Acceptance(
            depth=depth,
            num_steps=sum(trials.values()),
            accepted=sum(hits.values()),
            expected=wanted,
            chi_square=statistic,
            bound=chi_square_bound(freedom),
            p_value=p_value(statistic, freedom),
        )

    def survival(
        self, had: tuple[int, ...], path: tuple[int, ...], rule: Rule, widths: Sequence[int]
    ) -> float:
        """Probability that all levels of a tree accept a token.

        Args:
            had: output tokens before the step.
            path: of the tree down to a node.
            widths: of the levels below that node.
        """
        if not widths:
            return 1.0
        p, q = self.p((*had, *path)), self.q(had, path)
        return sum(
            chance * self.survival(had, (*path, token), rule, widths[1:])
            for token, chance in enumerate(accepted_by(rule, p, q, widths[0]).tolist())
            if chance > 0
        )

    def _chance(self, line: tuple[int, ...]) -> float:
        chance = 1.0
        for i, token in enumerate(line):
            chance *= float(self.p(line[:i])[token])
        return chance


def accepted_by(rule: Rule, p: Tensor, q: Tensor, count: int) -> Tensor:
    """[V] probability that a node's children contain a token and that it is accepted.

    Args:
        p: [V] float64 of the target.
        q: [V] float64 of the head.
    """
    if rule == Rule.COUPLED:
        chances = [_coupled(p, q, count, token) for token in range(len(p))]
        return torch.tensor(chances, dtype=p.dtype)
    if rule == Rule.DELTA:
        return torch.zeros_like(p).scatter(0, q.topk(count).indices, 1.0) * p
    return _tried(p, q, count, replaces=rule == Rule.MSS)


def _coupled(p: Tensor, q: Tensor, count: int, token: int) -> float:
    """Probability that a token x has the largest log p + g, and one of the largest log q + g.

    With exponential variables e = exp(-g), it has the smallest e / p, and fewer than `count` others
    have a smaller e / q. Given e_x = t, another one y does neither with probability exp(-t m), m =
    max(p_y / p_x, q_y / q_x), and the second alone with exp(-t p_y / p_x) - exp(-t q_y / q_x), if
    that is positive; products of these are integrated over t, term by term.
    """
    if min(p[token], q[token]) == 0:
        return 0.0
    a, b = (p / p[token]).tolist(), (q / q[token]).tolist()
    others = [y for y in range(len(a)) if y != token]
    better = [y for y in others if b[y] > a[y]]
    total = 0.0
    for size in range(count):
        for before in itertools.combinations(better, size):
            rest = 1 + sum(max(a[y], b[y]) for y in others if y not in before)
            for signs in itertools.product((False, True), repeat=size):
                own = (b[y] if sign else a[y] for y, sign in zip(before, signs, strict=True))
                total += (-1) ** sum(signs) / (rest + sum(own))
    return total


def _tried(p: Tensor, q: Tensor, count: int, replaces: bool) -> Tensor:
    """[V] of draws from q that are tried against what rejections have left of p.

    Args:
        p: [V] of the target, or what is left of it.
        q: [V] of the head, or of the tokens that were not drawn.
        replaces: a token may be drawn again.
    """
    accepted = torch.minimum(p, q)
    left = (p - q).clamp(min=0)
    if count == 1 or left.sum() == 0:
        return accepted
    left = left / left.sum()
    for token, chance in enumerate((q - accepted).tolist()):
        if chance > 0:
            after = q if replaces else q.index_fill(0, torch.tensor(token), 0.0)
            if after.sum() > 0:
                found = _tried(left, after / after.sum(), count - 1, replaces)
                accepted = accepted + chance * found
    return accepted


def fitted(case: Case, tensors: dict[str, Tensor], target: Any) -> dict[str, Tensor]:
    """Tensors of a head that proposes what its target likes, as far as its features tell.

    Its head is that of least squares, over all short outputs, to the target's logits of the kept
    ids.

    Args:
        case: an EAGLE-3.1 head, which hands on what its head reads.
    """
    reference = Reference(case, tensors, target.get_input_embeddings().weight.detach())
    kept = torch.arange(case.rows) + tensors["d2t"]
    rows, wanted = [], []
    for line in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        tokens = [*PROMPT, *line]
        with torch.no_grad():
            logits = target(torch.tensor([tokens])).logits[0, len(PROMPT) - 1 :, kept]
        taps = hidden_states(target, tokens[:-1], case.boundaries)
        rows.append(reference.run(reference.project(taps), tokens[1:])[0][len(PROMPT) - 2 :])
        wanted.append(logits - logits.mean(dim=1, keepdim=True))
    x, y = torch.cat(rows), torch.cat(wanted)
    found = torch.linalg.solve(x.T @ x + torch.eye(x.shape[1]), x.T @ y)
    return tensors | {"lm_head.weight": found.T.contiguous()}


def collect_draws(path: Path, num_cases: int) -> Iterator[list[dict[str, Any]]]:
    """For fixtures: the list that gets a row of each case; written if all were measured."""
    rows: list[dict[str, Any]] = []
    yield rows
    if len(rows) < num_cases:
        return
    ratios = [row["outcome"]["total_variation"] / row["outcome"]["variation_bound"] for row in rows]
    depths = [one for row in rows for one in row["acceptances"]]
    summary = {
        "num_cases": len(rows),
        "num_draws": sum(row["outcome"]["num_draws"] for row in rows),
        "num_acceptances": len(depths),
        "false_alarm": FALSE_ALARM,
        "largest_variation_over_bound": max(ratios),
        "largest_chi_square_over_bound": max(
            row["outcome"]["chi_square"] / row["outcome"]["chi_square_bound"] for row in rows
        ),
        "largest_chi_square_of_acceptance_over_bound": max(
            one["chi_square"] / one["bound"] for one in depths
        ),
        "smallest_p_value": min(row["outcome"]["p_value"] for row in rows),
        "smallest_p_value_of_acceptance": min(one["p_value"] for one in depths),
        "cases": rows,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def row_of(
    case: dict[str, str], outcome: Outcome, acceptances: Sequence[Acceptance]
) -> dict[str, Any]:
    """Figures of one case."""
    return case | {"outcome": asdict(outcome), "acceptances": [asdict(x) for x in acceptances]}
