"""Log probabilities in the two shapes of OpenAI's API, and the texts of single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specc.runtime.outputs.logprobs import PromptLogprobs, TokenLogprobs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# JSON has no infinity; vLLM and OpenAI write this
_LEAST = -9999.0


class TokenTexts:
    """What single tokens of a tokenizer stand for; None knows no texts."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, str] = {}
        self._decoder = ""
        if tokenizer is not None:
            added = tokenizer.get_added_tokens_decoder()
            self._added = {token_id: token.content for token_id, token in added.items()}
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


def completion_logprobs(
    tokens: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offset: int,
) -> dict[str, Any]:
    """The shape of /v1/completions.

    Args:
        tokens: texts.
        token_ids: emitted tokens, after those of the prompt where it is repeated.
        logprobs: of each; None of a prompt's first.
        offset: characters before the first of them.
    """
    texts: list[str] = []
    offsets: list[int] = []
    values: list[float | None] = []
    best: list[dict[str, float] | None] = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        texts.append(tokens.to_text(token_id))
        offsets.append(offset)
        offset += len(texts[-1])
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
    return {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": best}


def chat_logprobs(
    tokens: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    count: int,
) -> dict[str, Any]:
    """The shape of /v1/chat/completions.

    Args:
        tokens: texts.
        token_ids: emitted tokens.
        logprobs: of each.
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
