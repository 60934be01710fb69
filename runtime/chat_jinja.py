"""The Jinja of chat templates: the environment that transformers gives them, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Malformed(Exception):
    """Jinja does not take the template."""


class Refusal(jinja2.TemplateError):
    """A template has called `raise_exception`."""


def compile_template(source: str) -> jinja2.Template:
    """The template of a source.

    Raises:
        Malformed: it is none.
    """
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise Malformed(str(error)) from error


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text of a template.

    Raises:
        Refusal: of the template's own.
        Exception: anything, as templates can fail in any way.
    """
    return template.render(variables)


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
