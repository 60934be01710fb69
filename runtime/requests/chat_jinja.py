"""The Jinja of chat templates: the environment that transformers gives them, in a sandbox."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specc.runtime.requests.chat_messages import REASONING
from specc.runtime.requests.chat_parts import Parts, reads_parts, text_of

_MAX_REASON = 1000
# templates of requests that a child keeps
_MAX_KEPT = 8
# ends the text of a message that is to be continued; as with transformers, the space tells whether
# the template strips what it is given
_END = "CONTINUE_FINAL_MESSAGE_TAG "
# conversations that tell, as one of them is rendered, what a template reads
_ROLES = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}


class Refusal(jinja2.TemplateError):
    """A template has called `raise_exception`."""


class ChatRenderer:
    """The function of a child process: renders templates, each of which it compiles once.

    Args:
        setup: `sources`, name → Jinja; `special_tokens`, name → text; `max_characters`, of a text.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._sources: dict[str, str] = setup["sources"]
        self._special_tokens: dict[str, str] = setup["special_tokens"]
        self._max_characters: int = setup["max_characters"]
        # with the first job: compiling computes constants, and has to be bounded as rendering is
        self._named: dict[str, _Template] = {}
        # of requests: the last ones
        self._others: dict[str, _Template] = {}

    def __call__(self, job: Mapping[str, Any]) -> dict[str, str]:
        """One of these, with what there is to say about it.

        `text`, rendered, or with the `seconds` of the processor that compiling it took;
        `malformed`, the template; `refusal`, of the template's own; `costs`, what it takes too much
        of; `failure`; `unfit`, why a message cannot be continued.

        Args:
            job: `name` of the template, or its `source`. `variables`, without which it is compiled,
                and rendered with a message or two, to see what it takes and what it reads. Beside
                them `content_format`, auto, string or openai, and `continues`, the field of the
                last message that the text ends within; None is none.
        """
        begin_s = time.process_time()
        try:
            template = self._template(job)
        except MemoryError:
            return {"costs": "memory"}
        except (jinja2.TemplateError, RecursionError) as error:
            return {"malformed": str(error)}
        except Exception as error:  # of Python's compiler, about what Jinja has made
            return {"malformed": type(error).__name__}
        if template.costs is not None:
            return {"costs": template.costs}
        if job["variables"] is None:
            return {"text": "", "seconds": str(time.process_time() - begin_s)}
        return template.render(job["variables"], job["content_format"], job["continues"])

    def _template(self, job: Mapping[str, Any]) -> _Template:
        is_named = "name" in job
        key, known = (job["name"], self._named) if is_named else (job["source"], self._others)
        if key not in known:
            if not is_named and len(known) == _MAX_KEPT:
                known.clear()
            source = self._sources[key] if is_named else key
            known[key] = _Template(source, self._special_tokens, self._max_characters)
        return known[key]


