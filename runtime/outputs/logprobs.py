"""Log probabilities of tokens: computed on the device, and by token id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor


@dataclass(frozen=True)
class Logprob:
    """The model's own log probability of a token, before penalties and temperature.

    Args:
        rank: 1 is the most likely token; equal ones share the better rank.
        decoded_token: its text, where `LLM` or `AsyncLLM` hands it out and there is a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# token id → log probability: the emitted token, then the best ones
TokenLogprobs = dict[int, Logprob]
# of each token of a prompt; nothing comes before the first
PromptLogprobs = list[TokenLogprobs | None]
# rows whose log probabilities are computed at once: V floats each, a few times
ROWS_AT_ONCE = 64


class TokenTexts:
    """Puts the texts of tokens beside their log probabilities.

    Args:
        tokenizer: None leaves them out.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def named(self, rows: Sequence[TokenLogprobs | None] | None) -> Any:
        """The same rows, each token with its text; None of None."""
        if rows is None or self._tokenizer is None:
            return rows
        return [
            row and {token: self._named(token, own) for token, own in row.items()} for row in rows
        ]

    def _named(self, token: int, entry: Logprob) -> Logprob:
        if (text := self._known.get(token)) is None:
            assert self._tokenizer is not None
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._known[token] = text
        return Logprob(entry.logprob, entry.rank, text)


def score_tokens(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Log probabilities of tokens that came after each other; nothing waits for the device.

    Args:
        logits: [n, V], the row that each token was drawn from.
        tokens: [n] int64 on the same device.
        count: K best tokens to name besides.
    Returns:
        [n, 2 + 2 K] float64, which holds each of these as it is: logprob and rank of the token,
        logprobs of the best ones, their ids.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=1, keepdim=True) + 1
    # log probabilities are no larger than 0: the best ones first
    columns = [chosen, ranks, *_best(logprobs, count)]
    return torch.cat([column.double() for column in columns], dim=1)


def _best(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best of each row, [n, K] and their ids; equal ones by ascending id, as decoding goes.

    A sort of all V would say the same. `topk` leaves open which of equal ones it takes, and in
    which order.
    """
    vocab_size = logprobs.shape[1]
    values, ids = logprobs.topk(min(count, vocab_size), dim=1)
    if not values.shape[1]:
        return values, ids
    # of those as likely as the last one, the lowest ids
    least = values[:, -1:]
    order = torch.arange(vocab_size, device=logprobs.device, dtype=torch.int32)
    at_least = torch.where(logprobs == least, order, vocab_size)
    lowest = at_least.topk(values.shape[1], dim=1, largest=False).values
    above = (values > least).sum(dim=1, keepdim=True)
    places = torch.arange(values.shape[1], device=logprobs.device) - above
    # what is not a number equals nothing, and has no id
    lowest = lowest.gather(1, places.clamp(min=0)).clamp(max=vocab_size - 1)
    ids = torch.where(places < 0, ids, lowest.long())
    ids, by_id = ids.sort(dim=1)
    values, by_value = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def logprobs_of(scores: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """What `score_tokens` found, by token id.

    Args:
        scores: [n, 2 + 2 K] on the host.
        tokens: n of them.
        count: best tokens to name, at most K.
    """
    most = (scores.shape[1] - 2) // 2
    count = min(count, most)
    found = []
    for token, (own, rank, *best) in zip(tokens, scores.tolist(), strict=True):
        entries = {token: Logprob(own, int(rank))}
        for place in range(count):
            other = Logprob(best[place], place + 1)
            entries.setdefault(int(best[most + place]), other)
        found.append(entries)
    return found


def score_prompt(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """`score_tokens` of a prompt's tokens, a few at a time: prompts are long."""
    parts = zip(logits.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([score_tokens(rows, after, count) for rows, after in parts])
