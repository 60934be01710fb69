"""Calls as models of each format write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]
Call = tuple[str, Arguments]


def _json(arguments: Arguments) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _object(call: Call) -> str:
    return f'{{"name": "{call[0]}", "arguments": {_json(call[1])}}}'


def _each(before: str, after: str) -> Callable[[list[Call]], str]:
    return lambda calls: "\n".join(f"{before}{_object(call)}{after}" for call in calls)


def _array(before: str, after: str) -> Callable[[list[Call]], str]:
    return lambda calls: f"{before}[{', '.join(_object(call) for call in calls)}]{after}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _deepseek(head: str, tail: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        parts = (
            f"<｜tool▁call▁begin｜>{head.format(name)}{_json(arguments)}{tail}<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        return f"<｜tool▁calls▁begin｜>{chr(10).join(parts)}<｜tool▁calls▁end｜>"

    return write


def write_kimi(calls: list[Call]) -> str:
    parts = (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(arguments)}"
        "<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"


def _glm(line: str) -> Callable[[list[Call]], str]:
    def write(call: Call) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_value(value)}</arg_value>{line}"
            for key, value in call[1].items()
        )
        return f"<tool_call>{call[0]}{line}{pairs}</tool_call>"

    return lambda calls: "\n".join(map(write, calls))


def _qwen(opening: str, closing: str) -> Callable[[list[Call]], str]:
    def write(call: Call) -> str:
        pairs = "".join(f"<parameter={k}>\n{_value(v)}\n</parameter>\n" for k, v in call[1].items())
        return f"{opening}\n<function={call[0]}>\n{pairs}</function>\n{closing}"

    return lambda calls: "\n".join(map(write, calls))


def _invoke(prefix: str, opening: str, closing: str, types: bool = False, line: str = "\n") -> Any:
    def write(call: Call) -> str:
        pairs = "".join(
            f'<{prefix}parameter name="{key}"'
            + (f' string="{"true" if isinstance(value, str) else "false"}"' if types else "")
            + f">{_value(value)}</{prefix}parameter>{line}"
            for key, value in call[1].items()
        )
        return f'<{prefix}invoke name="{call[0]}">{line}{pairs}</{prefix}invoke>'

    return lambda calls: f"{opening}\n" + "\n".join(map(write, calls)) + f"\n{closing}"


def _step(calls: list[Call]) -> str:
    one = _invoke("steptml:", "", "")
    parts = (
        f"<｜tool_call_begin｜>function<｜tool_sep｜>{one([call]).strip()}<｜tool_call_end｜>"
        for call in calls
    )
    return f"<｜tool_calls_begin｜>\n{chr(10).join(parts)}\n<｜tool_calls_end｜>"


def _hy(calls: list[Call]) -> str:
    def write(call: Call) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_value(value)}</arg_value>\n"
            for key, value in call[1].items()
        )
        return f"<tool_call>{call[0]}<tool_sep>\n{pairs}</tool_call>"

    return f"<tool_calls>\n{chr(10).join(map(write, calls))}\n</tool_calls>"


def _braces(before: str, after: str, quote: str) -> Callable[[list[Call]], str]:
    def value(of: Any) -> str:
        if isinstance(of, str):
            return f"{quote}{of}{quote}"
        if isinstance(of, dict):
            return "{" + ",".join(f"{key}:{value(item)}" for key, item in of.items()) + "}"
        return f"[{','.join(map(value, of))}]" if isinstance(of, list) else json.dumps(of)

    return lambda calls: "".join(f"{before}call:{name}{value(of)}{after}" for name, of in calls)


def write_kimi_k3(calls: list[Call]) -> str:
    def argument(key: str, of: Any) -> str:
        kinds = {bool: "boolean", int: "number", str: "string", dict: "object"}
        kind = next(name for known, name in kinds.items() if isinstance(of, known))
        key = key.replace("&", "&amp;").replace('"', "&quot;")
        head = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
        return f"{head}{_value(of)}<|close|>argument<|sep|>"

    parts = (
        f'<|open|>call tool="{name}" index="{i}"<|sep|>'
        f"{''.join(argument(*item) for item in arguments.items())}<|close|>call<|sep|>"
        for i, (name, arguments) in enumerate(calls, start=1)
    )
    return f"<|open|>tools<|sep|>{''.join(parts)}<|close|>tools<|sep|>"


def write_minimax_m3(calls: list[Call]) -> str:
    mark = "]<]minimax[>["

    def element(name: str, of: Any) -> str:
        if isinstance(of, dict):
            inner = "".join(element(*item) for item in of.items())
        elif isinstance(of, list):
            inner = "".join(element("item", item) for item in of)
        else:
            inner = _value(of)
        return f"{mark}<{name}>{inner}{mark}</{name}>"

    parts = (
        f'{mark}<invoke name="{name}">'
        f"{''.join(element(*item) for item in arguments.items())}{mark}</invoke>\n"
        for name, arguments in calls
    )
    return f"{mark}<tool_call>\n{''.join(parts)}{mark}</tool_call>"


def _keyed(calls: list[Call]) -> str:
    parts = (f'{{"{name}": {_json(arguments)}}}' for name, arguments in calls)
    return f"<|tools_prefix|>[{', '.join(parts)}]<|tools_suffix|>"


def write_cohere(calls: list[Call]) -> str:
    parts = (
        f'    {{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {_json(arguments)}}}'
        for i, (name, arguments) in enumerate(calls)
    )
    calls_of = ",\n".join(parts)
    return f"<|START_ACTION|>[\n{calls_of}\n]<|END_ACTION|>"


def _python(opening: str, closing: str, between: str = ", ") -> Callable[[list[Call]], str]:
    def write(call: Call) -> str:
        return f"{call[0]}({', '.join(f'{k}={v!r}' for k, v in call[1].items())})"

    return lambda calls: opening + between.join(map(write, calls)) + closing


_HERMES = _each("<tool_call>\n", "\n</tool_call>")
_QWEN = _qwen("<tool_call>", "</tool_call>")
_SEP = "<｜tool▁sep｜>"
WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "apertus": _keyed,
    "cohere_command3": write_cohere,
    "cohere_command4": write_cohere,
    "deepseek_v3": _deepseek(f"function{_SEP}{{}}\n```json\n", "\n```"),
    "deepseek_v31": _deepseek(f"{{}}{_SEP}", ""),
    "deepseek_v32": _invoke(
        "｜DSML｜", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", types=True
    ),
    "deepseek_v4": _invoke("｜DSML｜", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", types=True),
    "ernie45": _each("<tool_call>\n", "\n</tool_call>"),
    "functiongemma": _braces("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _braces("<|tool_call>", "<tool_call|>", '<|"|>'),
    "gigachat3": _each("function call<|role_sep|>\n", ""),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "granite": _array("<|tool_call|>", ""),
    "granite-20b-fc": _each("<function_call> ", ""),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": _array("<tool_calls>", "</tool_calls>"),
    "hy_v3": _hy,
    "internlm": _each("<|action_start|><|plugin|>\n", "<|action_end|>"),
    "jamba": _array("<tool_calls>", "</tool_calls>"),
    "kimi_k2": write_kimi,
    "kimi_k3": write_kimi_k3,
    "lfm2": _python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "llama3_json": lambda calls: "<|python_tag|>" + "; ".join(map(_object, calls)),
    "llama4_json": lambda calls: "<|python_tag|>" + "; ".join(map(_object, calls)),
    "llama4_pythonic": _python("<|python_start|>[", "]<|python_end|>"),
    "longcat": _each("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "mimo": _QWEN,
    "minimax_m2": _invoke("", "<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax_m3": write_minimax_m3,
    "mistral": _array("[TOOL_CALLS]", ""),
    "olmo3": _python("<function_calls>\n", "\n</function_calls>", "\n"),
    "phi4_mini_json": _array("functools", ""),
    "poolside_v1": _glm("\n"),
    "pythonic": _python("[", "]"),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "seed_oss": _qwen("<seed:tool_call>", "</seed:tool_call>"),
    "step3": _step,
    "step3p5": _QWEN,
    "xlam": _array("<tool_call>", "</tool_call>"),
}
