"""How many tokens a text has at least, from its bytes alone: long before a tokenizer could tell.

A token covers some bytes of the text. If no token that can cover the byte `b` covers more than
`n` bytes, `b` is at least 1 / n of a token, and a text has at least as many tokens as its bytes
add up to. The longest token alone would do, but is mostly one of blanks: 128 bytes where those
with a letter have 20.

Bytes that the tokenizer may drop, or put into one token without end, count nothing; which these
are follows from its normalizers, pre-tokenizers, model and added tokens. Where one of them is not
known here, no byte counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

# bytes that are looked at together
_CHUNK = 1 << 18
_ALL = range(256)
_ASCII = frozenset(range(128))
# first bytes of U+4000 … U+9FFF, each of which stands for itself under all normalizers known here
_IDEOGRAPHS = frozenset(range(0xE4, 0xEA))
# of all white space, in UTF-8; control characters are blanks or nothing to some tokenizers
_BLANKS = frozenset((*range(0x21), 0x7F)) | frozenset(
    "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029"
    "\u202f\u205f\u3000\ufeff\u200b".encode()
)
_BYTE_TOKEN = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
_SPACE_MARK = "▁"


class PromptBound:
    """The least number of tokens of texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        counted = _Counted(json.loads(tokenizer.to_str()), tokenizer.normalizer)
        # of a token, by byte; 0 for those that count nothing
        self.weights = np.zeros(256)
        for byte, longest in counted.longest().items():
            self.weights[byte] = 1 / longest
        # letters that a mark after them can change count nothing
        self._is_next_seen = counted.is_next_seen

    def least_tokens(self, text: bytes, enough: int) -> tuple[int, int]:
        """Of a text in UTF-8.

        Args:
            enough: stop there.
        Returns:
            the least number of tokens, special tokens aside, or one of `enough` and more; and how
            many bytes did not count.
        """
        data = np.frombuffer(text, np.uint8)
        total, num_unbounded = 0.0, 0
        for begin in range(0, len(data), _CHUNK):
            chunk = data[begin : begin + _CHUNK + 1]
            own = chunk[:_CHUNK]
            if self._is_next_seen:
                # the byte at the end of the text is alone
                after = np.append(chunk[1:], np.zeros(len(own) - len(chunk) + 1, np.uint8))
                own = own[(after < 0x80) | (own >= 0x80)]
            counts = np.bincount(own, minlength=256)
            total += float(counts @ self.weights)
            num_unbounded += min(_CHUNK, len(chunk)) - int(counts[self.weights > 0].sum())
            if total >= enough + 1:
                break
        # tokens are whole; what a sum of fractions is too large by is far less than a thousandth
        return math.ceil(total - 1e-3), num_unbounded


