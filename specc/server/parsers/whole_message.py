"""Messages of whole texts: what a server's clients get, for those who call a model in Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specc.errors import RequestError
from specc.server.parsers.calls import CallFormat, CallParser, Tools
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.parsers.message import MessageParser
from specc.server.parsers.names import TOOL_CALL_PARSERS, agreed_parsers
from specc.server.parsers.reasoning import FORMATS, ThinkingFormat

_TOOL = '{"type": "function", "function": {"name": …, "parameters": {…}}}'


@dataclass(frozen=True)
class FunctionCall:
    """What is called.

    Args:
        arguments: JSON of an object, as the model wrote it.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCall:
    """A call, with the fields that clients of OpenAI's API know.

    Args:
        id: that the answer of the tool names as its `tool_call_id`.
    """

    id: str
    function: FunctionCall
    type: str = "function"


@dataclass(frozen=True)
class Message:
    """What the assistant says.

    Args:
        content: None where there is something else and no text.
        reasoning: thinking; None where there is none.
        tool_calls: in the order of the text.
        is_whole: no call was cut within its arguments, which are JSON then. One that was cut before
            them is content.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    is_whole: bool = True

    def to_json(self) -> dict[str, Any]:
        """The message as `LLM.chat` takes it in a conversation, without thinking."""
        fields: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": vars(call.function).copy()}
                for call in self.tool_calls
            ]
        return fields


def read_message(
    text: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    prompt: str | None = None,
) -> Message:
    """Tell thinking, content and calls of tools apart in an output, as the server does.

    Nothing that a model writes is an error: what is no call of one of the tools is content.

    Args:
        text: of an output, with its special tokens (`skip_special_tokens=False`) where markers are
            some; without the token that ended it.
        tools: that the model may call, as they were given to `LLM.chat`.
        tool_call_parser: how the model writes calls: a name of `specc serve --tool-call-parser`.
        reasoning_parser: how it marks its thinking: a name of `--reasoning-parser`; None leaves
            thinking in the content.
        prompt: that the output follows; its end says whether an output begins inside of thinking.
            None, as that of an output to token ids is, has no such end.
    Returns:
        the message.
    Raises:
        ConfigError: a parser of another name, or two that do not go together.
        RequestError: tools of another form, or without a parser of calls.
    """
    known = _schemas(tools or ())
    if known and tool_call_parser is None:
        raise RequestError(
            "tools without tool_call_parser",
            f"how the model writes calls: {', '.join(TOOL_CALL_PARSERS)}",
            "pass tool_call_parser=",
        )
    calls, thinks = agreed_parsers(tool_call_parser, reasoning_parser)
    form = CALL_FORMATS[calls] if calls and known else None
    parser = message_parser(form, FORMATS[thinks] if thinks else None, known, prompt or "")
    found = parser.feed(text, is_last=True)
    made = tuple(
        ToolCall(call.id or "", FunctionCall(call.name or "", call.arguments))
        for call in found.calls
    )
    says_more = bool(found.reasoning or made)
    content = found.content if found.content or not says_more else None
    return Message(content, found.reasoning or None, made, not made or parser.has_whole_calls)


def message_parser(
    form: CallFormat | None,
    thinks: ThinkingFormat | None,
    tools: Tools,
    prompt: str,
    max_calls: int | None = None,
    taken_ids: Collection[str] = (),
) -> MessageParser:
    """For one output.

    Args:
        form: of calls; None where none is looked for.
        thinks: of thinking; likewise.
        tools: name → schema of the arguments; None takes none.
        prompt: that the output follows, or its end.
        max_calls: see `MessageParser`.
        taken_ids: likewise.
    """
    ends = (form.interrupts,) if form and form.interrupts else ()
    in_messages = tools if form and form.is_in_messages else {}
    reasoning = thinks.parser(prompt, ends, in_messages) if thinks else None
    if form is None:
        return MessageParser(reasoning)
    calls = None if form.is_in_messages else CallParser(form, tools)
    return MessageParser(reasoning, calls, max_calls, form.make_id, taken_ids, form.is_numbered)


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Name → schema of the arguments; None takes none."""
    known: dict[str, Any] = {}
    # what is no list has no element that is a tool
    is_list = isinstance(tools, Sequence) and not isinstance(tools, str)
    given: Sequence[Any] = tools if is_list else [None]
    for tool in given:
        is_function = isinstance(tool, Mapping) and tool.get("type", "function") == "function"
        function = tool.get("function") if is_function else None
        fields = function if isinstance(function, Mapping) else {}
        name, parameters = fields.get("name"), fields.get("parameters", {})
        is_one = isinstance(parameters, Mapping | None)
        if not isinstance(name, str) or name in known or not is_one:
            raise RequestError(
                "tools= of another form", f"a list of {_TOOL}, each name once", "describe them so"
            )
        known[name] = fields.get("parameters")
    return known
