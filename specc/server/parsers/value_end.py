"""Where a value between tags ends, with the tag for that or without it: models leave tags out.

A value may hold any text, the tags of calls included. So a tag within it ends it only where nothing
else can be meant; where that shows later, what follows is waited for, and where it never shows, the
value goes on, so that its call is none that is whole.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from specc.server.parsers.json_scan import skip_white

# a name in an attribute, and DeepSeek's next one
_QUOTED = re.compile(r"""\s*(["'])([^"']*)\1(?:\s+string=(["'])(true|false)\3)?\s*""")
# characters that a tag may have, and those after a call that are looked at for its end
MAX_TAG, _MAX_AHEAD = 320, 4096
# how often a value is tried as one of its types: each try reads all of it
_MAX_TRIES = 16
# before a tag in the middle of a line: what is mentioned stands after a space, or in quotes
_ENDS_OF_TEXT = ".!?)]};>"
_TAG = re.compile(r"<[^<>\n]*>\Z")
_AT_NAME = re.compile(r"\s*([^\s<]*)")


@dataclass(frozen=True)
class Marks:
    """What stands around names and values of a call.

    Args:
        function: before the name of the tool, which `title_end` ends; where there is none, the name
            comes first, and white space or a mark ends it.
        end: after the last value.
        name_end: after the name of the tool where `function` is "": nothing else ends it then.
        parameter: before the name of a parameter.
        title_end: after it.
        value: before its value, which begins with `title_end` where there is no such mark.
        value_end: after its value.
        is_quoted: names stand in quotes. After a parameter's, `string="true"` may say that its
            value is text, and `string="false"` that it is JSON.
        has_lines: a value stands on lines of its own: a line break after the mark before it, and
            one before the mark after it, are not a part of it.
        opening: before a call, or the next one.
        closings: after it, in any number: where `end` is missing, they end it.
    """

    function: str
    end: str
    parameter: str
    title_end: str
    value_end: str
    value: str = ""
    is_quoted: bool = False
    has_lines: bool = True
    name_end: str = ""
    opening: str = ""
    closings: tuple[str, ...] = ()

    def unquoted(self, title: str) -> tuple[str | None, bool | None]:
        """The name in a tag, None where it is malformed, and what it says of its value."""
        if not self.is_quoted:
            return title, None
        found = _QUOTED.fullmatch(title)
        if found is None:
            return None, None
        return found[2], None if found[4] is None else found[4] == "true"


class Follows(enum.Enum):
    """Whether something stands at a place, or may yet."""

    YES = enum.auto()
    NO = enum.auto()
    MAYBE = enum.auto()


class ValueEnd:
    """Finds the end of one value.

    Args:
        keys: whether a parameter of that name may follow.
        fits: whether a text is a value of a type other than text; None where it can only be text.
    """

    def __init__(
        self,
        marks: Marks,
        names: Collection[str],
        keys: Callable[[str], bool],
        fits: Callable[[str], bool] | None,
    ) -> None:
        self._marks = marks
        self._names = names
        self._keys = keys
        self._fits = fits
        self._num_tries = 0
        # of the mark that is looked at, whether the value before it does
        self._is_fit: bool | None = None
        # the last characters before the text, a line break at the beginning
        self._tail = "\n"
        # calls that the value writes of, and how many of their parameters are open
        self._num_calls = self._num_parameters = 0
        self._is_counted = self._has_closed = False
        own = (
            marks.value_end, marks.parameter, marks.end, marks.function, marks.opening,
            *marks.closings,
        )  # fmt: skip
        self._all = tuple(dict.fromkeys(sorted(filter(None, own), key=len, reverse=True)))
        self._pattern = re.compile("|".join(map(re.escape, self._all)))

    def take(self, text: str) -> None:
        """A part of the value, which belongs to it."""
        self._tail = (self._tail + text)[-MAX_TAG:]

    def find(self, text: str, at: int, kept: Sequence[str], is_last: bool) -> tuple[int, bool]:
        """Look at what follows the part that has been taken.

        Args:
            text: from `at` on.
            at: the first character.
            kept: what was taken, where it matters whether it fits.
            is_last: no more text will come.
        Returns:
            the place up to which characters belong to the value, and whether it ends there: with
            its own mark or, where that is missing, with what belongs to the value no longer.
        """
        begin = at
        while match := self._pattern.search(text, at):
            place = match.start()
            found = self._judge(text, begin, place, match[0], kept, is_last)
            if found is not Follows.NO:
                return place, found is Follows.YES
            at = match.end()
            self._is_fit = None
        return (len(text) if is_last else len(text) - self._num_begun(text, at)), False

    def _num_begun(self, text: str, at: int) -> int:
        """Characters at the end that may become a mark."""
        for size in range(min(len(text) - at, len(self._all[0]) - 1), 0, -1):
            if any(mark.startswith(text[len(text) - size :]) for mark in self._all):
                return size
        return 0

    def _judge(
        self, text: str, begin: int, place: int, mark: str, kept: Sequence[str], is_last: bool
    ) -> Follows:
        """Whether a mark ends the value."""
        tail = (self._tail + text[max(begin, place - MAX_TAG) : place])[-MAX_TAG:]
        before = tail[-1]
        # marks after a call that the value writes of are its own
        self._has_closed &= mark in self._marks.closings
        if mark == self._marks.value_end:
            if self._num_parameters:
                self._num_parameters -= 1
                return Follows.NO
            return Follows.YES
        if mark == self._marks.parameter:
            key, found = self._key_at(text, place, is_last)
            if found is not Follows.YES:
                return found
            if self._num_calls:
                self._num_parameters += before == "\n" or bool(self._marks.value)
                return Follows.NO
            is_one = self._keys(key) and (
                self._ends_text(tail)
                or bool(self._marks.value)
                or self._does_fit(kept, text[begin:place])
            )
            return Follows.YES if is_one else Follows.NO
        if mark in (self._marks.function, self._marks.opening):
            return self._note_call(text, place, before, is_last)
        if self._num_calls or (self._has_closed and mark in self._marks.closings):
            if mark == self._marks.end:
                self._num_calls -= 1
                self._num_parameters, self._has_closed = 0, True
            return Follows.NO
        if self._does_fit(kept, text[begin:place]):
            return Follows.YES
        return self._is_end_of_call(text, place, mark, before == "\n", is_last)

    def _ends_text(self, tail: str) -> bool:
        """Whether a text may end so before a tag: else what follows is only mentioned in it."""
        last = tail[-1]
        if last == ">" and (tag := _TAG.search(tail)) is not None:
            return not tag[0].startswith(self._all)
        return last.isalnum() or last in _ENDS_OF_TEXT or last == "\n"

    def _note_call(self, text: str, place: int, before: str, is_last: bool) -> Follows:
        """A call that the value writes of: marks of its end are not those of this one."""
        is_counted, self._is_counted = self._is_counted, False
        if is_counted or not (
            before == "\n" or text.startswith(self._marks.opening or "\0", place)
        ):
            return Follows.NO
        found = self.opens(text[place : place + MAX_TAG], _has_more(text, place, is_last))
        if found is Follows.YES:
            self._num_calls += 1
            # its mark before the name comes next
            self._is_counted = bool(self._marks.function) and text.startswith(
                self._marks.opening or "\0", place
            )
        return Follows.MAYBE if found is Follows.MAYBE else Follows.NO

    def _does_fit(self, kept: Sequence[str], rest: str) -> bool:
        # the same mark is looked at again where more text has to come first
        if self._is_fit is None:
            self._num_tries += 1
            fits = self._fits if self._num_tries <= _MAX_TRIES else None
            self._is_fit = fits is not None and fits("".join([*kept, rest]))
        return self._is_fit

    def _key_at(self, text: str, place: int, is_last: bool) -> tuple[str, Follows]:
        """The name in a whole tag of a parameter."""
        marks = self._marks
        begin = place + len(marks.parameter)
        limit = place + MAX_TAG
        unknown = Follows.MAYBE if _has_more(text, place, is_last) else Follows.NO
        end = text.find(marks.title_end, begin, limit)
        if end < 0:
            return "", Follows.NO if "\n" in text[begin:limit] else unknown
        key, _ = marks.unquoted(text[begin:end])
        if not key or "\n" in key:
            return "", Follows.NO
        if marks.value:
            rest = text[skip_white(text, end + len(marks.title_end)) : limit]
            if not rest.startswith(marks.value):
                return key, unknown if marks.value.startswith(rest) else Follows.NO
        return key, Follows.YES

    def closes(self, text: str, at: int, is_last: bool) -> Follows:
        """Whether a mark stands at a place that can only come after a call."""
        part = text[at : at + MAX_TAG]
        if part.startswith(self._marks.closings):
            return Follows.YES
        if any(mark.startswith(part) for mark in self._marks.closings):
            return Follows.NO if is_last else Follows.MAYBE
        return Follows.NO

    def opens(self, part: str, has_more: bool) -> Follows:
        """Whether a text begins with a call of a tool."""
        marks, unknown = self._marks, Follows.MAYBE if has_more else Follows.NO
        if marks.opening:
            if len(part) < len(marks.opening) and marks.opening.startswith(part):
                return unknown
            if part.startswith(marks.opening):
                part = part[len(marks.opening) :].lstrip()
            elif not marks.function:
                return Follows.NO
        if marks.function:
            if not part.startswith(marks.function):
                return unknown if marks.function.startswith(part) else Follows.NO
            title, end, rest = part[len(marks.function) :].partition(">")
            if not end:
                return Follows.NO if "\n" in title else unknown
            name = marks.unquoted(title)[0]
        else:
            match = _AT_NAME.match(part)
            assert match is not None, "it matches nothing, too"
            name, rest = match[1], part[match.end() :]
        rest = rest.lstrip()
        next_marks = (marks.parameter, marks.end, *marks.closings)
        next_marks = (marks.name_end,) if marks.name_end else next_marks
        if rest.startswith(next_marks):
            return Follows.YES if name in self._names else Follows.NO
        return unknown if any(mark.startswith(rest) for mark in next_marks) else Follows.NO

    def _is_end_of_call(
        self, text: str, place: int, mark: str, is_on_line: bool, is_last: bool
    ) -> Follows:
        """Whether a mark that ends calls ends this one, of whose value nothing tells the end.

        It does where all marks after a call are there and the value's own does not come, or where
        another call follows at once.
        """
        begin = place + len(mark)
        has_more = _has_more(text, begin, is_last, _MAX_AHEAD)
        unknown = Follows.MAYBE if has_more else Follows.NO
        part = text[begin : begin + _MAX_AHEAD]
        at, has_all = skip_white(part, 0), False
        while closing := next(
            (own for own in self._marks.closings if part.startswith(own, at)), ""
        ):
            has_all |= mark == self._marks.end
            at = skip_white(part, at + len(closing))
        rest = part[at:]
        if has_more and any(own.startswith(rest) for own in self._marks.closings):
            return Follows.MAYBE
        if not rest:
            is_end = has_all and len(part) < _MAX_AHEAD
            return Follows.MAYBE if has_more else Follows.YES if is_end else Follows.NO
        found = self.opens(rest, has_more)
        if not has_all:
            is_apart = is_on_line or "\n" in part[:at] or bool(self._marks.value)
            return found if is_apart else Follows.NO
        if found is not Follows.NO:
            return found
        for match in self._pattern.finditer(part, at):
            if match[0] not in (self._marks.function, self._marks.opening):
                return Follows.NO
            found = self.opens(part[match.start() :], has_more)
            if found is not Follows.NO:
                return found
        if has_more:
            return Follows.MAYBE
        return Follows.YES if len(part) < _MAX_AHEAD else unknown


def _has_more(text: str, place: int, is_last: bool, size: int = MAX_TAG) -> bool:
    """Whether what is looked at from a place on may go on with the next piece."""
    return not is_last and len(text) - place < size
