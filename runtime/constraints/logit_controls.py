"""The controls of one request over an engine's vocabulary: what may follow an output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as Set_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specc.errors import RequestError
from specc.runtime.execution.link import Link, to_device
from specc.sampling.logit_controls import check_vocabulary
from specc.sampling.params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NAMES = ("min_tokens", "allowed_token_ids", "bad_words")
_DO = "correct this value"


class LogitControls:
    """Which tokens may follow an output, and what is added to the logits of all.

    Two kinds: a row of the vocabulary that holds after every output, and tokens that some outputs
    forbid, because they are short or end with the beginning of a bad word.

    Args:
        bad_words: tokens of each.
        vocab_size: V.
        end_ids: tokens that end an output: those of the model and of the request.
    Raises:
        RequestError: a token id outside the vocabulary, or no token that may come first.
    """

    def __init__(
        self,
        params: SamplingParams,
        bad_words: Iterable[Sequence[int]],
        vocab_size: int,
        end_ids: Set_[int],
    ) -> None:
        self._vocab_size = vocab_size
        self._min_tokens = params.min_tokens
        self._bias = dict(params.logit_bias or {})
        check_vocabulary("logit_bias", self._bias, vocab_size)
        # 1 at what is: a set of a large vocabulary would take fifty times as much
        self._allowed: bytearray | None = None
        if params.allowed_token_ids is not None:
            check_vocabulary("allowed_token_ids", params.allowed_token_ids, vocab_size)
            self._allowed = bytearray(vocab_size)
            for token in params.allowed_token_ids:
                self._allowed[token] = 1
        self._end_ids = tuple(sorted(i for i in end_ids if i < vocab_size))
        # what comes before the last token of a bad word → such last tokens
        self._endings: dict[tuple[int, ...], frozenset[int]] = {}
        for *begin, last in bad_words:
            key = tuple(begin)
            self._endings[key] = self._endings.get(key, frozenset()) | {last}
        self._never = self._endings.pop((), frozenset())
        self._lengths = sorted({len(begin) for begin in self._endings})
        self._row: Tensor | None = None
        # of the options that forbid anything, for errors
        self.names = [name for name in _NAMES if getattr(params, name)]
        self._check_possible()

    @property
    def num_tokens_read(self) -> int:
        """Tokens at the end of an output that decide what may follow it."""
        return self._lengths[-1] if self._lengths else 0

    def is_active(self, num_output: int) -> bool:
        """Whether anything is changed after this many tokens, or more."""
        return bool(self._has_row or self._lengths) or num_output < self._min_tokens

    def depends_on_depth(self, num_output: int) -> bool:
        """Whether outputs of this many tokens and of more differ in what may follow."""
        return num_output < self._min_tokens

    def row(self, device: torch.device, link: Link | None = None) -> Tensor | None:
        """[V] float32 to be added to all logits, -inf at what is never allowed; None adds nothing.

        Made once a device; with a link, without a wait for it.
        """
        if not self._has_row:
            return None
        if self._row is None or self._row.device != device:
            row = torch.zeros(self._vocab_size)
            if self._allowed is not None:
                row[torch.frombuffer(self._allowed, dtype=torch.uint8) == 0] = -torch.inf
            if self._bias:
                row[list(self._bias)] += torch.tensor(list(self._bias.values()))
            if self._never:
                row[sorted(self._never)] = -torch.inf
            (self._row,) = to_device([row], device, link)
        return self._row

    def forbidden(self, tail: Sequence[int], num_output: int) -> list[int]:
        """Tokens that an output forbids besides those that are never allowed.

        Args:
            tail: at least its last `num_tokens_read` tokens, or all of it.
            num_output: tokens that it has.
        """
        found = list(self._end_ids) if num_output < self._min_tokens else []
        for length in self._lengths:
            if length <= len(tail):
                found += self._endings.get(tuple(tail[len(tail) - length :]), ())
        return found

    def allows(self, tail: Sequence[int], num_output: int, token: int) -> bool:
        """Whether a token may follow an output; the arguments are those of `forbidden`."""
        is_listed = self._allowed is None or bool(self._allowed[token])
        return is_listed and token not in self._never and token not in self.forbidden(
            tail, num_output
        )  # fmt: skip

    @property
    def _has_row(self) -> bool:
        return bool(self._bias or self._never) or self._allowed is not None

    def _check_possible(self) -> None:
        """Raises RequestError: nothing may come first, whatever the model says."""
        first = bytearray(self._allowed or b"\1" * self._vocab_size)
        for token in (*self._never, *(self._end_ids if self._min_tokens else ())):
            first[token] = 0
        if not any(first):
            raise RequestError(
                f"{' and '.join(self.names)} that leave no token to begin with",
                "at least one that is allowed",
                _DO,
            )


def bad_word_tokens(
    words: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int
) -> list[tuple[int, ...]]:
    """Token sequences that must not come out.

    A word has one at the beginning of a text, and another after a space, where this is not the
    first one with something before it.

    Raises:
        RequestError: there is no tokenizer, or the model has not got a token of a word.
    """
    if not words:
        return []
    if tokenizer is None:
        raise RequestError(
            "bad_words=[…] for an engine without a tokenizer",
            "a tokenizer: without one, nobody knows the tokens of a word",
            "pass logit_bias or allowed_token_ids",
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        stripped = word.lstrip()
        alone, spaced = (
            tuple(tokenizer.encode(prefix + stripped, add_special_tokens=False).ids)
            for prefix in ("", " ")
        )
        if not alone:
            raise RequestError(f"bad_words=[…, {word!r}, …]", "words that have tokens", "remove it")
        found[alone] = None
        if spaced[-len(alone) :] != alone:
            found[spaced] = None
    for tokens in found:
        check_vocabulary("bad_words", tokens, vocab_size)
    return list(found)
