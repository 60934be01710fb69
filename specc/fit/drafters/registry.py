"""Which kinds of drafts can be fitted."""

from __future__ import annotations

from importlib import import_module

from specc.errors import ConfigError
from specc.fit.drafters.fitter import Fitter

# name → module, class, and what it is told beside the depth
_KINDS: dict[str, tuple[str, str, tuple[str | bool, ...]]] = {
    "eagle3": ("eagle3", "EagleFitter", ()),
    "block": ("block", "BlockFitter", ("markov",)),
    "dflash": ("block", "BlockFitter", ("marginal",)),
    "jetspec": ("block", "BlockFitter", ("marginal", False, True)),
    "dflash2": ("block", "BlockFitter", ("selector",)),
    "lilicorr": ("block", "BlockFitter", ("lilicorr",)),
}
# that specc reads, and trainers elsewhere make
_OTHERS = ("medusa", "hydra", "mtp", "pard", "peagle")


def fitter_of(kind: str, depth: int) -> Fitter:
    """The object of a kind.

    Args:
        kind: as users call it.
        depth: tokens that a draft proposes in a row.
    Raises:
        ConfigError: a kind that is not fitted here.
    """
    if kind not in _KINDS:
        is_known = kind in _OTHERS
        raise ConfigError(
            f"--kind {kind}" + (": a draft that is not fitted here" if is_known else ""),
            " or ".join(_KINDS),
            f"pass --kind {next(iter(_KINDS))}",
        )
    module, name, given = _KINDS[kind]
    found: Fitter = getattr(import_module(f"specc.fit.drafters.{module}"), name)(depth, *given)
    return found


def kinds() -> tuple[str, ...]:
    """Names of all kinds."""
    return tuple(_KINDS)
