"""Thinking: text between two markers, before an answer that may have marks around it.

Whether an output begins in the middle of its thinking is read off the end of the prompt: templates
put the opening marker there, or both markers where thinking is off. So `enable_thinking` and the
like work without being known here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from specc.server.parsers.calls import Tools
from specc.server.parsers.channels import ChannelsFormat
from specc.server.parsers.events import Blanks, Event, Parser, Text, find_marker
from specc.server.parsers.harmony import HARMONY, HarmonyFormat


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its thinking.

    Args:
        opening: marker before it.
        closing: marker after it.
        is_implied: an output begins with thinking, marked or not, unless the prompt has closed it.
        label: a word after the opening marker that is no thinking; none for "".
        answers: pairs of markers, one of which may stand around the text after it.
        is_closed_at_once: an output may begin with the closing marker alone, which is no text.
    """

    opening: str
    closing: str
    is_implied: bool = False
    label: str = ""
    answers: tuple[tuple[str, str], ...] = ()
    is_closed_at_once: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing, *(mark for pair in self.answers for mark in pair)

    def begins_inside(self, prompt: str) -> bool:
        """Whether what follows a prompt is thinking, without an opening marker of its own."""
        end = prompt.rstrip()
        return end.endswith(self.opening) or (self.is_implied and not end.endswith(self.closing))

    def parser(self, prompt: str, ends: tuple[str, ...], tools: Tools) -> Parser:
        """For one output.

        Args:
            ends: what ends thinking as well, see `ReasoningParser`.
            tools: of no use here: another parser looks for calls.
        """
        return ReasoningParser(self, prompt, ends)


_THINK = ReasoningFormat("<think>", "</think>")
_IMPLIED = ReasoningFormat("<think>", "</think>", is_implied=True)
_COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")

ThinkingFormat = ReasoningFormat | HarmonyFormat | ChannelsFormat
# as `--reasoning-parser` calls them, which are vLLM's names
FORMATS: dict[str, ThinkingFormat] = {
    "cohere_command3": ReasoningFormat(*_COHERE, answers=(_RESPONSE,)),
    "cohere_command4": ReasoningFormat(
        *_COHERE, answers=(_RESPONSE, ("<|START_TEXT|>", "<|END_TEXT|>"))
    ),
    "deepseek_r1": _IMPLIED,
    "deepseek_v3": _THINK,
    "deepseek_v4": _THINK,
    "ernie45": ReasoningFormat(
        "<think>", "</think>", is_implied=True, answers=(("<response>", "</response>"),)
    ),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", label="thought\n"),
    "glm45": _THINK,
    "glm47": _THINK,
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "holo2": _IMPLIED,
    "hunyuan_a13b": ReasoningFormat("<think>", "</think>", answers=(("<answer>", "</answer>"),)),
    "hy_v3": _THINK,
    "kimi_k2": _THINK,
    "kimi_k3": ChannelsFormat(),
    "mimo": _THINK,
    "minimax_m2": _IMPLIED,
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>", is_closed_at_once=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "nemotron_v3": _IMPLIED,
    "olmo3": _THINK,
    "openai_gptoss": HARMONY,
    "poolside_v1": _THINK,
    "qwen3": _THINK,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "step3": _IMPLIED,
    "step3p5": _THINK,
}


