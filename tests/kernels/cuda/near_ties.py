"""What a GPU may answer where a comparison is nearly a tie; everything else is wrong.

`exp`, `log`, division and the order of a sum differ between a GPU and the CPU in the last bits, so
a filter or a walk may end differently where two sides of a comparison are closer than that. What
is computed here is the whole set of answers that the errors below allow; one that is wrong by more
is none of them. Scores, noise and uniforms are promised bit for bit and taken from the oracles:
greedy, coupled and delta rows without filters have one answer.

Errors, as bounds on what a kernel computes in float32, x = s - max s:

- exp(x), relative: the argument times log2(e) is rounded twice, and `ex2.approx` is right to
  2^-22 (PTX ISA, floating point instructions): at most (2 + |x|) 2^-22.
- A sum of weights, relative: 1e-5, the tolerance of the tests of sums.
- log(p), absolute: the relative error of p, and (2 + |log p|) 2^-22.
- The cut of min_p has none: kernels compare x with a logarithm of additions and multiplications,
  which all devices round alike. Next to the oracle's exponential it may keep one float more or
  less, and which one is known: there are two answers, the logarithm's and the exponential's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from specc.kernels.reference.accept import (
    TRIED_RULES,
    _context_of,
    _has_penalty,
    _is_sampled,
    _path_to,
    _token_noise,
    draft_children_reference,
)
from specc.kernels.reference.processing import penalize_reference
from specc.kernels.reference.sampling import _log, _split, uniform_reference
from specc.sampling.rows import Rule, Value, Word
from tests.kernels.cuda.typed_trees import Forest

# devices whose exp, log and division are not the CPU's
INEXACT = ("cuda",)
UNIT = 2.0**-22
MASS_ERROR = 1e-5
# what `row_scan.cut_of_min_p` takes off: a weight that is less than min_p by half a unit is
# rounded to it; and the least number that has a logarithm there
HALF_UNIT, LEAST_NORMAL = 2.0**-25, 2.0**-126
# rows of one batch: path, output tokens
Walk = tuple[tuple[int, ...], tuple[int, ...]]


class UndecidedError(AssertionError):
    """Inputs for which the errors allow nearly everything: no test of anything."""


def exp_error(x: Tensor) -> Tensor:
    """Relative error of exp(x)."""
    return (2.0 + x.abs()) * UNIT


def score_error(scores: Tensor) -> Tensor:
    """Absolute error of log p = s - log sum exp(s), where s is exact."""
    return MASS_ERROR + (2.0 + scores.abs()) * UNIT


def are_scores(found: Tensor, wanted: Tensor) -> bool:
    """Whether scores are those wanted, to the error above; NaN and infinity are themselves."""
    is_same = (found == wanted) | (found.isnan() & wanted.isnan())
    return bool((is_same | ((found - wanted).abs() <= score_error(wanted))).all())


def permitted_rows(logits: Tensor, values: Tensor, words: Tensor) -> list[Tensor]:
    """What `process_reference` makes of one row [V], where near ties of filters fall either way.

    Args:
        logits: [V], penalized.
        values: [6] float32, see `specc.sampling.rows.Value`.
        words: [4] int64, see `specc.sampling.rows.Word`.
    Returns:
        [V] float32 each: s, -inf for tokens that cannot be drawn; the one of most tokens first.
    """
    if not _is_sampled(values):
        return [logits.float()]
    s = logits.float() * (1.0 / values[Value.TEMPERATURE])
    levels, place = s[s > -torch.inf].unique(return_inverse=True)
    # by descending s: filters keep the first levels
    levels, count = levels.flip(0), place.bincount().flip(0)
    x = levels - levels[0]
    weight = x.double().exp()
    num_top = len(levels)
    top_k = int(words[Word.TOP_K])
    if 0 < top_k < len(s):
        num_top = int((count.cumsum(0) - count < top_k).sum())
    top_p, lengths = float(values[Value.TOP_P]), set()
    for num_likely in {min(num_top, length) for length in _likely(x, values[Value.MIN_P])}:
        if top_p >= 1.0:
            lengths.add(num_likely)
            continue
        mass = (weight * count)[:num_likely]
        before, total = mass.cumsum(0) - mass, mass.sum()
        slack = 2 * MASS_ERROR * total
        lengths |= set(_prefixes(before < top_p * total + slack, before < top_p * total - slack))
    return [torch.where(s >= levels[n - 1], s, -torch.inf) for n in sorted(lengths, reverse=True)]


def _likely(x: Tensor, min_p: Tensor) -> set[int]:
    """How many of the best levels, by x = s - max s in float32, min_p may keep."""
    if min_p <= 0.0:
        return {len(x)}
    least = _log(*_split(min_p.clamp(min=LEAST_NORMAL)[None])) - HALF_UNIT
    return {max(1, int((x >= least).sum())), max(1, int((x.exp() >= min_p).sum()))}


def _prefixes(may_stay: Tensor, must_stay: Tensor) -> list[int]:
    """Lengths of prefixes, at least 1, that hold what must stay and nothing that may not."""
    least = int(must_stay.nonzero().max()) + 1 if must_stay.any() else 1
    most = int((~may_stay).nonzero().min()) if not may_stay.all() else len(may_stay)
    return list(range(max(least, 1), max(least, most, 1) + 1))


def is_permitted_cut(kept: Tensor, logits: Tensor, values: Tensor, words: Tensor) -> bool:
    """Whether tokens kept [V] are what a filter may keep."""
    rows = permitted_rows(logits, values, words)
    return any(torch.equal(kept, row > -torch.inf) for row in rows)


def permitted_walks(inputs: Forest, b: int) -> set[Walk]:
    """Walks of one sequence of `accept`, where near ties fall either way.

    Raises:
        UndecidedError: next to nothing of a distribution is left, or of a proposal's probability.
    """
    length = int(inputs.cache_len[b])
    width = inputs.max_depth + 1
    if length < 0:
        return {((0, *(-1,) * inputs.max_depth), (0, *(-1,) * inputs.max_depth))}
    start = _context_of(inputs.history, inputs.block_table[b], length, inputs.values[b])
    walks = set()

    def walk(node: int, context: Tensor, path: list[int], output: list[int]) -> None:
        context = torch.cat([context, inputs.tokens[b, node, None]])
        for entered, token in _next_nodes(inputs, b, node, len(output), context):
            longer = [*output, token]
            if entered is None:
                padded = (_padded(path, width), _padded(longer, width))
                walks.add(padded)
            else:
                walk(entered, context, [*path, entered], longer)

    walk(0, start, [0], [])
    return walks


def _padded(items: list[int], width: int) -> tuple[int, ...]:
    return (*items, *(-1,) * (width - len(items)))


def _next_nodes(
    inputs: Forest, b: int, node: int, depth: int, context: Tensor
) -> set[tuple[int | None, int]]:
    """(node that is entered or None, token that is put out)."""
    values, words = inputs.values[b], inputs.words[b]
    batch, num_nodes = inputs.tokens.shape
    logits = inputs.logits.view(batch, num_nodes, -1)[b, node]
    if _has_penalty(values):
        logits = penalize_reference(logits, context, int(words[Word.NUM_PROMPT]), values)
    is_child = inputs.parents[b] == node
    is_child[0] = False
    is_child &= depth < inputs.max_depth
    offset = torch.tensor(int(inputs.cache_len[b]) + depth + 1)
    rows = permitted_rows(logits, values, words)
    if words[Word.RULE] in TRIED_RULES and _is_sampled(values):
        proposals = _Proposals(inputs, b, is_child, offset)
        return set().union(*(proposals.outcomes(row) for row in rows))
    found: set[tuple[int | None, int]] = set()
    for token in _winners(rows, values, words, offset):
        following = (is_child & (inputs.tokens[b] == token)).nonzero()
        found.add((int(following[0]) if len(following) else None, token))
    return found


def _winners(rows: list[Tensor], values: Tensor, words: Tensor, offset: Tensor) -> set[int]:
    if not _is_sampled(values):
        return {int(row.argmax()) for row in rows}
    return {int((row + _token_noise(row, words, offset)).argmax()) for row in rows}


def permitted_winners(inputs: Forest, b: int, node: int) -> set[int]:
    """Tokens of `node_winners` at a node; -1 for one that hangs below no root, and for padding."""
    path = _path_to(node, inputs.parents[b].tolist())
    length, values, words = int(inputs.cache_len[b]), inputs.values[b], inputs.words[b]
    if not path or length < 0:
        return {-1}
    logits = inputs.logits.view(*inputs.tokens.shape, -1)[b, node]
    if _has_penalty(values):
        before = _context_of(inputs.history, inputs.block_table[b], length, values)
        context = torch.cat([before, inputs.tokens[b, path]])
        logits = penalize_reference(logits, context, int(words[Word.NUM_PROMPT]), values)
    rows = permitted_rows(logits, values, words)
    return _winners(rows, values, words, torch.tensor(length + len(path)))


def permitted_children(
    logits: Tensor,
    num_children: int,
    length: int,
    column: int,
    depth: int,
    values: Tensor,
    words: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """Children [k] and scores [k] of a row [V] of `draft_children`."""
    # what filters leave, as logits of a row without any
    plain = values.clone()
    plain[Value.TOP_P], plain[Value.MIN_P] = 1.0, 0.0
    unfiltered = words.clone()
    unfiltered[Word.TOP_K] = 0
    is_plain = not _is_sampled(values) or int(words[Word.RULE]) == Rule.DELTA
    rows = [logits.float()] if is_plain else permitted_rows(logits, values, words)
    if not is_plain:
        plain[Value.TEMPERATURE] = 1.0  # scores are scaled
    found = []
    for row in rows:
        tokens, scores = draft_children_reference(
            row[None], num_children, torch.tensor([length]), torch.tensor([column]), depth,
            plain[None], unfiltered[None], True,
        )  # fmt: skip
        found.append((tokens[0], scores[0]))
    return found


class _Proposals:
    """What trying the proposals below a node may come to."""

    def __init__(self, inputs: Forest, b: int, is_child: Tensor, offset: Tensor) -> None:
        self.tokens, self.offset, self.vocab = inputs.tokens[b], offset, inputs.logits.shape[1]
        self.values, self.words = inputs.values[b], inputs.words[b]
        batch, num_nodes = inputs.tokens.shape
        image = torch.arange(num_nodes).expand(batch, -1) if inputs.image is None else inputs.image
        drawn_from = [-1] * image.shape[1]
        if inputs.q_rows is not None:
            drawn_from = inputs.q_rows.tolist()
        self.proposals = [
            (column, node, drawn_from[column])
            for column, node in enumerate(image[b].tolist())
            if node > 0 and is_child[node]
        ]
        self.drafts = [x.view(batch, -1, x.shape[1])[b] for x in inputs.draft_logits]

    def outcomes(self, row: Tensor) -> set[tuple[int | None, int]]:
        return self._try(0, *_probabilities(row), {})

    def _try(
        self, i: int, p: Tensor, p_error: Tensor, tried: dict[int, list[int]]
    ) -> set[tuple[int | None, int]]:
        """From proposal i on, with probabilities of the target and their absolute errors."""
        if i == len(self.proposals):
            return {(None, token) for token in self._samples(p, p_error)}
        column, node, row = self.proposals[i]
        token = int(self.tokens[node])
        found: set[tuple[int | None, int]] = set()
        for q, q_error in self._draft(row, token, tried.get(row, [])):
            if q[token] == 0:
                found |= self._try(i + 1, p, p_error, tried)
                continue
            if q[token] < 1e-30:
                raise UndecidedError(f"column {column}: q of token {token} is {q[token]}")
            uniform = uniform_reference(self.words[Word.SEED], self.offset, torch.tensor(column))
            over = float(uniform.double() * q[token] - p[token])
            margin = float(uniform.double() * q_error[token] + p_error[token])
            if over <= margin:
                found.add((node, token))
            if over > -margin:
                left, left_error = _rest(p, p_error, q, q_error)
                following = {**tried, row: [*tried.get(row, []), token]}
                found |= self._try(i + 1, left, left_error, following)
        return found

    def _draft(self, row: int, token: int, tried: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Probabilities that a proposal was drawn with, and their errors."""
        if row < 0:
            q = torch.zeros(self.vocab, dtype=torch.float64)
            q[token] = 1.0
            yield q, torch.zeros_like(q)
            return
        logits = torch.cat(self.drafts)[row]
        for scores in permitted_rows(logits, self.values, self.words):
            q, q_error = _probabilities(scores)
            if self.words[Word.RULE] == Rule.SWOR and tried:
                q[tried], q_error[tried] = 0.0, 0.0
                left = q.sum()
                # each term is right to its own error, and so is their sum
                share = q_error.sum() / left if left > 0 else torch.tensor(0.0)
                q_error = (q_error + q * share) / left if left > 0 else q_error
                q = q / left if left > 0 else q
            yield q, q_error

    def _samples(self, p: Tensor, p_error: Tensor) -> list[int]:
        """Tokens that may have the best log p + noise."""
        noise = _token_noise(p, self.words, self.offset).double()
        rounding = (2.0 + p.log().abs() + noise.abs()) * UNIT
        high = (p + p_error).log() + noise + rounding
        low = (p - p_error).clamp(min=0.0).log() + noise - rounding
        return torch.nonzero(high >= low.nan_to_num(-torch.inf).max()).flatten().tolist()


