"""Commands whose options are fields of dataclasses, as typer takes them: one parameter each."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import typer

from specc.option import Option, option_of

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


class Fields:
    """Which fields of a dataclass a command offers, as in `Annotated[EngineArgs, Fields("plan")]`.

    Args:
        names: fields, in the order of the help; none is all that are options.
        without: fields that are left out of all.
        changes: field → what the command says otherwise: fields of `Option`, or `default`.
    """

    def __init__(
        self, *names: str, without: Collection[str] = (), **changes: Mapping[str, Any]
    ) -> None:
        self.names = names
        self.without = without
        self.changes = changes


class _Group:
    """A parameter of a command that is a dataclass."""

    def __init__(self, kind: type, chosen: Fields) -> None:
        known = {field.name: field for field in dataclasses.fields(kind)}
        names = chosen.names or [
            name for name, field in known.items() if option_of(field) and name not in chosen.without
        ]
        self._kind = kind
        self.parameters = [
            _parameter(kind, known[name], chosen.changes.get(name, {})) for name in names
        ]
        self._lists = [name for name in names if known[name].default == ()]

    def make(self, given: dict[str, Any]) -> Any:
        """The dataclass; takes its fields out of what the command line gave."""
        values = {parameter.name: given.pop(parameter.name) for parameter in self.parameters}
        for name in self._lists:
            values[name] = tuple(values[name] or ())
        return self._kind(**values)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: a parameter that is a dataclass becomes options, one a field.

    It calls the command with the dataclass, made of what was typed: what its `__post_init__`
    refuses is an error of the command. Other parameters stay as they are.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, _Group] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if (group := _group_of(parameter.annotation)) is None:
            parameters.append(parameter.replace(kind=_KEYWORD))
        else:
            groups[parameter.name] = group
            parameters += group.parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: group.make(given) for name, group in groups.items()}
        command(**made, **given)

    # a name that two groups have is refused here
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _group_of(annotation: Any) -> _Group | None:
    kind, *more = typing.get_args(annotation) or (annotation,)
    if not dataclasses.is_dataclass(kind):
        return None
    assert isinstance(kind, type)
    chosen = next((item for item in more if isinstance(item, Fields)), Fields())
    return _Group(kind, chosen)


def _parameter(
    kind: type, field: dataclasses.Field[Any], changes: Mapping[str, Any]
) -> inspect.Parameter:
    """A field as typer reads it."""
    found = option_of(field)
    assert found is not None, f"{kind.__name__}.{field.name} is no option"
    changes = dict(changes)
    default = changes.pop("default", field.default)
    found = found._replace(**changes)
    annotation = _type_of(kind, field.name) if found.type is None else found.type | None
    if default == ():
        # tuple[str, ...], which typer would read as one value for each type
        annotation, default = list[typing.get_args(annotation)[0]] | None, None  # type: ignore[misc]
    return inspect.Parameter(
        field.name,
        _KEYWORD,
        default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        annotation=Annotated[annotation, _typer_option(field.name, found)],
    )


@functools.cache
def _types_of(kind: type) -> dict[str, Any]:
    """Field → its type, or the text that annotations hold, with the module that it stands in."""
    return {
        name: (annotation, base.__module__)
        for base in reversed(kind.__mro__)
        for name, annotation in inspect.get_annotations(base).items()
    }


def _type_of(kind: type, name: str) -> Any:
    annotation, module = _types_of(kind)[name]
    return _evaluated(annotation, module) if isinstance(annotation, str) else annotation


@functools.cache
def _evaluated(annotation: str, module: str) -> Any:
    return eval(annotation, vars(sys.modules[module]))


def _typer_option(name: str, found: Option) -> Any:
    return typer.Option(
        *(found.names or (f"--{name.replace('_', '-')}",)),
        help=found.help,
        metavar=found.metavar,
        envvar=found.env,
        show_envvar=found.env is not None,
        show_default=found.shows_default,
    )
