"""What an output may hold: biases of tokens, allowed tokens, bad words, a least length."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specc.errors import RequestError

# as OpenAI's: further off, a bias is a ban or a command, for which there are other options
MAX_BIAS = 100.0
# each word is tokenized for its request, and looked for at every token
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 1024, 16384
_DO = "correct this value"
_NO_IDS = "token ids: integers, 0 or more"
# of keys in JSON, which are strings
_DIGITS = re.compile(r"0|[1-9][0-9]{0,18}")


def checked_bias(bias: Any) -> dict[int, float] | None:
    """Token id → bias; ids may be written as strings, which is what JSON makes of them.

    Raises:
        RequestError: no such mapping, or a bias outside of ±`MAX_BIAS`.
    """
    if bias is None:
        return None
    needed = f"a mapping of token id to a number from -{MAX_BIAS:g} to {MAX_BIAS:g}"
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias={_short(bias)}", needed, _DO)
    found: dict[int, float] = {}
    for key, value in bias.items():
        if isinstance(key, str) and _DIGITS.fullmatch(key):
            key = int(key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # NaN is in no range
        if not _is_id(key) or not is_number or not -MAX_BIAS <= value <= MAX_BIAS:
            raise RequestError(f"logit_bias={{{_short(key)}: {_short(value)}}}", needed, _DO)
        if key in found:
            raise RequestError(f"logit_bias={{{key}: …}} twice", "each token id once", _DO)
        found[key] = float(value)
    return found


def parse_bias(texts: Iterable[str]) -> dict[str, float]:
    """Of a command line's `ID=BIAS`; what the parts mean is checked with the other options.

    Raises:
        RequestError: a text has another form.
    """
    found: dict[str, float] = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not _DIGITS.fullmatch(key) or not -MAX_BIAS <= number <= MAX_BIAS:
            needed = f"a token id and a bias from -{MAX_BIAS:g} to {MAX_BIAS:g}, such as 42=-5"
            raise RequestError(f"--logit-bias {_short(text)}", needed, "correct the option")
        if key in found:
            raise RequestError(f"--logit-bias {key}=… twice", "each token id once", "leave one out")
        found[key] = number
    return found


def check_controls(
    min_tokens: Any, max_tokens: Any, allowed_token_ids: Any, bad_words: Any
) -> None:
    """Check what needs no engine; `max_tokens` is valid already.

    Raises:
        RequestError: one of them has another type, or is outside its range.
    """
    if type(min_tokens) is not int or min_tokens < 0:
        raise RequestError(f"min_tokens={_short(min_tokens)}", "an integer, 0 or more", _DO)
    if max_tokens is not None and min_tokens > max_tokens:
        needed = f"at most max_tokens, which is {_short(max_tokens)}"
        raise RequestError(f"min_tokens={_short(min_tokens)}", needed, _DO)
    if allowed_token_ids is not None:
        check_ids("allowed_token_ids", allowed_token_ids)
        if not allowed_token_ids:
            needed = "at least one token id, or None, which allows all of them"
            raise RequestError("allowed_token_ids=[]", needed, _DO)
    if bad_words is not None:
        _check_words(bad_words)


def check_ids(name: str, ids: Any, vocab_size: int | None = None) -> None:
    """Check a list of token ids.

    Args:
        name: of the option.
        ids: to check.
        vocab_size: V; None where it is not known yet.
    Raises:
        RequestError: no list, or something that is no token id.
    """
    if not isinstance(ids, (list, tuple)):
        raise RequestError(f"{name}={_short(ids)}", f"a list of {_NO_IDS}", _DO)
    for token in ids:
        if not _is_id(token):
            raise RequestError(f"{name}=[…, {_short(token)}, …]", _NO_IDS, _DO)
    if vocab_size is not None:
        check_vocabulary(name, ids, vocab_size)


def check_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises RequestError: a token id that the engine's vocabulary has not got."""
    wrong = next((token for token in ids if token >= vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"{name}=[…, {_short(wrong)}, …]",
            f"token ids of this engine, 0 … {vocab_size - 1}",
            "take the ids of the engine's own tokenizer",
        )


def _check_words(words: Any) -> None:
    is_list = isinstance(words, (list, tuple)) and all(isinstance(word, str) for word in words)
    if not is_list:
        raise RequestError(f"bad_words={_short(words)}", "a list of strings", _DO)
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words=[…] of {len(words)} words", f"at most {MAX_BAD_WORDS}", "pass fewer"
        )
    length = _length(words)
    if length > MAX_BAD_WORD_CHARACTERS:
        raise RequestError(
            f"bad_words=[…] of {length} characters together",
            f"at most {MAX_BAD_WORD_CHARACTERS}",
            "pass fewer, or shorter ones",
        )
    for word in words:
        # white space at the beginning does not count, see `SamplingParams`
        if not word.lstrip():
            needed = "words with a character that is no white space"
            raise RequestError(f"bad_words=[…, {word!r}, …]", needed, "remove it")
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"bad_words=[…, {word!r}, …]", "text that can be written as UTF-8", _DO
            ) from error


def _length(words: Sequence[str]) -> int:
    return sum(map(len, words))


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _short(value: Any) -> str:
    """For an error; an integer may have more digits than Python would write."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