def _probabilities(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax in float64, and what a float32 one may differ by."""
    x = (scores - scores.max()).double()
    p = x.softmax(dim=0)
    return p, torch.where(p > 0, p * (exp_error(x) + MASS_ERROR), 0.0)


def _rest(p: Tensor, p_error: Tensor, q: Tensor, q_error: Tensor) -> tuple[Tensor, Tensor]:
    """What a rejection leaves of p, and its absolute error."""
    error = torch.where(p - q > -(p_error + q_error), p_error + q_error, 0.0)
    rest = (p - q).clamp(min=0.0)
    total, total_error = rest.sum(), error.sum()
    if total <= 2 * total_error:
        raise UndecidedError(f"a rejection leaves {total:.3g}, known to {total_error:.3g}")
    rest = rest / total
    return rest, (error + rest * total_error) / (total - total_error)


def check_equal_or_near(
    found: Iterable[Any],
    wanted: Iterable[Any],
    device: torch.device,
    is_permitted: Callable[[int], bool],
    is_equal: Callable[[Any, Any], bool] = operator.eq,
) -> None:
    """Row by row: equal to the oracle's or, on a GPU, permitted. Raises AssertionError."""
    for row, (one, other) in enumerate(zip(found, wanted, strict=True)):
        is_good = is_equal(one, other) or (device.type in INEXACT and is_permitted(row))
        assert is_good, f"row {row}: found {one}; needed {other}"
