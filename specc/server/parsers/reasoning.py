"""Thinking: text between two markers, before the answer.

Whether an output begins in the middle of its thinking is read off the end of the prompt: templates
put the opening marker there, or both markers where thinking is off. So `enable_thinking` and the
like work without being known here.
"""

from __future__ import annotations

from dataclasses import dataclass

from specc.server.parsers.calls import Tools
from specc.server.parsers.events import Event, Parser, Text, find_marker
from specc.server.parsers.harmony import HARMONY, HarmonyFormat


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its thinking.

    Args:
        opening: marker before it.
        closing: marker after it.
        is_implied: an output begins with thinking, marked or not, unless the prompt has closed it.
    """

    opening: str
    closing: str
    is_implied: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def begins_inside(self, prompt: str) -> bool:
        """Whether what follows a prompt is thinking, without an opening marker of its own."""
        end = prompt.rstrip()
        return end.endswith(self.opening) or (self.is_implied and not end.endswith(self.closing))

    def parser(self, prompt: str, ends: tuple[str, ...], tools: Tools) -> Parser:
        """For one output.

        Args:
            prompt: that it follows.
            ends: what ends thinking as well, see `ReasoningParser`.
            tools: of no use here: another parser looks for calls.
        """
        return ReasoningParser(self, prompt, ends)


_THINK = ReasoningFormat("<think>", "</think>")
_IMPLIED = ReasoningFormat("<think>", "</think>", is_implied=True)

# as `--reasoning-parser` calls them, which are vLLM's names
FORMATS: dict[str, ReasoningFormat | HarmonyFormat] = {
    "deepseek_r1": _IMPLIED,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "glm47": _THINK,
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "kimi_k2": _THINK,
    "mimo": _THINK,
    "minimax_m2": _IMPLIED,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "olmo3": _THINK,
    "openai_gptoss": HARMONY,
    "qwen3": _THINK,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "step3": _IMPLIED,
    "step3p5": _THINK,
}


class ReasoningParser(Parser):
    """Tells thinking from the text after it.

    Args:
        form: markers.
        prompt: that the output follows; its end decides how the output begins.
        ends: what ends thinking as well, and is itself text: models call tools out of it.
    """

    def __init__(self, form: ReasoningFormat, prompt: str, ends: tuple[str, ...] = ()) -> None:
        self._form = form
        self._ends = ends
        self._is_inside = form.begins_inside(prompt)
        # white space and an opening marker may come before anything else
        self._has_begun = self._is_over = False
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        self._held += text
        if not self._has_begun and not self._begin():
            return []
        if self._is_over or not self._is_inside:
            return self._pass_on()
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
        held, self._held = self._held, ""
        return [Text(held, self._is_inside and not self._is_over)] if held else []

    def _begin(self) -> bool:
        """Take the opening marker, if there is one; False where that is not certain yet."""
        begin = self._held.lstrip()
        if len(begin) < len(self._form.opening) and self._form.opening.startswith(begin):
            return False
        self._has_begun = True
        if begin.startswith(self._form.opening):
            self._is_inside = True
            self._held = begin.removeprefix(self._form.opening)
        return True

    def _pass_on(self) -> list[Event]:
        text, self._held = self._held, ""
        return [Text(text)] if text else []
