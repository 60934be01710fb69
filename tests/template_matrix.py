"""Chat templates of a directory, rendered by specc and by transformers: what is the same.

    python -P tests/template_matrix.py DIRECTORY

Each `*.jinja` there is rendered with each of `CONVERSATIONS`: by the server, from a request as
OpenAI's clients send it, and by `apply_chat_template`. A cell is `equal`; `refused`, by both; the
name of a reason for which the prompts differ; or `different`. A reason holds where transformers,
given the conversation with that one change, renders what specc has rendered.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specc.errors import ConfigError
from specc.runtime.requests.chat_template import ChatTemplate
from specc.server.endpoints import render
from specc.server.errors import ApiError
from specc.server.protocol import ChatRequest

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
Messages = list[dict[str, Any]]


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": f"The {name} of a place.", "parameters": parameters}
    return {"type": "function", "function": function}


def _called(*calls: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    made = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    return {"role": "assistant", "tool_calls": made, **more}


def _result(number: int, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "content": content, **more}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How warm is it in Bonn?"}
ANSWER = {"role": "assistant", "content": "21 degrees."}
AGAIN = {"role": "user", "content": "And in Köln?"}
TOOLS = [
    _tool("weather", city={"type": "string", "description": "Its name."}),
    _tool("time", city={"type": "string"}, zone={"type": "string", "enum": ["UTC", "CET"]}),
]
CALL = ("weather", {"city": "Bonn"})
BOTH = (CALL, ("time", {"city": "Köln", "zone": "CET"}))
THINKING = {"role": "assistant", "content": "21 degrees.", "reasoning_content": "I look it up."}
# name → what clients send; arguments of calls are objects here, and JSON of them in requests
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [USER, ANSWER, AGAIN]},
    "system, turns": {"messages": [SYSTEM, USER, ANSWER, AGAIN]},
    "white space": {"messages": [{"role": "user", "content": "  a\n\n b\t\n"}]},
    "unicode, marks": {
        "messages": [{"role": "user", "content": "Grüße 世界 🙂 {{ x }} <|a|> \"'"}]
    },
    "empty": {"messages": [{"role": "user", "content": ""}]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "names": {"messages": [USER | {"name": "ann"}, ANSWER, AGAIN | {"name": "bob"}]},
    "no generation prompt": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "It is about"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "tools": {"messages": [USER], "tools": TOOLS},
    "tools, system": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "call": {
        "messages": [USER, _called(CALL, content=None), _result(0, "21")],
        "tools": TOOLS,
    },
    "call and text": {
        "messages": [USER, _called(CALL, content="I look."), _result(0, "21"), ANSWER, AGAIN],
        "tools": TOOLS,
    },
    "call, empty text": {
        "messages": [USER, _called(CALL, content=""), _result(0, '{"t": 21}'), ANSWER],
        "tools": TOOLS,
        "add_generation_prompt": False,
    },
    "calls in parallel": {
        "messages": [
            USER,
            _called(*BOTH, content=None),
            _result(0, "21", name="weather"),
            _result(1, "12:00", name="time"),
        ],
        "tools": TOOLS,
    },
    "nulls": {
        "messages": [
            USER | {"name": None},
            ANSWER | {"tool_calls": None, "refusal": None, "reasoning": None, "audio": None},
            AGAIN,
        ],
    },
    "parts": {"messages": [USER | {"content": _parts("How warm", " is it?")}]},
    "parts of all": {
        "messages": [
            SYSTEM | {"content": _parts("Be brief.")},
            USER | {"content": _parts("How warm is it?")},
            ANSWER | {"content": _parts("21", " degrees.")},
            AGAIN,
        ],
    },
    "parts of a result": {
        "messages": [USER, _called(CALL, content=None), _result(0, _parts("21"))],
        "tools": TOOLS,
    },
    "thinking": {"messages": [USER, THINKING, AGAIN]},
    "thinking, call": {
        "messages": [
            USER,
            _called(CALL, content=None, reasoning_content="I look it up."),
            _result(0, "21"),
        ],
        "tools": TOOLS,
    },
    "effort": {"messages": [USER], "reasoning_effort": "high"},
}


def _joined(messages: Messages) -> Messages:
    return _contents(messages, lambda content: "\n".join(part["text"] for part in content), list)


def _in_parts(messages: Messages) -> Messages:
    return _contents(messages, lambda content: _parts(content), str)


def _contents(messages: Messages, change: Callable[[Any], Any], kind: type) -> Messages:
    return [
        m | {"content": change(m["content"])} if isinstance(m.get("content"), kind) else m
        for m in messages
    ]


def _filled(messages: Messages) -> Messages:
    return [m if m.get("content") is not None else m | {"content": ""} for m in messages]


def _named(messages: Messages) -> Messages:
    return [
        m | {"reasoning": m["reasoning_content"]} if "reasoning_content" in m else m
        for m in messages
    ]


def _of_systems(change: Callable[[Messages], Messages]) -> Callable[[Messages], Messages]:
    return lambda messages: [change([m])[0] if m["role"] == "system" else m for m in messages]


# a reason, and the change of a conversation with which transformers renders the same
REASONS: tuple[tuple[str, Callable[[Messages], Messages]], ...] = (
    # a template that wants a content in every message fails on those without one
    ("empty content", _filled),
    # a list is printed as Python writes it, or is none of what the template takes
    ("parts joined", _joined),
    ("parts joined", _of_systems(_joined)),
    ("empty content, parts joined", lambda messages: _filled(_joined(messages))),
    # a text is lost where only parts are looked for
    ("text as a part", _in_parts),
    ("empty content, text as a part", lambda messages: _in_parts(_filled(messages))),
    # vLLM's name for thinking, which transformers does not fill in
    ("thinking as reasoning", _named),
)


def transformers_tokenizer() -> Any:
    """A tokenizer of transformers that only renders chats."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


