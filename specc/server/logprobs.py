"""Log probabilities in the two shapes of OpenAI's API, and the texts of single tokens."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specc.runtime.outputs.logprobs import PromptLogprobs, TokenLogprobs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_REPLACEMENT = "\ufffd".encode()
# bytes between two tokens of a text that a tokenizer has changed, at most
_NEAR = 16
# JSON has no infinity; vLLM and OpenAI write this
_LEAST = -9999.0


class TokenTexts:
    """What single tokens of a tokenizer stand for; None knows no texts."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, str] = {}
        self._decoder = ""
        self.special: frozenset[int] = frozenset()
        if tokenizer is not None:
            added = tokenizer.get_added_tokens_decoder()
            self._added = {token_id: token.content for token_id, token in added.items()}
            self.special = frozenset(i for i, token in added.items() if token.special)
            self._decoder = json.dumps(json.loads(tokenizer.to_str()).get("decoder"))

    def to_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text; a part of a character, where it is one."""
        token = None if self._tokenizer is None else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if '"ByteLevel"' in self._decoder and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        if '"ByteFallback"' in self._decoder and (match := _BYTE.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace("▁", " ").encode() if "▁" in token else token.encode()

    def to_text(self, token_id: int) -> str:
        return self.to_bytes(token_id).decode("utf-8", "replace")


class TextOffsets:
    """Where tokens begin in the text of a completion, in characters.

    A token's own text says only nearly how long it is there: special tokens are left out, the space
    of a first word is, and a character may be several tokens.

    Args:
        skips_special: the output's text leaves special tokens out.
    """

    def __init__(self, tokens: TokenTexts, skips_special: bool) -> None:
        self._tokens = tokens
        self._skipped = tokens.special if skips_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True
        self._at = 0

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Of a prompt that the completion's text begins with: the client's own, or of its ids."""
        data, at, num_chars = text.encode("utf-8", "replace"), 0, 0
        offsets = []
        for token_id in token_ids:
            token = self._tokens.to_bytes(token_id)
            begin, end = at, at
            # clients do not write the special tokens that tokenizers add
            if token_id not in self._tokens.special or data.startswith(token, at):
                begin, end = _place_in(data, at, token)
            offsets.append(num_chars + _num_chars(data, at, begin))
            num_chars += _num_chars(data, at, end)
            at = end
        self._at = len(text)
        return offsets

    def of_output(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Of the next tokens of the output, whose text may end before or after theirs.

        Args:
            token_ids: of them.
        """
        offsets = []
        for token_id in token_ids:
            offsets.append(self._at)
            data = b"" if token_id in self._skipped else self._tokens.to_bytes(token_id)
            if self._is_first and data:
                self._is_first = False
                if data.startswith(b" ") and text and not text.startswith(" "):
                    data = data[1:]
            self._at += len(self._decoder.decode(data))
        return offsets


def _place_in(data: bytes, at: int, token: bytes) -> tuple[int, int]:
    """Where a token begins in a text, and where the next one does."""
    for part in (token, token.removeprefix(b" ") or token):
        if data.startswith(part, at):
            return at, at + len(part)
    begin = data.find(token, at, at + len(token) + _NEAR)
    if begin >= 0:
        return begin, begin + len(token)
    # bytes that are no character; or what a normalizer has changed
    width = len(_REPLACEMENT) if data.startswith(_REPLACEMENT, at) else len(token)
    return at, min(at + width, len(data))


def _num_chars(data: bytes, begin: int, end: int) -> int:
    """Characters that end there: those of which the next byte begins another one."""
    return sum(byte & 0xC0 != 0x80 for byte in data[begin + 1 : end + 1]) + (
        end == len(data) and end > begin
    )


def completion_logprobs(
    tokens: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """The shape of /v1/completions.

    Args:
        token_ids: emitted tokens, after those of the prompt where it is repeated.
        logprobs: of each; None of a prompt's first.
        offsets: characters of the text before each.
    """
    texts: list[str] = []
    values: list[float | None] = []
    best: list[dict[str, float] | None] = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        texts.append(tokens.to_text(token_id))
        if entries is None:
            values.append(None)
            best.append(None)
            continue
        values.append(_finite(entries[token_id].logprob))
        by_text: dict[str, float] = {}
        for other, entry in entries.items():
            # several tokens can be halves of characters, and look alike: the first one stays
            by_text.setdefault(tokens.to_text(other), _finite(entry.logprob))
        best.append(by_text)
    return {
        "text_offset": [*offsets],
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": best,
    }


def chat_logprobs(
    tokens: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    count: int,
) -> dict[str, Any]:
    """The shape of /v1/chat/completions.

    Args:
        token_ids: emitted tokens.
        count: best tokens to name.
    """
    content = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        best = sorted(entries.items(), key=lambda item: item[1].rank)[:count]
        own = _entry(tokens, token_id, entries[token_id].logprob)
        own["top_logprobs"] = [_entry(tokens, other, entry.logprob) for other, entry in best]
        content.append(own)
    return {"content": content, "refusal": None}


def with_best(logprobs: PromptLogprobs, count: int) -> PromptLogprobs:
    """Each token's own, and those of the best `count`, of lists that may have more."""
    return [
        None
        if entries is None
        else {
            token: entry
            for place, (token, entry) in enumerate(entries.items())
            if not place or entry.rank <= count
        }
        for entries in logprobs
    ]


def prompt_logprobs(
    tokens: TokenTexts, logprobs: PromptLogprobs
) -> list[dict[str, dict[str, Any]] | None]:
    """The shape of vLLM's `prompt_logprobs`: for each token, id → what is known of it."""
    return [
        None
        if entries is None
        else {
            str(token): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": tokens.to_text(token),
            }
            for token, entry in entries.items()
        }
        for entries in logprobs
    ]


def _entry(tokens: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokens.to_bytes(token_id)
    text = raw.decode("utf-8", "replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for later characters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _bytes_of_characters()
