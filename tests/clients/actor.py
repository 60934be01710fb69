"""A server whose model does what a chat asks of it, for clients that nobody here wrote.

The engine is the tests' tiny one, with real steps of 1 to 8 tokens, caches and grammars; what it
says follows from the prompt. It calls the tool that a turn names, `call NAME {…}`, or else the
first tool that there is, once; it fills in a schema; and it answers anything else with a sentence.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from tests.specc.server.scripted import Script, scripted_engine
from tests.specc.server.serving import Server, serve

ANSWER = "It is 21 degrees in Bonn, é 🙂."
THINKING = "I know that."
WORD, NUMBER = "Bonn", 21
# agents send 100,000 bytes, and each is a token
POSITIONS = 262144
# of a turn that says which tool to call; JSON follows
_CALL = re.compile(r"^call ([\w.-]+) (?={)", re.MULTILINE)
# the actor reads the chat out of its prompt
TEMPLATE = "{{ {'messages': messages, 'tools': tools} | tojson }}"


def example_of(schema: Any, root: Any = None) -> Any:
    """A value that a schema admits, as the schemas of clients are."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping):
        return WORD
    if "$ref" in schema:
        found = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            found = found[key]
        return example_of(found, root)
    for key in ("const", "enum", "anyOf", "oneOf", "allOf"):
        if key in schema:
            value = schema[key] if key == "const" else schema[key][0]
            return value if key in ("const", "enum") else example_of(value, root)
    kind = schema.get("type", "object" if "properties" in schema else None)
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example_of(each, root) for name, each in properties.items()}
    if kind == "array":
        return [example_of(schema.get("items", {}), root)] * max(1, schema.get("minItems", 1))
    return {"integer": NUMBER, "number": NUMBER, "boolean": True, "null": None}.get(kind, WORD)


def line_of(prompt: str, params: SamplingParams) -> str:
    """What the model says to a prompt."""
    form = params.structured_outputs
    if form is not None and form.json is not None:
        schema = json.loads(form.json) if isinstance(form.json, str) else form.json
        return json.dumps(example_of(schema))
    try:
        chat = json.loads(prompt)
    except ValueError:
        return ANSWER
    # instructions may come between a question and its answer
    last = [message for message in chat["messages"] if message["role"] != "system"][-1]
    asked = _text(last.get("content"))
    call = None
    if chat["tools"] and last["role"] != "tool":
        call = _call_of(asked, [tool["function"] for tool in chat["tools"]])
    line = ANSWER if call is None else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return f"<think>{THINKING}</think>{line}" if "think" in asked else line


def _call_of(asked: str, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """None where the turn names another tool than there are, as of what agents ask beside."""
    if (named := _CALL.search(asked)) is not None:
        arguments, _ = json.JSONDecoder().raw_decode(asked, named.end())
        is_there = any(function["name"] == named[1] for function in functions)
        return {"name": named[1], "arguments": arguments} if is_there else None
    arguments = example_of(functions[0].get("parameters") or {"type": "object"})
    return {"name": functions[0]["name"], "arguments": arguments}


def _text(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return " ".join(part.get("text", "") for part in content)
    return content or ""


class Actor(Script):
    """Says its lines to whichever request runs."""

    def attend(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        self.set(line_of(text, request.params), "")
        self._begin = len(prompt)


@contextlib.contextmanager
def acting() -> Iterator[Server]:
    """A server of such an engine, in which one request runs at a time, and others wait."""
    engine, script = scripted_engine(positions=POSITIONS, script_type=Actor, max_num_seqs=1)
    assert isinstance(script, Actor)
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    with serve(engine, TEMPLATE, plan="chain-8", enable_auto_tool_choice=True, **parsers) as server:
        make = server.service.core.requests.make

        def made(*prompt: Any, **options: Any) -> Request:
            request = make(*prompt, **options)
            admit = request.admit

            def admitted(*blocks: Any) -> None:
                script.attend(request)
                admit(*blocks)

            request.admit = admitted  # type: ignore[method-assign]
            return request

        server.service.core.requests.make = made  # type: ignore[method-assign]
        yield server
