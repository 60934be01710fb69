"""Log probabilities of emitted tokens, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.runtime.sequence import Sequence


@dataclass(frozen=True)
class Logprob:
    """The model's own log probability of a token, before penalties and temperature.

    Args:
        rank: 1 is the most likely token; equal ones share the better rank.
    """

    logprob: float
    rank: int


# token id → log probability: the emitted token, then the best ones
TokenLogprobs = dict[int, Logprob]
# of each token of a prompt; nothing comes before the first
PromptLogprobs = list[TokenLogprobs | None]
# rows whose log probabilities are computed at once: V floats each, a few times
_ROWS_AT_ONCE = 64


def wants_logprobs(sequences: Sequence_[Sequence]) -> bool:
    return any(sequence.params.logprobs is not None for sequence in sequences)


def token_logprobs(logits: Tensor, tokens: Sequence_[int], count: int) -> list[TokenLogprobs]:
    """Log probabilities of tokens that came after each other.

    Args:
        logits: [n, V], the row that each token was drawn from.
        tokens: n of them.
        count: best tokens to name besides.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=1) + 1
    found = [
        {token: Logprob(value, rank)}
        for token, value, rank in zip(tokens, chosen[:, 0].tolist(), ranks.tolist(), strict=True)
    ]
    # equal ones by ascending id, as decoding takes them
    best = logprobs.sort(dim=1, descending=True, stable=True)
    rows = zip(
        best.values[:, :count].tolist(), best.indices[:, :count].tolist(), found, strict=True
    )
    for values, ids, entries in rows:
        for rank, (value, token) in enumerate(zip(values, ids, strict=True), start=1):
            entries.setdefault(token, Logprob(value, rank))
    return found


def prompt_logprobs(logits: Tensor, tokens: Sequence_[int], count: int) -> list[TokenLogprobs]:
    """`token_logprobs` of a prompt's tokens, a few at a time: prompts are long."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        found += token_logprobs(logits[rows], tokens[rows], count)
    return found


def step_logprobs(
    logits: Tensor, path: Tensor, outputs: Sequence_[Sequence_[int]], sequences: list[Sequence]
) -> list[list[TokenLogprobs] | None]:
    """Of what a step put out for each sequence; None for those that do not ask.

    Args:
        logits: [B * N, V] of the tree's nodes.
        path: [B, P] accepted nodes from the root on, then -1.
        outputs: emitted tokens of each sequence, as many as its path has nodes.
        sequences: B requests.
    """
    num_nodes = logits.shape[0] // len(sequences)
    found: list[list[TokenLogprobs] | None] = []
    for b, (sequence, tokens) in enumerate(zip(sequences, outputs, strict=True)):
        count = sequence.params.logprobs
        if count is None:
            found.append(None)
            continue
        rows = path[b, : len(tokens)].long() + b * num_nodes
        found.append(token_logprobs(logits[rows], tokens, count))
    return found
