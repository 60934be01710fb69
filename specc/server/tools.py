"""Tools of a chat request: which there are, and how its outputs may call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specc.sampling.structured import StructuredOutputsParams
from specc.server.chat_fields import Tool
from specc.server.config import ServeConfig
from specc.server.errors import ApiError, bad_request
from specc.server.fields import UnknownFields
from specc.server.forced_calls import arguments_schema, calls_grammar, calls_schema
from specc.server.params import has_form, structured_options
from specc.server.parsers.bodies import CallArray, CallObject, NamedArguments
from specc.server.parsers.calls import CallFormat
from specc.server.parsers.formats import CALL_FORMATS
from specc.server.parsers.message import MessageParser
from specc.server.protocol import ChatRequest

# calls of one output that has to be calls, by `parallel_tool_calls`: without a bound, a small model
# makes the same one until its tokens run out
_MAX_CALLS = {False: 1, None: 4, True: 64}
_CHOICES = (
    '"none", "auto", "required", {"type": "function", "function": {"name": …}}, or {"type":'
    ' "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
)
_MODES = ("auto", "required")


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools.

    Args:
        tools: name → schema of the arguments; None takes none.
        form: of the calls that outputs may hold; None where they hold none.
        max_calls: of one output; None is any number.
        grammar: of outputs that have to be calls, and nothing else.
        free_openings: what calls begin with, in place of the form that other outputs have.
        is_named: which tool they call, the request says.
        are_functions: calls are told as before there were tools: one, as `function_call`.
    """

    tools: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    form: CallFormat | None = None
    max_calls: int | None = None
    grammar: StructuredOutputsParams | None = None
    free_openings: tuple[str, ...] = ()
    is_named: bool = False
    are_functions: bool = False

    def finish_reason(self, reason: str, message: MessageParser) -> str:
        """Why an output has ended, as OpenAI's API says it.

        Args:
            reason: `stop` or `length`.
        """
        # who named one knows that there is a call, and OpenAI's API does not say it again
        if self.is_named or not self.has_called(reason, message):
            return reason
        return "function_call" if self.are_functions else "tool_calls"

    def has_called(self, reason: str, message: MessageParser) -> bool:
        """Whether an output is calls that can be made: whole ones, and nothing was cut after them.

        Args:
            reason: `stop` or `length`.
        """
        is_cut = reason == "length" and (self.grammar is not None or not message.ends_with_call)
        return message.has_whole_calls and not is_cut


def with_tools(wanted: ChatRequest, config: ServeConfig, unknown: UnknownFields) -> None:
    """Turn `functions` and `function_call` of a request into the tools that they were before.

    A server that looks for no calls leaves them out, as peers do, unless one has to be called.

    Raises:
        ApiError: they are malformed, or say something else than tools beside them.
    """
    functions, call = wanted.functions or [], wanted.function_call
    wanted.functions = wanted.function_call = None
    choice = call
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        choice = {"type": "function", "function": {"name": call["name"]}}
    elif call not in (None, "none", "auto"):
        raise bad_request(
            f"function_call={call!r}", '"none", "auto", or {"name": …}', "choose one of them",
            "function_call",
        )  # fmt: skip
    tools = [Tool(type="function", function=function) for function in functions]
    if wanted.tools is not None or wanted.tool_choice is not None:
        for name, other, value, own in (
            ("functions", "tools", tools, wanted.tools),
            ("function_call", "tool_choice", choice, wanted.tool_choice),
        ):
            if value and own and value != own:
                raise bad_request(
                    f"{name} and {other} that say different things", "one of them, or both alike",
                    f"leave {name} out", name,
                )  # fmt: skip
        wanted.tools, wanted.tool_choice = wanted.tools or tools, wanted.tool_choice or choice
        return
    if not tools:
        if isinstance(choice, dict):
            raise bad_request(
                f"function_call={call!r} without functions", "functions to call",
                "pass functions", "function_call",
            )  # fmt: skip
        return
    is_looked_for = config.enable_auto_tool_choice or isinstance(choice, dict)
    if not is_looked_for and not unknown.are_refused:
        unknown.note("functions")
        return
    wanted.tools, wanted.tool_choice = tools, choice
    wanted.parallel_tool_calls, wanted._has_functions = False, True


