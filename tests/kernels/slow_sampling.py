"""Rows of sampling options, and what they mean: in Python's floats, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specc.kernels.reference.sampling import gumbel_reference
from specc.sampling.rows import Rule, Value

# relative to the sum: nearer to a bar than this, float32 may keep what float64 drops
ROUNDING = 1e-5


def slow_probabilities(
    logits: Sequence[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> list[float] | None:
    """Probabilities after processing; None where rounding may decide what a filter keeps."""
    if temperature == 0:
        best = logits.index(max(logits))
        return [float(i == best) for i in range(len(logits))]
    scores = [x / temperature for x in logits]
    best = max(scores)
    weights = [math.exp(s - best) for s in scores]
    kept = {i for i, w in enumerate(weights) if w >= min_p}
    if min_p and any(0 < abs(w - min_p) < ROUNDING for w in weights):
        return None
    if 0 < top_k < len(scores):
        bar = sorted(scores, reverse=True)[top_k - 1]
        kept &= {i for i, s in enumerate(scores) if s >= bar}
    if top_p < 1:
        total = sum(weights[i] for i in kept)
        running, chosen = 0.0, set()
        for i in sorted(kept, key=lambda i: (-scores[i], i)):
            chosen.add(i)
            running += weights[i]
            if abs(running / total - top_p) < ROUNDING:
                return None
            if running / total >= top_p:
                break
        least = min(scores[i] for i in chosen)
        kept = {i for i in kept if scores[i] >= least}
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(scores))]


def slow_penalties(
    logits: Sequence[float],
    context: Sequence[int],
    num_prompt: int,
    options: Mapping[str, float],
) -> list[float]:
    """As vLLM defines them: repetition, then frequency, then presence."""
    output, penalized = context[num_prompt:], []
    for token, logit in enumerate(logits):
        if token in context:
            r = options["repetition"]
            logit = logit / r if logit > 0 else logit * r
        logit -= options["frequency"] * output.count(token)
        logit -= options["presence"] * (token in output)
        penalized.append(logit)
    return penalized


def values_of(batch: int = 1, **changes: float) -> Tensor:
    row = dict.fromkeys(Value, 0.0) | {Value.TEMPERATURE: 1.0, Value.TOP_P: 1.0}
    row |= {Value.REPETITION: 1.0} | {Value[name.upper()]: x for name, x in changes.items()}
    return torch.tensor([[row[column] for column in Value]]).repeat(batch, 1)


def words_of(rule: Rule, batch: int = 1, seed: int = 3, top_k: int = 0, prompt: int = 0) -> Tensor:
    rows = [[seed + b, top_k, int(rule), prompt] for b in range(batch)]
    return torch.tensor(rows, dtype=torch.int64)


def noise_of(seed: int, position: int, purpose: int, vocab: int) -> Tensor:
    return gumbel_reference(
        torch.tensor(seed), torch.tensor(position), torch.arange(vocab), purpose
    )
