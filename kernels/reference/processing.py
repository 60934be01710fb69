"""Oracle of how a row of logits becomes what is sampled from: penalties, temperature, filters."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.reference.sampling import MIN_TEMPERATURE
from specc.sampling.rows import Rule, Value, Word


def process_reference(logits: Tensor, values: Tensor, words: Tensor) -> Tensor:
    """What a row of logits is sampled from: temperature, then min_p, top_k and top_p.

    In this order, s = logit · (1 / temperature), the factor rounded first, and w = exp(s - max s):
    min_p keeps w ≥ min_p; top_k keeps what is no less than the k-th largest s of the row, so that
    tokens tied with it stay; top_p keeps, of what is left, the shortest prefix by descending s
    whose w sum to at least top_p of their total, and all tokens tied with its last. The best token
    always stays.

    Args:
        logits: [R, V]; a sampled row has no NaN and no +inf, and a finite one.
        values: [R, 6] float32, see `specc.sampling.rows.Value`; penalties are not looked at.
        words: [R, 4] int64, see `specc.sampling.rows.Word`.
    Returns:
        [R, V] float32 s, -inf for tokens that cannot be drawn: probabilities are its softmax. Rows
        below `MIN_TEMPERATURE` come back as they are: their token is the argmax.
    """
    vocab = logits.shape[1]
    temperature, top_k = values[:, Value.TEMPERATURE], words[:, Word.TOP_K]
    is_sampled = temperature >= MIN_TEMPERATURE
    factor = torch.where(is_sampled, 1.0 / temperature, 1.0)
    scores = logits.float() * factor[:, None]
    weights = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    keep = weights >= values[:, Value.MIN_P, None]
    descending, order = scores.sort(dim=1, descending=True, stable=True)
    limit = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    keep &= scores >= descending.gather(1, limit[:, None] - 1)
    # both filters are thresholds of s: what they keep is a prefix of the order
    mass = torch.where(keep, weights, 0.0).gather(1, order).double()
    before = mass.cumsum(dim=1) - mass
    top_p = values[:, Value.TOP_P, None].double()
    in_prefix = before < top_p * mass.sum(dim=1, keepdim=True)
    last = descending.gather(1, in_prefix.sum(dim=1, keepdim=True).clamp(min=1) - 1)
    keep &= (scores >= last) | (top_p >= 1.0)
    return torch.where(keep | ~is_sampled[:, None], scores, -torch.inf)


def are_unfiltered(values: Tensor, words: Tensor) -> bool:
    """Whether no row needs more than its logits, penalties and noise.

    Rows are greedy, or coupled or delta with the whole distribution: no weight of a token is
    compared with those of others, and no proposal is tried by its probability.

    Args:
        values: [R, 6], see `specc.sampling.rows.Value`, on the CPU.
        words: [R, 4], see `specc.sampling.rows.Word`, on the CPU.
    """
    is_sampled = values[:, Value.TEMPERATURE] >= MIN_TEMPERATURE
    is_cut = (values[:, Value.TOP_P] < 1.0) | (values[:, Value.MIN_P] > 0.0)
    is_cut |= (words[:, Word.TOP_K] > 0) | (words[:, Word.RULE] > Rule.DELTA)
    return not bool((is_sampled & is_cut).any())


def penalize_reference(logits: Tensor, context: Tensor, num_prompt: int, values: Tensor) -> Tensor:
    """Penalties of the tokens that a sequence has so far.

    Repetition first, on tokens of prompt and output: a positive logit is divided by it, any other
    multiplied. Then frequency times the count in the output, and presence once, are subtracted.

    Args:
        logits: [V].
        context: [n] int64, prompt, then output; ids outside the vocabulary count for nothing.
        num_prompt: tokens of the prompt.
        values: [6] float32.
    Returns:
        [V] float32.
    """
    wide, vocab = logits.float(), logits.shape[0]
    repetition, presence, frequency = (
        values[column] for column in (Value.REPETITION, Value.PRESENCE, Value.FREQUENCY)
    )
    output = context[num_prompt:]
    seen = torch.bincount(context[(context >= 0) & (context < vocab)], minlength=vocab)
    count = torch.bincount(output[(output >= 0) & (output < vocab)], minlength=vocab)
    repeated = torch.where(wide > 0, wide / repetition, wide * repetition)
    wide = torch.where(seen > 0, repeated, wide)
    penalty = frequency * count.float() + presence * (count > 0).float()
    return torch.where(count > 0, wide - penalty, wide)
