"""A field that users set: what it means is said once, where the field is declared.

Dataclasses such as `EngineArgs` are for Python, for the servers and for the command line, which
makes its options of what their fields say here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from specc.errors import ConfigError


class Option(NamedTuple):
    """What a field says about itself.

    Args:
        help: a sentence for users.
        names: on the command line, dashes included; none is the field's name.
        type: that the command line reads, where the field takes more; None is the field's own.
        metavar: shown for the value; None is its type.
        env: variable of the environment that gives a value, too.
        shows_default: the help names the default.
        least: smallest value.
        most: largest value.
        above: every value is larger than this.
    """

    help: str
    names: tuple[str, ...] = ()
    type: Any = None
    metavar: str | None = None
    env: str | None = None
    shows_default: bool = True
    least: float | None = None
    most: float | None = None
    above: float | None = None

    def complaint(self, value: float) -> tuple[str, str] | None:
        """What is needed instead, and in which direction it lies; None where `value` will do."""
        # written so that NaN fails
        if self.above is not None and not value > self.above:
            return f"above {_shown(self.above)}", "raise"
        if self.least is not None and not value >= self.least:
            return f"{_shown(self.least)} or more", "raise"
        if self.most is not None and not value <= self.most:
            return f"{_shown(self.most)} or less", "lower"
        return None


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """A field of a dataclass that is an option.

    Args:
        default: its value where nobody gives one; `...` is none: it must be given.
        help: see `Option`.
        names: see `Option`.
        more: further fields of `Option`.
    """
    metadata = {"option": Option(help, names, **more)}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    """None where the field is no option."""
    return field.metadata.get("option")


def check_ranges(args: Any, *, as_flags: bool = False) -> None:
    """Compare the options of a dataclass with their ranges; None is always in range.

    Args:
        args: the dataclass.
        as_flags: errors call an option `--prefill-chunk 0`, and not `prefill_chunk=0`.
    Raises:
        ConfigError: a value is outside.
    """
    for field in dataclasses.fields(args):
        found, value = option_of(field), getattr(args, field.name)
        if found is None or value is None:
            continue
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int | float) and (complaint := found.complaint(item)):
                needed, verb = complaint
                name = f"--{field.name.replace('_', '-')}" if as_flags else field.name
                given = f"{name}{' ' if as_flags else '='}{item}"
                raise ConfigError(given, needed, f"{verb} {name}")


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def object_of(given: Any, name: str, example: str) -> Mapping[str, Any] | None:
    """The value of an option that is an object: that, or its JSON, as a command line has it.

    Args:
        given: by a caller; None stays None.
        name: of the field.
        example: JSON of such an object, for the error.
    Raises:
        ConfigError: it is neither.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = repr(given)
    if given is None or isinstance(given, Mapping):
        return given
    raise ConfigError(f"{name}={given!s}", f"an object, such as '{example}'", "correct it")
