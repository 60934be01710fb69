"""What `--quantize`, `--draft-quantize` and `--quantize-group` may say: names of layouts."""

from __future__ import annotations

from specc.artifact.mixes import MIXES
from specc.close_name import advice
from specc.errors import ConfigError

# of a draft whose weights stay in floating point, whatever the target's become
FLOATS = "off"
# formats whose columns share scales in groups that may be chosen, and their default group
_GROUPED: dict[str, int | None] = {"int8": None, "int4": 64}
_KINDS = (*_GROUPED, "fp8", *MIXES)
_GROUPS = (32, 64, 128)


def layout_of(kind: str | None, group: int | None) -> str | None:
    """How projections are stored, but for zero points: `int8-g32`, `int4-g64`, `fp8`, …

    Args:
        kind: what `--quantize` or `--draft-quantize` says.
        group: columns that share a scale; None is the default of the kind.
    Returns:
        None where weights stay in the engine's dtype.
    """
    if kind in (None, FLOATS):
        return None
    group = (group or _GROUPED[kind]) if kind in _GROUPED else None
    return kind if group is None else f"{kind}-g{group}"


def has_groups(kind: str | None) -> bool:
    """Whether `--quantize-group` says something of it."""
    return kind in _GROUPED


def check_kind(option: str, kind: str | None, *, is_draft: bool = False) -> None:
    """Raises ConfigError: no format that weights are rounded to.

    Args:
        option: that says it.
        is_draft: `off` is one, too.
    """
    kinds = (*_KINDS, FLOATS) if is_draft else _KINDS
    if kind in (None, *kinds):
        return
    raise ConfigError(
        f"{option} {kind}",
        f"{', '.join(kinds[:-1])} or {kinds[-1]}",
        advice(str(kind), kinds, f"choose one of them, or leave out {option}"),
    )


def check_group(group: int | None) -> None:
    """Raises ConfigError: no number of columns that share a scale."""
    if group not in (None, *_GROUPS):
        raise ConfigError(
            f"--quantize-group {group}",
            "32, 64 or 128",
            "choose one of them, or leave it out: 64 with int4, one scale an output with int8",
        )
