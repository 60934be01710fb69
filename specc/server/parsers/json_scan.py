"""JSON that comes in pieces: how far it is JSON, and where a value ends.

No library of the ones at hand does this: `json` wants a whole text, jiter's partial mode reads all
of it again with every piece, and what both answer about an incomplete text depends on where it was
cut.
"""

from __future__ import annotations

import enum
import re

_WHITE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD_PART = re.compile(r"[-+.0-9A-Za-z]*")
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
# of a number; what is longer is none that anybody means
_MAX_WORD = 1024


class _In(enum.Enum):
    """What the next character belongs to."""

    STRUCTURE = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    CODE = enum.auto()
    WORD = enum.auto()


class _Next(enum.Enum):
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    MORE_OR_END = enum.auto()


class JsonScan:
    """One JSON value, as RFC 8259 has it; white space before it is a part.

    Where it is seen to be none depends on the characters alone, not on how they are cut.
    """

    def __init__(self) -> None:
        self.is_done = self.is_bad = False
        self._place = _In.STRUCTURE
        self._next = _Next.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._word = ""
        self._num_digits = 0

    @property
    def is_open(self) -> bool:
        return not (self.is_done or self.is_bad)

    def feed(self, text: str, at: int) -> int:
        """Take characters from a place on.

        Args:
            at: the first character.
        Returns:
            the first character that was not taken: the first one after the value, or the one that
            makes it no JSON; the text's end where more may follow.
        """
        while at < len(text) and self.is_open:
            if self._place is _In.STRING:
                at = _end(_PLAIN, text, at)
                if at < len(text):
                    at += self._end_part(text[at])
            elif self._place is _In.WORD:
                end = min(_end(_WORD_PART, text, at), at + _MAX_WORD + 1 - len(self._word))
                self._word += text[at:end]
                at = end
                if len(self._word) > _MAX_WORD:
                    self.is_bad = True
                elif at < len(text):
                    self.is_bad = _WORD.fullmatch(self._word) is None
                    self._end_value()
            elif self._place is _In.STRUCTURE:
                at = _end(_WHITE, text, at)
                if at < len(text):
                    at += self._take_structure(text[at])
            else:
                at += self._take_escaped(text[at])
        return at

    def _end_part(self, char: str) -> int:
        """A quote, a backslash or a control character; returns how many were taken."""
        if char == "\\":
            self._place = _In.ESCAPE
        elif char == '"':
            self._place = _In.STRUCTURE
            if self._is_key:
                self._next = _Next.COLON
            else:
                self._end_value()
        else:
            self.is_bad = True
        return not self.is_bad

    def _take_escaped(self, char: str) -> int:
        if self._place is _In.CODE:
            self.is_bad = char not in "0123456789abcdefABCDEF"
            self._num_digits += 1
            if self._num_digits == 4:
                self._place = _In.STRING
        elif char == "u":
            self._place, self._num_digits = _In.CODE, 0
        else:
            self.is_bad = char not in '"\\/bfnrt'
            self._place = _In.STRING
        return not self.is_bad

    def _take_structure(self, char: str) -> int:
        """A character that is no white space; returns how many were taken."""
        wanted = self._next
        if wanted in (_Next.VALUE, _Next.VALUE_OR_END) and self._begin_value(char):
            # the first character of a word is read with the others
            return self._place is not _In.WORD
        if char == '"' and wanted in (_Next.KEY, _Next.KEY_OR_END):
            self._place, self._is_key = _In.STRING, True
        elif char == ":" and wanted is _Next.COLON:
            self._next = _Next.VALUE
        elif char == "," and wanted is _Next.MORE_OR_END:
            self._next = _Next.KEY if self._open[-1] == "}" else _Next.VALUE
        elif self._open and char == self._open[-1] and wanted in _ENDS:
            self._open.pop()
            self._end_value()
        else:
            self.is_bad = True
        return not self.is_bad

    def _begin_value(self, char: str) -> bool:
        """False where no value begins so."""
        if char == '"':
            self._place, self._is_key = _In.STRING, False
        elif char == "{":
            self._open.append("}")
            self._next = _Next.KEY_OR_END
        elif char == "[":
            self._open.append("]")
            self._next = _Next.VALUE_OR_END
        elif char == "-" or (char.isascii() and char.isalnum()):
            self._place, self._word = _In.WORD, ""
        else:
            return False
        return True

    def _end_value(self) -> None:
        self._place = _In.STRUCTURE
        self._next = _Next.MORE_OR_END
        self.is_done = not self._open and not self.is_bad


_ENDS = (_Next.VALUE_OR_END, _Next.KEY_OR_END, _Next.MORE_OR_END)


def skip_white(text: str, at: int) -> int:
    """The first character from a place on that is no white space of JSON."""
    return _end(_WHITE, text, at)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "it matches nothing, too"
    return match.end()