def compare(
    source: str, conversation: Mapping[str, Any], template: ChatTemplate | None, tokenizer: Any
) -> tuple[str, str | None, str | None]:
    """What a cell says, and the two prompts; None is a refusal.

    Args:
        conversation: of `CONVERSATIONS`.
        template: of the source; None where specc refuses it.
    """
    got = None if template is None else _by_specc(template, conversation)
    want = _by_transformers(tokenizer, source, conversation)
    if got == want:
        return ("refused" if got is None else "equal"), got, want
    for reason, change in REASONS:
        messages = change(copy.deepcopy(conversation["messages"]))
        changed = {**conversation, "messages": messages}
        if got is not None and _by_transformers(tokenizer, source, changed) == got:
            return reason, got, want
    return "different", got, want


def _by_specc(template: ChatTemplate, conversation: Mapping[str, Any]) -> str | None:
    body = json.loads(json.dumps(conversation))
    for message in body["messages"]:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    with contextlib.suppress(ApiError):
        return render(template, ChatRequest.model_validate(body))
    return None


def _by_transformers(tokenizer: Any, source: str, conversation: Mapping[str, Any]) -> str | None:
    options = {"add_generation_prompt": True, **copy.deepcopy(dict(conversation))}
    if "reasoning_effort" in options:
        # as vLLM hands it on
        options["enable_thinking"] = True
    with contextlib.suppress(Exception):
        text: str = tokenizer.apply_chat_template(
            options.pop("messages"), chat_template=source, tokenize=False, **options
        )
        return text
    return None


def matrix(directory: Path) -> dict[str, dict[str, str]]:
    """Template → conversation → what its cell says."""
    tokenizer = transformers_tokenizer()
    found: dict[str, dict[str, str]] = {}
    for file in sorted(directory.glob("*.jinja")):
        source = file.read_text(encoding="utf-8")
        with contextlib.ExitStack() as stack:
            template = None
            with contextlib.suppress(ConfigError):
                template = stack.enter_context(contextlib.closing(ChatTemplate(source, SPECIAL)))
            found[file.stem] = {
                name: compare(source, conversation, template, tokenizer)[0]
                for name, conversation in CONVERSATIONS.items()
            }
    return found


def main() -> None:
    found = matrix(Path(sys.argv[1]))
    width = max(map(len, found))
    for template, cells in found.items():
        others = Counter(cell for cell in cells.values() if cell != "equal")
        names = [n for n, cell in cells.items() if cell == "different"]
        same = f"{len(cells) - others.total():2d} equal"
        rest = "".join(f", {count} {cell}" for cell, count in others.most_common())
        print(f"{template:{width}s} {same}{rest}{f' ({names})' if names else ''}")
    total = Counter(cell for cells in found.values() for cell in cells.values())
    print(
        f"{total.total()} prompts of {len(found)} templates and {len(CONVERSATIONS)} conversations"
    )
    for cell, count in total.most_common():
        print(f"{count:6d} {cell}")


if __name__ == "__main__":
    main()