class _Template:
    """One template, and what it makes of contents.

    Raises whatever its compilation does.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], max_characters: int) -> None:
        self._source = source
        self._special_tokens = special_tokens
        self._max_characters = max_characters
        environment = _environment()
        tree = environment.parse(source)
        self._reads_parts = reads_parts(tree)
        self._compiled = environment.from_string(tree)
        # what it takes too much of, whatever it renders
        self.costs: str | None = None
        # also of what is a text
        self._wants_parts = False
        self._try()

    def render(
        self, variables: Mapping[str, Any], content_format: str, continues: str | None
    ) -> dict[str, str]:
        is_auto = content_format == "auto"
        reads = self._reads_parts if is_auto else content_format == "openai"
        wants = self._wants_parts if is_auto else content_format == "openai"
        messages: list[Mapping[str, Any]] = [
            _with_content(message, reads, wants) for message in variables["messages"]
        ]
        if continues is None:
            return self._render_any({**variables, "messages": messages}, wants)
        try:
            messages, said = _opened(messages, continues, self._source)
        except ValueError as error:
            return {"unfit": str(error)}
        answer = self._render_any({**variables, "messages": messages}, wants)
        return _cut(answer, said) if "text" in answer else answer

    def _render_any(self, variables: Mapping[str, Any], wants_parts: bool) -> dict[str, str]:
        answer = self._render(variables)
        messages = variables["messages"]
        empty = {"content": Parts() if wants_parts else ""}
        filled = [empty | m if m["role"] == "assistant" else m for m in messages]
        if filled != messages and ("failure" in answer or "refusal" in answer):
            # a template that wants a content beside calls gets an empty one, as vLLM hands it
            second = self._render({**variables, "messages": filled})
            return second if "text" in second else answer
        return answer

    def _render(self, variables: Mapping[str, Any]) -> dict[str, str]:
        parts, left = [], self._max_characters
        try:
            for part in self._compiled.generate({**self._special_tokens, **variables}):
                left -= len(part)
                if left < 0:
                    return {"costs": f"room: more than {self._max_characters} characters"}
                parts.append(part)
        except Refusal as error:
            return {"refusal": str(error)[:_MAX_REASON]}
        except MemoryError:
            return {"costs": "memory"}
        except Exception as error:  # templates can fail in any way
            return {"failure": type(error).__name__}
        return {"text": "".join(parts)}

    def _try(self) -> None:
        """Render the simplest conversations: what takes too much of one takes it of every chat.

        A template that reads parts is asked whether it shows texts, too.
        """
        for more in ({}, {"tools": [_TOOL]}):
            self._shown(("user",), False, **more)
        if self._reads_parts:
            for roles in _ROLES:
                shown, of_parts = self._shown(roles, False), self._shown(roles, True)
                if shown is not None or of_parts is not None:
                    self._wants_parts = (of_parts or 0) > (shown or 0)
                    return

    def _shown(self, roles: Sequence[str], has_parts: bool, **more: Any) -> int | None:
        """How many of the messages' texts are in what is rendered; None where nothing is."""
        texts = [f"specc probe {index}" for index in range(len(roles))]
        messages = [
            _with_content({"role": role, "content": text}, has_parts, has_parts)
            for role, text in zip(roles, texts, strict=True)
        ]
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **more}
        answer = self._render({**given, "messages": messages})
        self.costs = self.costs or answer.get("costs")
        return sum(text in answer["text"] for text in texts) if "text" in answer else None


def _with_content(message: Mapping[str, Any], reads: bool, wants: bool) -> dict[str, Any]:
    """A message with its content as a template reads it.

    Args:
        message: whose content is a text or a list of parts.
        reads: the template reads parts, if that is what there is.
        wants: it reads nothing else.
    """
    content = message.get("content")
    if isinstance(content, list):
        content = Parts(content) if reads else text_of(content)
    elif wants and content is not None:
        content = Parts([{"type": "text", "text": content}])
    else:
        return dict(message)
    return {**message, "content": content}


def _opened(
    messages: Sequence[Mapping[str, Any]], field: str, source: str
) -> tuple[list[Mapping[str, Any]], str]:
    """Messages with a mark where the last one ends, and its text; as transformers has it.

    Raises:
        ValueError: there is nothing to continue.
    """
    last = dict(messages[-1])
    said = last.get(field)
    if said is None:
        raise ValueError(f"a final message without {field}")
    fields = [field]
    if field in REASONING:
        fields = [name for name in REASONING if last.get(name) == said]
    if not any(name in source for name in fields):
        raise ValueError(f"a chat template that does not read {field}")
    if isinstance(said, list):
        if not said:
            raise ValueError(f"a final message whose {field} has no text")
        end = {**said[-1], "text": said[-1]["text"] + _END}
        last[field] = Parts([*said[:-1], end])
        return [*messages[:-1], last], said[-1]["text"]
    if not isinstance(said, str):
        raise ValueError(f"a final message whose {field} is no text")
    return [*messages[:-1], last | dict.fromkeys(fields, said + _END)], said


def _cut(answer: Mapping[str, str], said: str) -> dict[str, str]:
    """What was rendered, up to the mark."""
    text = answer["text"]
    place = text.rfind(_END.strip())
    if place < 0 or said.strip() not in text:
        return {"unfit": "a chat template that does not show the final message as it is"}
    before = text[:place]
    return {"text": before if text.startswith(_END, place) else before.rstrip()}


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training: here just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