class ReasoningParser(Parser):
    """Tells thinking from the text after it.

    Args:
        prompt: that the output follows; its end decides how the output begins.
        ends: what ends thinking as well, and is itself text: models call tools out of it.
    """

    def __init__(self, form: ReasoningFormat, prompt: str, ends: tuple[str, ...] = ()) -> None:
        self._form = form
        self._ends = ends
        self._is_inside = form.begins_inside(prompt)
        # white space and an opening marker may come before anything else
        self._has_begun = self._is_over = False
        # a label may come next
        self._is_labeled = bool(form.label) and self._is_inside
        self._held = ""
        # before it, until it has begun
        self._blanks = Blanks()
        self._answer = _Answer(form.answers)

    def feed(self, text: str) -> list[Event]:
        self._held += text
        if not self._has_begun and not self._begin():
            return []
        if self._is_over or not self._is_inside:
            return self._pass_on()
        if self._is_labeled:
            label = self._form.label
            if len(self._held) < len(label) and label.startswith(self._held):
                return []
            self._is_labeled = False
            self._held = self._held.removeprefix(label)
        size, marker = find_marker(self._held, self._form.closing, *self._ends)
        events: list[Event] = [Text(self._held[:size], True)] if size else []
        self._held = self._held[size:]
        if marker is None:
            return events
        self._is_over = True
        if marker == self._form.closing:
            self._held = self._held[len(marker) :]
        return events + self._pass_on()

    def finish(self) -> list[Event]:
        self._held = self._blanks.pop() + self._held
        if self._is_inside and not self._is_over:
            held, self._held = self._held, ""
            return [Text(held, True)] if held else []
        events = self._pass_on()
        rest = self._answer.finish()
        return [*events, Text(rest)] if rest else events

    def _begin(self) -> bool:
        """Take the marker at the beginning, if there is one; False where that is not certain."""
        form = self._form
        begin = self._held = self._blanks.take(self._held)
        may_close = form.is_closed_at_once and not self._is_inside
        marks = (form.opening, form.closing) if may_close else (form.opening,)
        if any(len(begin) < len(mark) and mark.startswith(begin) for mark in marks):
            return False
        self._has_begun = True
        self._held = self._blanks.pop() + begin
        if begin.startswith(form.opening):
            self._is_inside = True
            self._is_labeled = bool(form.label)
            self._held = begin.removeprefix(form.opening)
        elif may_close and begin.startswith(form.closing):
            self._is_over = True
            self._held = begin.removeprefix(form.closing)
        return True

    def _pass_on(self) -> list[Event]:
        text, self._held = self._answer.feed(self._held), ""
        return [Text(text)] if text else []


class _At(enum.Enum):
    """Where in a text it is."""

    BEGIN = enum.auto()
    OPENED = enum.auto()
    INSIDE = enum.auto()
    CLOSED = enum.auto()
    OVER = enum.auto()


class _Answer:
    """Takes one pair of marks off the answer, which comes in pieces of any size.

    The first mark counts where only white space stands before it. That goes with it, and so do a
    line break after it, one before the second mark, and white space after that. Any other text is
    handed out as it is.

    Args:
        marks: pairs of them; without any, all text is handed out at once.
    """

    def __init__(self, marks: tuple[tuple[str, str], ...]) -> None:
        self._marks = marks
        self._closing = ""
        self._place = _At.BEGIN if marks else _At.OVER
        self._held = ""
        # before it, where the first mark may stand
        self._blanks = Blanks()

    def feed(self, text: str) -> str:
        """What has become certain with these characters."""
        self._held += text
        if self._place is _At.BEGIN and not self._open():
            return ""
        if self._place is _At.OPENED and self._held:
            self._held = self._held.removeprefix("\n")
            self._place = _At.INSIDE
        found = self._inside() if self._place is _At.INSIDE else ""
        if self._place is _At.CLOSED:
            self._held = self._held.lstrip()
            self._place = _At.OVER if self._held else _At.CLOSED
        if self._place is not _At.OVER:
            return found
        rest, self._held = self._held, ""
        return found + rest

    def finish(self) -> str:
        """What was held back; called once, after all text."""
        return self._blanks.pop() + self._held

    def _open(self) -> bool:
        """Look for the first mark; False where more text is needed for that."""
        begin = self._held = self._blanks.take(self._held)
        if any(len(begin) < len(mark) and mark.startswith(begin) for mark, _ in self._marks):
            return False
        pair = next((pair for pair in self._marks if begin.startswith(pair[0])), None)
        blanks = self._blanks.pop()
        if pair is None:
            self._place, self._held = _At.OVER, blanks + begin
        else:
            self._place, self._closing = _At.OPENED, pair[1]
            self._held = begin.removeprefix(pair[0])
        return True

    def _inside(self) -> str:
        """Text up to the second mark, without what may be the line break before it."""
        size, marker = find_marker(self._held, self._closing)
        text = self._held[:size].removesuffix("\n")
        if marker is None:
            self._held = self._held[len(text) :]
        else:
            self._held = self._held[size + len(marker) :]
            self._place = _At.CLOSED
        return text
