"""The Jinja of chat templates: the environment that transformers gives them, in a sandbox."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_REASON = 1000


class Refusal(jinja2.TemplateError):
    """A template has called `raise_exception`."""


class ChatRenderer:
    """The function of a child process: renders one template, which it compiles once.

    Args:
        setup: `source`, Jinja; `max_characters`, of a text.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._source: str = setup["source"]
        self._max_characters: int = setup["max_characters"]
        # with the first job: compiling computes constants, and has to be bounded as rendering is
        self._template: jinja2.Template | None = None

    def __call__(self, variables: Mapping[str, Any] | None) -> dict[str, str]:
        """One of these, with what there is to say about it.

        `text`, rendered, or with the `seconds` of the processor that compiling it took;
        `malformed`, the template; `refusal`, of the template's own; `costs`, what it takes too much
        of; `failure`.

        Args:
            variables: of the template; None only compiles it.
        """
        begin_s = time.process_time()
        try:
            if self._template is None:
                self._template = _environment().from_string(self._source)
        except MemoryError:
            return {"costs": "memory"}
        except (jinja2.TemplateError, RecursionError) as error:
            return {"malformed": str(error)}
        except Exception as error:  # of Python's compiler, about what Jinja has made
            return {"malformed": type(error).__name__}
        if variables is None:
            return {"text": "", "seconds": str(time.process_time() - begin_s)}
        return self._render(self._template, variables)

    def _render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> dict[str, str]:
        parts, left = [], self._max_characters
        try:
            for part in template.generate(variables):
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
