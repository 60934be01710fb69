"""What a chat's outputs are read with, and how what is read is written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from specc.server.chat_fields import ChatMessage
from specc.server.config import ServeConfig
from specc.server.fields import without_nulls
from specc.server.params import has_form
from specc.server.parsers.message import CallDelta, Delta, MessageParser
from specc.server.parsers.reasoning import FORMATS
from specc.server.parsers.whole_message import message_parser
from specc.server.protocol import ChatRequest
from specc.server.tool_counts import ToolCounts
from specc.server.tools import ToolUse

# characters of a prompt whose end is looked at; a marker and white space after it are fewer
_END = 256


class MessageReader:
    """Of one request, for all of its outputs.

    Args:
        config: parsers of the server.
        prompt: rendered.
        counts: what outputs call.
    Attributes:
        echo: what their contents begin with, before anything that the model says.
        shows_reasoning: thinking is told.
    """

    def __init__(
        self,
        config: ServeConfig,
        wanted: ChatRequest,
        prompt: str,
        use: ToolUse,
        counts: ToolCounts,
    ) -> None:
        # what a grammar has made begins with its form: such an output does not think
        is_free = not has_form(wanted) and use.grammar is None
        self._thinks = FORMATS.get(config.reasoning_parser or "") if is_free else None
        self.shows_reasoning = wanted.include_reasoning is not False
        self._prompt = prompt[-_END:]
        self._use = use
        self._counts = counts
        self._taken_ids = _call_ids(wanted.messages)
        last = wanted.messages[-1]
        begins = not wanted.continue_final_message and wanted.add_generation_prompt is not False
        # whose text the outputs are, and with which they begin, as vLLM has both
        self.role = "assistant" if begins else last.role
        is_same = bool(wanted.echo) and last.role == self.role
        self.echo = _text(last) if is_same else ""

    @property
    def is_plain(self) -> bool:
        """Outputs are content, and all of it: nothing is looked for."""
        return self._thinks is None and self._use.form is None

    @property
    def markers(self) -> Sequence[str]:
        """What the parsers look for, special tokens or not."""
        forms = (self._thinks, self._use.form)
        return [marker for form in forms if form is not None for marker in form.markers]

    def parser(self) -> MessageParser:
        use = self._use
        parser = message_parser(
            use.form, self._thinks, use.tools, self._prompt, use.max_calls, self._taken_ids
        )
        if use.form is not None:
            parser.at_end = self._counts.add
        return parser

    def message(self, whole: Delta) -> dict[str, Any]:
        """Fields of a message: null is a content that is not there, beside something else."""
        fields: dict[str, Any] = {"content": self.echo + whole.content}
        if not fields["content"] and (whole.reasoning or whole.calls):
            fields["content"] = None
        if whole.calls and self._use.are_functions:
            fields["function_call"] = _call(whole.calls[0])["function"]
        elif whole.calls:
            fields["tool_calls"] = [_call(call) for call in whole.calls]
        # null where there is none, or none is shown: clients of vLLM read it unasked
        shown = whole.reasoning or None if self.shows_reasoning else None
        return fields | _reasoning(shown)

    def delta(self, news: Delta) -> dict[str, Any]:
        """Fields of a chunk's delta."""
        fields: dict[str, Any] = {"content": news.content} if news.content else {}
        if news.calls and self._use.are_functions:
            function = {"name": None, "arguments": ""}
            for call in map(_call, news.calls):
                function["name"] = call["function"].get("name", function["name"])
                function["arguments"] += call["function"]["arguments"]
            fields["function_call"] = without_nulls(function)
        elif news.calls:
            fields["tool_calls"] = [{"index": call.index} | _call(call) for call in news.calls]
        shown = news.reasoning if self.shows_reasoning else None
        return fields | (_reasoning(shown) if shown else {})

    def finish_reason(self, reason: str | None, parser: MessageParser) -> str | None:
        """Why an output has ended, if it has."""
        return reason and self._use.finish_reason(reason, parser)

    def has_called(self, reason: str | None, parser: MessageParser) -> bool:
        """See `ToolUse.has_called`; of an output that has ended."""
        return reason is not None and self._use.has_called(reason, parser)


def _reasoning(text: str | None) -> dict[str, Any]:
    # vLLM's name of today, and the one before it, which DeepSeek's API has
    return {"reasoning": text, "reasoning_content": text}


def _text(message: ChatMessage) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "\n".join(p.text or "" for p in content)


def _call_ids(messages: Iterable[ChatMessage]) -> frozenset[str]:
    """Of calls in a conversation: some models number those of each of their outputs from 0 on."""
    found: list[Any] = []
    for message in messages:
        calls = (message.model_extra or {}).get("tool_calls")
        # whatever else it is, the chat template is asked about it
        if isinstance(calls, list):
            found += [call.get("id") for call in calls if isinstance(call, Mapping)]
    return frozenset(call_id for call_id in found if isinstance(call_id, str))


def _call(call: CallDelta) -> dict[str, Any]:
    """A call, or more of one: id and name stand in its first part."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def token_ids_of(tokenizer: Tokenizer | None, markers: Sequence[str]) -> frozenset[int]:
    """Markers that are tokens of their own: as special tokens, texts would leave them out."""
    if tokenizer is None:
        return frozenset()
    found = (tokenizer.token_to_id(marker) for marker in markers)
    return frozenset(token_id for token_id in found if token_id is not None)
