"""The formats of calls that this server reads, by vLLM's names for them.

Written here, as no library fits a server that has neither transformers nor a GPU's framework:
transformers' response templates (`tokenizer.parse_response`) need its tokenizers and a template
that hardly any checkpoint has, raise on malformed text, and hand arguments out only when they are
whole; openai-harmony reads the format of gpt-oss alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from specc.server.parsers.bodies import Body, CallArray, CallObject
from specc.server.parsers.braces import BracedArguments
from specc.server.parsers.calls import CallFormat, Tools, short_id
from specc.server.parsers.channels import TOOLS_CLOSE, TOOLS_OPEN
from specc.server.parsers.harmony import HARMONY_CALLS
from specc.server.parsers.marked import ARGS, CALL_ID, MarkedParameters, MistralCalls
from specc.server.parsers.pythonic import CallLines, PythonCall
from specc.server.parsers.sections import NAME, HeadedCall, Section
from specc.server.parsers.tags import (
    CLOSE,
    END_OF_ARGUMENT,
    NAMESPACE,
    OPEN,
    SEP,
    AttributedCall,
    ElementCall,
)
from specc.server.parsers.value_end import Marks


def _objects(opening: str, closing: str = "", inner: tuple[str, ...] = ()) -> CallFormat:
    """An object for each call, between markers."""
    return CallFormat(CallObject, opening, closing, inner=inner)


def _array(opening: str, closing: str = "") -> CallFormat:
    """A JSON array of all calls, between markers."""
    return CallFormat(lambda tools: CallArray(lambda: CallObject(tools)), opening, closing)


def _bare_objects(opening: str) -> CallFormat:
    """Objects at the beginning, too: JSON without a marker, so it has to look like nothing else."""
    body = functools.partial(CallObject, needs_arguments=True)
    return CallFormat(body, opening, bare="{", between=";")


def _heads(
    markers: tuple[str, str, str, str],
    head: tuple[str, ...],
    tail: str = "",
    is_numbered: bool = False,
) -> CallFormat:
    """A head with the name, then JSON, for each call of a section.

    Args:
        markers: before and after the section, before and after each call.
        head: see `HeadedCall`.
        tail: between the JSON and the marker after the call.
        is_numbered: see `HeadedCall`.
    """
    opening, closing, before, after = markers
    return CallFormat(
        lambda tools: Section(
            lambda: HeadedCall(tools, head, is_numbered), before, closing, tail + after
        ),
        opening,
        inner=(closing, before, after, *(part for part in head if part != NAME)),
        interrupts=opening,
        is_numbered=is_numbered,
    )


def _python(opening: str = "", closing: str = "", bare: str = "[") -> CallFormat:
    """`[name(key=value), …]`, between markers or, with `bare`, without them at the beginning."""
    return CallFormat(
        lambda tools: CallArray(lambda: PythonCall(tools)), opening, closing, bare=bare
    )


def _tags(marks: Marks, opening: str, closing: str, interrupts: str = "") -> CallFormat:
    """One call with tags for names and values, between markers."""
    tags = (marks.end, marks.parameter, marks.title_end, marks.value, marks.value_end)
    own = replace(marks, opening=opening, closings=(closing,) if closing else ())
    return CallFormat(
        lambda tools: MarkedParameters(tools, own),
        opening,
        closing,
        starts=(marks.function,) if marks.function else (),
        # tokens of their own, some of them
        inner=tags if marks.value else (),
        interrupts=interrupts,
    )


def _tag_section(
    marks: Marks, opening: str, closing: str, *inner: str, before: str = "", interrupts: str = ""
) -> CallFormat:
    """Calls with tags for names and values, all of them between two markers.

    Args:
        opening: before the first one.
        closing: after the last one.
        inner: further markers.
        before: marker before each call where none stands before its name.
        interrupts: see `CallFormat`.
    """
    own = replace(marks, opening=before or opening, closings=(closing,))
    start = before or marks.function
    return CallFormat(
        lambda tools: Section(lambda: MarkedParameters(tools, own, is_open=True), start, closing),
        opening,
        starts=(start,),
        inner=(closing, *inner),
        interrupts=interrupts,
    )


def _braces(opening: str, closing: str, quote: str, interrupts: str = "") -> CallFormat:
    """`call:name{key:value}` with marks for quotes, between markers."""

    def make_body(tools: Tools) -> Body:
        def arguments(name: str, _: str | None) -> Body:
            return BracedArguments(name, tools[name] or {}, quote)

        return HeadedCall(tools, ("call:", NAME), make_body=arguments)

    return CallFormat(make_body, opening, closing, inner=(quote,), interrupts=interrupts)


def _named_objects(opening: str, closing: str) -> CallFormat:
    """`[{"name": {…}}, …]`, between markers."""
    head = ("{", '"', NAME, '"', ":")
    return CallFormat(
        lambda tools: CallArray(lambda: HeadedCall(tools, head, tail="}")), opening, closing
    )


def _cohere() -> CallFormat:
    """A list of objects with names and ids under keys of their own."""
    body = functools.partial(CallObject, name_key="tool_name", id_key="tool_call_id")
    return CallFormat(
        lambda tools: CallArray(lambda: body(tools)), "<|START_ACTION|>", "<|END_ACTION|>"
    )


def _step(opening: str, closing: str, before: str, after: str, sep: str) -> CallFormat:
    """Tags between the markers of DeepSeek V3, written in another way."""
    marks = replace(_STEP, opening=f"{before}function{sep}", closings=(after, closing))

    def make_call(tools: Tools) -> Body:
        return HeadedCall(
            tools, ("function", sep), make_body=lambda *_: MarkedParameters(tools, marks)
        )

    return CallFormat(
        lambda tools: Section(lambda: make_call(tools), before, closing, after),
        opening,
        starts=(before,),
        inner=(closing, before, after, sep),
    )


def _tag_bodies(
    make_call: Callable[[Tools], Body],
    marks: tuple[str, str, str],
    *inner: str,
    interrupts: str = "",
) -> CallFormat:
    """Calls whose tags are bodies of their own, all of them between two markers.

    Args:
        make_call: of what follows the marker before each call.
        marks: before the first one, after the last one, before each.
        inner: further markers.
        interrupts: see `CallFormat`.
    """
    opening, closing, before = marks
    return CallFormat(
        lambda tools: Section(lambda: make_call(tools), before, closing),
        opening,
        starts=(before,),
        inner=(closing, *inner),
        interrupts=interrupts,
    )


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
)  # fmt: skip
_DEEPSEEK_SEP = "<｜tool▁sep｜>"
_KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>",
)  # fmt: skip
_GLM = Marks(
    "", "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>", has_lines=False
)
_QWEN = Marks("<function=", "</function>", "<parameter=", ">", "</parameter>")
_MINIMAX = Marks("<invoke name=", "</invoke>", "<parameter name=", ">", "</parameter>",
                 is_quoted=True)  # fmt: skip
_STEP = Marks("<steptml:invoke name=", "</steptml:invoke>", "<steptml:parameter name=", ">",
              "</steptml:parameter>", is_quoted=True)  # fmt: skip
_DSML = Marks("<｜DSML｜invoke name=", "</｜DSML｜invoke>", "<｜DSML｜parameter name=", ">",
              "</｜DSML｜parameter>", is_quoted=True, has_lines=False)  # fmt: skip
_HY = Marks("", "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>",
            has_lines=False, name_end="<tool_sep>")  # fmt: skip
_HY_MARKS = (
    "<tool_call>", "</tool_call>", "<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>",
)  # fmt: skip
_STEP_MARKERS = (
    "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>", "<｜tool_sep｜>",
)  # fmt: skip
_DSML_TOKEN = "｜DSML｜"
_V4 = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
_PLUGIN = ("<|action_start|>", "<|plugin|>")
_QWEN_CALL = "<tool_call>\n<function="

# as `--tool-call-parser` calls them
CALL_FORMATS = {
    "apertus": _named_objects("<|tools_prefix|>", "<|tools_suffix|>"),
    "cohere_command3": _cohere(),
    "cohere_command4": _cohere(),
    "deepseek_v3": _heads(_DEEPSEEK, ("function", _DEEPSEEK_SEP, NAME, "```json"), tail="```"),
    "deepseek_v31": _heads(_DEEPSEEK, (NAME, _DEEPSEEK_SEP)),
    "deepseek_v32": _tag_section(
        _DSML, "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _DSML_TOKEN
    ),
    "deepseek_v4": _tag_section(_DSML, *_V4, _DSML_TOKEN, interrupts=_V4[0]),
    "ernie45": _objects("<tool_call>", "</tool_call>"),
    "functiongemma": _braces("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _braces("<|tool_call>", "<tool_call|>", '<|"|>', interrupts="<|tool_call>"),
    "gigachat3": _objects("function call<|role_sep|>\n", inner=("<|role_sep|>",)),
    "glm45": _tags(_GLM, "<tool_call>", ""),
    "glm47": _tags(_GLM, "<tool_call>", ""),
    "granite": CallFormat(
        lambda tools: CallArray(lambda: CallObject(tools, needs_arguments=True)),
        "<|tool_call|>",
        other_marks=(("<tool_call>", ""),),
        bare="[",
    ),
    "granite-20b-fc": _objects("<function_call>"),
    "granite4": _objects("<tool_call>", "</tool_call>"),
    "hermes": _objects("<tool_call>", "</tool_call>"),
    "hunyuan_a13b": _array("<tool_calls>", "</tool_calls>"),
    "hy_v3": _tag_section(_HY, "<tool_calls>", "</tool_calls>", *_HY_MARKS, before="<tool_call>"),
    "internlm": _objects("".join(_PLUGIN), "<|action_end|>", inner=_PLUGIN),
    "jamba": _array("<tool_calls>", "</tool_calls>"),
    "kimi_k2": _heads(_KIMI, (NAME, "<|tool_call_argument_begin|>"), is_numbered=True),
    "kimi_k3": _tag_bodies(
        AttributedCall,
        (TOOLS_OPEN, TOOLS_CLOSE, f"{OPEN}call"),
        *(OPEN, CLOSE, SEP, END_OF_ARGUMENT),
        interrupts=TOOLS_OPEN,
    ),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>", bare=""),
    "llama3_json": _bare_objects("<|python_tag|>"),
    "llama4_json": _bare_objects("<|python_tag|>"),
    "llama4_pythonic": _python("<|python_start|>", "<|python_end|>"),
    "longcat": _objects("<longcat_tool_call>", "</longcat_tool_call>"),
    "mimo": _tags(_QWEN, "<tool_call>", "</tool_call>", interrupts=_QWEN_CALL),
    "minimax_m2": _tag_section(_MINIMAX, "<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax_m3": _tag_bodies(
        ElementCall,
        (f"{NAMESPACE}<tool_call>", f"{NAMESPACE}</tool_call>", f"{NAMESPACE}<invoke"),
        NAMESPACE,
    ),
    "mistral": CallFormat(MistralCalls, "[TOOL_CALLS]", inner=(CALL_ID, ARGS), make_id=short_id),
    "olmo3": CallFormat(
        lambda tools: CallLines(lambda: PythonCall(tools)),
        "<function_calls>",
        "</function_calls>",
    ),
    "openai": HARMONY_CALLS,
    "phi4_mini_json": _array("functools"),
    "poolside_v1": _tags(_GLM, "<tool_call>", ""),
    "pythonic": _python(),
    "qwen3_coder": _tags(_QWEN, "<tool_call>", "</tool_call>", interrupts=_QWEN_CALL),
    "qwen3_xml": _tags(_QWEN, "<tool_call>", "</tool_call>", interrupts=_QWEN_CALL),
    "seed_oss": _tags(_QWEN, "<seed:tool_call>", "</seed:tool_call>"),
    "step3": _step(*_STEP_MARKERS),
    "step3p5": _tags(_QWEN, "<tool_call>", "</tool_call>", interrupts=_QWEN_CALL),
    "xlam": CallFormat(
        lambda tools: CallArray(lambda: CallObject(tools, needs_arguments=True)),
        "<tool_call>",
        "</tool_call>",
        other_marks=(("[TOOL_CALLS]", ""), ("```json", "```")),
        bare="[",
    ),
}