class _Counted:
    """Which bytes of a text count, and how many of them a token can cover.

    Args:
        config: of a `tokenizer.json`.
    """

    def __init__(self, config: Mapping[str, Any], normalizer: Any) -> None:
        self._model = config["model"]
        self._added = config.get("added_tokens") or []
        self._normalizer = normalizer
        self._bytes = set(_ALL)
        self._is_byte_level = self._has_space_mark = self._is_lower = False
        self.is_next_seen = False
        for step in _steps(config.get("normalizer"), "normalizers"):
            self._normalize(step)
        for step in _steps(config.get("pre_tokenizer"), "pretokenizers"):
            self._pre_tokenize(step)
        if any(token.get("lstrip") or token.get("rstrip") for token in self._added):
            self._bytes -= _BLANKS
        if self._has_space_mark:
            # in a text, the mark is itself, and its bytes are not those of a blank
            self._bytes -= set(_SPACE_MARK.encode())
            self._bytes -= {0x20} if self._is_byte_level else set()
        self._bytes &= self._known_to_model()

    def longest(self) -> dict[int, int]:
        """Byte → the most counted bytes of a token that can cover it."""
        longest = dict.fromkeys(self._bytes, 4 if self._has_unknown else 1)
        for token in self._tokens():
            inside = [byte for byte in token if byte in longest]
            for byte in set(inside):
                longest[byte] = max(longest[byte], len(inside))
        if self._is_lower:
            for byte in range(ord("A"), ord("Z") + 1):
                if byte in longest and byte + 32 in longest:
                    both = max(longest[byte], longest[byte + 32])
                    longest[byte] = longest[byte + 32] = both
        return longest

    def _normalize(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind in _UNICODE_FORMS or kind in ("Lowercase", "StripAccents"):
            # what has no ASCII may become anything; ASCII stays, but for letters with marks
            self._bytes &= _ASCII | _IDEOGRAPHS
            self.is_next_seen = self.is_next_seen or kind in _UNICODE_FORMS
            self._is_lower = self._is_lower or kind == "Lowercase"
        elif kind == "Strip":
            self._bytes -= _BLANKS
        elif kind == "ByteLevel":
            self._is_byte_level = True
        elif kind == "Replace" and step["pattern"] == {"String": " "}:
            self._has_space_mark = self._has_space_mark or step["content"] == _SPACE_MARK
            if step["content"] != _SPACE_MARK:
                self._bytes -= {0x20}
        elif kind != "Prepend":
            self._bytes.clear()

    def _pre_tokenize(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._is_byte_level = True
        elif kind == "Metaspace":
            self._has_space_mark = self._has_space_mark or step["replacement"] == _SPACE_MARK
            if step["replacement"] != _SPACE_MARK:
                self._bytes -= {0x20}
        elif kind in ("Whitespace", "WhitespaceSplit"):
            self._bytes -= _BLANKS
        elif kind in ("Split", "Punctuation"):
            if step.get("behavior") == "Removed":
                self._bytes.clear()
        elif kind not in ("Digits", "UnicodeScripts", "FixedLength"):
            self._bytes.clear()

    def _known_to_model(self) -> set[int]:
        """Bytes of which no number disappears, or becomes one token for what is unknown."""
        model, kind = self._model, self._model.get("type")
        self._has_unknown, self._named = False, set[int]()
        if kind == "BPE":
            vocab, unknown = set(model["vocab"]), model.get("unk_token")
            affixes = (
                model.get("continuing_subword_prefix") or "",
                model.get("end_of_word_suffix") or "",
            )
            # merges can put several of them together, too
            is_fused = model.get("fuse_unk") or any(
                unknown in token for token in vocab if unknown is not None and token != unknown
            )
            is_kept = unknown is not None and not is_fused
        elif kind == "Unigram":
            vocab, affixes, is_kept = {token for token, _ in model["vocab"]}, ("", ""), False
            if model.get("unk_id") is not None:
                # where a text names it, it is one with what is unknown beside it
                unknown_text = self._text(model["vocab"][model["unk_id"]][0])
                self._named = {*unknown_text, *unknown_text.upper(), *unknown_text.lower()}
        else:
            # WordPiece and WordLevel: a word of any length can be one unknown token
            return set()
        if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in _ALL):
            return set(_ALL)
        if is_kept:
            # a token for each unknown character, of up to four bytes
            self._has_unknown = True
            return set(_ALL)

        def is_known(character: str) -> bool:
            prefix, suffix = affixes
            forms = {start + character + end for start in ("", prefix) for end in ("", suffix)}
            return forms <= vocab

        if self._is_byte_level:
            known = {byte for byte in _ALL if is_known(_CHARACTER_OF[self._lower(byte)])}
            return known - self._named
        known = {byte for byte in _ASCII if is_known(chr(self._lower(byte)))} - {0x20}
        if is_known(_SPACE_MARK if self._has_space_mark else " "):
            known.add(0x20)
        return known - self._named

    def _lower(self, byte: int) -> int:
        is_upper = ord("A") <= byte <= ord("Z")
        return byte + 32 if self._is_lower and is_upper else byte

    def _tokens(self) -> Iterator[bytes]:
        """What each token can stand for in a text."""
        vocab = self._model["vocab"]
        tokens = vocab if isinstance(vocab, dict) else (token for token, _ in vocab)
        for token in tokens:
            if self._is_byte_level:
                # a character of another kind is no byte of a text
                yield bytes(byte for c in token if (byte := _BYTE_OF.get(c)) is not None)
            else:
                yield self._text(token)
                if "<0x" in token:  # bytes of unknown characters, which merges can put together
                    yield _BYTE_TOKEN.sub(_byte_of_token, self._text(token))
        # these stand as they are in the text, or as the normalizer leaves them
        for token in self._added:
            yield self._text(token["content"])
            if self._normalizer is not None and token.get("normalized"):
                yield self._text(self._normalizer.normalize_str(token["content"]))

    def _text(self, token: str) -> bytes:
        text = token.replace(_SPACE_MARK, " ") if self._has_space_mark else token
        return text.encode("utf-8", "replace")


def _byte_of_token(found: re.Match[bytes]) -> bytes:
    return bytes((int(found[1], 16),))


def _steps(step: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for part in step[parts]:
            yield from _steps(part, parts)
    else:
        yield step


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte, since GPT-2."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    characters, num_others = [], 0
    for byte in _ALL:
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + num_others))
            num_others += 1
    return characters


_CHARACTER_OF = _byte_characters()
_BYTE_OF = {character: byte for byte, character in enumerate(_CHARACTER_OF)}