def read_tools(wanted: ChatRequest, config: ServeConfig, reads_tools: bool) -> ToolUse:
    """Check what a request says about tools.

    Args:
        reads_tools: the chat template does.
    Raises:
        ApiError: they are malformed, or this server cannot have them called.
    """
    choice = wanted.tool_choice
    tools: dict[str, dict[str, Any] | None] = {}
    for index, tool in enumerate(wanted.tools or ()):
        name = tool.function.name
        if tool.type != "function":
            raise bad_request(
                f"tools.{index} of type {tool.type!r}", "type function", "leave the others out",
                f"tools.{index}.type",
            )  # fmt: skip
        if name in tools:
            raise bad_request(
                f"two tools of the name {name!r}", "a name for each", "rename one", "tools"
            )
        tools[name] = tool.function.parameters
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, tools = _allowed(choice, tools)
    _check_choice(choice, tools)
    if not tools or choice == "none":
        return ToolUse(tools)
    if choice in (None, "auto"):
        use = _automatic(wanted, config, tools, reads_tools)
        return replace(use, are_functions=wanted._has_functions)
    # there is no answer that could have a form: this one is of calls
    max_calls = _MAX_CALLS[wanted.parallel_tool_calls]
    use = _forced(tools, choice, max_calls, config, structured_options(wanted))
    return replace(use, are_functions=wanted._has_functions)


def _forced(
    tools: dict[str, dict[str, Any] | None],
    choice: Any,
    max_calls: int,
    config: ServeConfig,
    options: Mapping[str, Any],
) -> ToolUse:
    """Outputs are JSON of the tools' schemas: a list of calls, or the arguments of one."""
    name = _name_in(choice) if isinstance(choice, dict) else None
    if name is None:
        schema = calls_schema(tools, max_calls)
        form = CallFormat(lambda tools: CallArray(lambda: CallObject(tools)))
    else:
        schema = arguments_schema(tools, name)
        form = CallFormat(lambda _: NamedArguments(name))
    usual = CALL_FORMATS.get(config.tool_call_parser or "")
    if usual is not None:
        form = replace(form, make_id=usual.make_id)
    grammar = calls_grammar(schema, config.max_grammar_chars, options)
    return ToolUse(tools, form, max_calls, grammar, is_named=name is not None)


def _automatic(
    wanted: ChatRequest,
    config: ServeConfig,
    tools: dict[str, dict[str, Any] | None],
    reads_tools: bool,
) -> ToolUse:
    if not config.enable_auto_tool_choice or config.tool_call_parser is None:
        raise bad_request(
            "tools with tool_choice auto, and a server that does not look for calls",
            "a server that was started with --enable-auto-tool-choice and --tool-call-parser",
            'start it so, or pass tool_choice="none"',
            "tool_choice",
        )
    if not reads_tools:
        raise bad_request(
            "tools, and a chat template that does not read them",
            "a template that tells the model which tools there are",
            "start the server with such a template (--chat-template), or leave tools out",
            "tools",
        )
    max_calls = 1 if wanted.parallel_tool_calls is False else None
    form = CALL_FORMATS[config.tool_call_parser]
    openings = _openings_of(form, config) if has_form(wanted) else ()
    return ToolUse(tools, form, max_calls, free_openings=openings)


def _openings_of(form: CallFormat, config: ServeConfig) -> tuple[str, ...]:
    """What tells calls from the form that a request's answers have.

    Raises:
        ApiError: nothing does.
    """
    if form.bare or form.is_in_messages or not form.openings:
        raise bad_request(
            "tools with tool_choice auto beside a form of the output, and calls that begin like any"
            f" other output ({config.tool_call_parser})",
            "one of the two",
            'leave the form out, or pass tool_choice="none"',
            "tools",
        )
    return (*form.openings, *form.starts)


def _allowed(choice: dict[str, Any], tools: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The mode and the tools of a choice that allows some of them; templates get all of them."""
    allowed = choice.get("allowed_tools", choice)
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    named = allowed.get("tools") if isinstance(allowed, dict) else None
    names = [_name_in(tool) for tool in named] if isinstance(named, list) else []
    if mode not in _MODES or not names or None in names:
        raise bad_request(f"tool_choice={choice!r}", _CHOICES, "correct it", "tool_choice")
    for name in names:
        if name is not None and name not in tools:
            raise _unknown_function(name, tools)
    return mode, {name: tools[name] for name in tools if name in names}


def _name_in(tool: Any) -> str | None:
    """Of a tool in a choice: Chat Completions' form, or that of Responses, which is flat."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _unknown_function(name: str, tools: dict[str, Any]) -> ApiError:
    return bad_request(
        f"tool_choice of the function {name!r}, which tools has not got",
        f"one of {', '.join(tools)}",
        "choose one of them",
        "tool_choice",
    )


def _check_choice(choice: Any, tools: dict[str, Any]) -> None:
    name = None
    if isinstance(choice, dict):
        name = _name_in(choice)
        is_known = choice.get("type") == "function" and name is not None
    else:
        is_known = choice in (None, "none", "auto", "required")
    if not is_known:
        raise bad_request(f"tool_choice={choice!r}", _CHOICES, "choose one of them", "tool_choice")
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise bad_request(
            f"tool_choice={choice!r} without tools", "tools to call", "pass tools", "tool_choice"
        )
    if name is not None and name not in tools:
        raise _unknown_function(name, tools)
