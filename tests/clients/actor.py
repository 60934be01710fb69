"""A server whose model does what a chat asks of it, for clients that nobody here wrote.

The engine is the tests' tiny one, with real steps of 1 to 8 tokens, caches and grammars; what it
says follows from the prompt. It calls the first tool that there is, once; it fills in a schema; and
it answers anything else with a sentence.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specc.sampling.params import SamplingParams
from tests.specc.server.scripted import Script, scripted_engine
from tests.specc.server.serving import Server, serve

ANSWER = "It is 21 degrees in Bonn, é 🙂."
THINKING = "I know that."
WORD, NUMBER = "Bonn", 21
POSITIONS = 16384
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
    last = chat["messages"][-1]
    if chat["tools"] and last["role"] != "tool":
        function = chat["tools"][0]["function"]
        arguments = example_of(function.get("parameters") or {"type": "object"})
        call = json.dumps({"name": function["name"], "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call>"
    thinks = "think" in _text(last.get("content"))
    return f"<think>{THINKING}</think>{ANSWER}" if thinks else ANSWER


def _text(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return " ".join(part.get("text", "") for part in content)
    return content or ""


class Actor(Script):
    """Says its lines to whichever request was the last one to come."""

    def attend(self, prompt: Sequence[int], params: SamplingParams) -> None:
        text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        self.set(line_of(text, params), "")
        self._begin = len(prompt)


@contextlib.contextmanager
def acting() -> Iterator[Server]:
    """A server of such an engine, which has one request at a time."""
    engine, script = scripted_engine(positions=POSITIONS, script_type=Actor)
    assert isinstance(script, Actor)
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    with serve(engine, TEMPLATE, plan="chain-8", enable_auto_tool_choice=True, **parsers) as server:
        submit = server.service.submit

        def attended(prompt: Any, params: SamplingParams, *rest: Any, **more: Any) -> Any:
            script.attend(prompt, params)
            return submit(prompt, params, *rest, **more)

        server.service.submit = attended  # type: ignore[method-assign]
        yield server
