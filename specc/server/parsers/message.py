"""The message of one output, as its text comes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specc.server.parsers.calls import openai_id
from specc.server.parsers.events import (
    Blanks,
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Parser,
    Text,
)


@dataclass
class CallDelta:
    """What is new about a call; id and name come once, and first."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class Delta:
    """What is new about a message; of a whole text, the message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    # all of it in the order of the text, for answers whose content is blocks
    pieces: list[Text | CallDelta] = field(default_factory=list, compare=False)

    @property
    def says_something(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def say(self, text: str, is_reasoning: bool = False) -> None:
        """Add characters, if there are any."""
        if not text:
            return
        if is_reasoning:
            self.reasoning += text
        else:
            self.content += text
        self.pieces.append(Text(text, is_reasoning))

    def call(self, call: CallDelta) -> None:
        """Add a call, or the beginning of what is new about one."""
        self.calls.append(call)
        self.pieces.append(call)


class MessageParser:
    """Thinking first, and then text and calls of tools.

    White space that stands alone between thinking, calls and the end is no content. Without calls,
    it is: then nothing is left out.

    Args:
        reasoning: of thinking; None where there is none. It may find calls, too.
        calls: of calls in text; None takes all text for content.
        max_calls: what is called beyond is left out, as by vLLM; None is any number.
        make_id: of calls to which the model gives none, or one that another call has.
        taken_ids: of calls earlier in the conversation.
        is_numbered: ids of the model are `functions.name:0`: one that another call has gets the
            next number that is free, as the model's template wants that form.
    """

    def __init__(
        self,
        reasoning: Parser | None = None,
        calls: Parser | None = None,
        max_calls: int | None = None,
        make_id: Callable[[], str] = openai_id,
        taken_ids: Iterable[str] = (),
        is_numbered: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._max_calls = max_calls
        self._make_id = make_id
        self._ids = set(taken_ids)
        self._is_numbered = is_numbered
        self._num_calls = 0
        self._num_whole = 0
        # of each call that has ended: whether it is whole
        self.ended_calls: list[bool] = []
        # called when the text has ended, with how many calls there are, and how many are whole
        self.at_end: Callable[[int, int], object] | None = None
        # white space since the last call, and whether there is nothing else
        self._space = Blanks()
        self._is_blank = True

    @property
    def has_whole_calls(self) -> bool:
        """There are calls, and none was cut."""
        return 0 < self._num_calls == self._num_whole

    @property
    def ends_with_call(self) -> bool:
        """There is no content after the last call."""
        return self._num_calls > 0 and self._is_blank

    def feed(self, text: str, is_last: bool) -> Delta:
        """Take a part of the text.

        Args:
            text: new characters.
            is_last: none will follow.
        """
        delta = Delta()
        for event in self._think(text, is_last):
            if not isinstance(event, Text):
                self._add([event], delta)
            elif event.is_reasoning:
                delta.say(event.text, is_reasoning=True)
            else:
                self._take_text(event.text, delta)
        if is_last and self._calls is not None:
            self._add(self._calls.finish(), delta)
        if is_last and not self._num_calls:
            delta.say(self._space.pop())
        if is_last and self.at_end is not None:
            self.at_end(self._num_calls, self._num_whole)
        return delta

    def _think(self, text: str, is_last: bool) -> list[Event]:
        if self._reasoning is None:
            return [Text(text)]
        events = self._reasoning.feed(text)
        return [*events, *self._reasoning.finish()] if is_last else events

    def _take_text(self, text: str, delta: Delta) -> None:
        if self._calls is not None:
            self._add(self._calls.feed(text), delta)
        elif text:
            delta.say(text)
            self._is_blank = False

    def _add(self, events: list[Event], delta: Delta) -> None:
        for event in events:
            if isinstance(event, Text):
                self._add_content(event.text, delta)
            elif isinstance(event, CallBegin):
                self._space.pop()
                self._is_blank = True
                self._num_calls += 1
                if self._is_wanted:
                    call_id = self._id_of(event)
                    delta.call(CallDelta(self._index, call_id, event.name))
            elif isinstance(event, CallArguments):
                if self._is_wanted and event.text:
                    if not delta.calls or delta.calls[-1].index != self._index:
                        delta.call(CallDelta(self._index))
                    delta.calls[-1].arguments += event.text
            elif isinstance(event, CallEnd):
                self._num_whole += event.is_whole
                self.ended_calls.append(event.is_whole)

    def _id_of(self, call: CallBegin) -> str:
        """The model's own, unless another call has it: answers of tools name their call by it."""
        call_id = call.id
        if call_id in self._ids and self._is_numbered:
            call_id = self._next_number(call)
        if not call_id or call_id in self._ids:
            call_id = self._make_id()
        self._ids.add(call_id)
        return call_id

    def _next_number(self, call: CallBegin) -> str:
        """The id with the first free number after the one that the model has written."""
        assert call.id is not None, "an id that another call has"
        first = int(call.id.rpartition(":")[2]) + 1
        ids = (f"functions.{call.name}:{number}" for number in itertools.count(first))
        return next(one for one in ids if one not in self._ids)

    @property
    def _index(self) -> int:
        return self._num_calls - 1

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _add_content(self, text: str, delta: Delta) -> None:
        if self._is_blank:
            text = self._space.take(text)
            self._is_blank = not text
        if text:
            delta.say(self._space.pop() + text)
