"""What users say of draft heads that their files leave open: `--draft-assume`."""

from __future__ import annotations

import dataclasses
from typing import Any

from specc.bounds import MOST_IDS
from specc.config import CompileConfig
from specc.drafters.registry import facts_of
from specc.errors import ConfigError
from specc.passes.drafters.head_spec import HeadSpec, HeadSwitches
from specc.passes.drafters.tap_ids import CONVENTIONS

# what a draft is taken for of which nothing else is said
AS_FILES_SAY = "files"
_CONVENTION = "tap_convention"
_NUMBER = "candidates"
_VALUES: dict[str, dict[str, Any]] = {
    field.name: {"true": True, "false": False} for field in dataclasses.fields(HeadSwitches)
} | {_CONVENTION: {name: name for name in CONVENTIONS}, _NUMBER: {}}


def parse_switches(text: str) -> HeadSwitches:
    """Switches as `--draft-assume` has them, `tap_convention=entering,is_last_normed=true`.

    Args:
        text: pairs; `files` is none of them.
    Raises:
        ConfigError: a name that no head has, a value that it does not take, or one name twice.
    """
    found: dict[str, Any] = {}
    for part in [] if text.strip() == AS_FILES_SAY else text.split(","):
        name, _, value = (item.strip() for item in part.partition("="))
        values = _VALUES.get(name, {})
        if name == _NUMBER and value.isdecimal() and 0 < int(value) <= MOST_IDS:
            values = {value: int(value)}
        if value not in values or name in found:
            known = [f"{key}={'|'.join(values) or 'NUMBER'}" for key, values in _VALUES.items()]
            raise ConfigError(
                f"--draft-assume {text}",
                f"{', '.join(known)}, each at most once; or {AS_FILES_SAY}",
                f"for example --draft-assume {_CONVENTION}={CONVENTIONS[0]}",
            )
        found[name] = values[value]
    return HeadSwitches(**found)


def switches_of(config: CompileConfig, num_drafts: int) -> list[HeadSwitches]:
    """Of each draft model.

    Raises:
        ConfigError: see `parse_switches`, or neither one for all drafts nor one each.
    """
    return [parse_switches(text) for text in config.assumptions_of(num_drafts)]


def given_in(switches: HeadSwitches) -> dict[str, str]:
    """Name → value, as the option has them, of those that say something."""
    said = {key: value for key, value in vars(switches).items() if value is not None}
    return {key: str(value).lower() for key, value in said.items()}


def with_assumptions(head: HeadSpec, switches: HeadSwitches) -> HeadSpec:
    """The head, which tells what was taken for what its files say.

    Raises:
        ConfigError: a switch that this kind of head does not ask.
    """
    given = given_in(switches)
    if not given:
        return head
    asked = facts_of(head.kind).assumes
    for name, value in given.items():
        if name not in asked:
            needed = f"{', '.join(asked)}: what such drafts may leave open"
            raise ConfigError(
                f"--draft-assume {name}={value}, and a draft of kind {head.kind}",
                needed if asked else f"{AS_FILES_SAY}: such drafts leave nothing open",
                f"leave out {name}; of several drafts pass --draft-assume for each, {AS_FILES_SAY}"
                " for those of which nothing is to be said",
            )
    pairs = ",".join(f"{name}={value}" for name, value in given.items())
    told = f"{pairs} is taken, whatever its files say (--draft-assume)"
    return dataclasses.replace(head, warnings=(*head.warnings, told))
