"""Which kinds of drafts can be fitted."""

from __future__ import annotations

from importlib import import_module

from specc.errors import ConfigError
from specc.fit.drafters.fitter import Fitter

# name → module and class
_KINDS = {
    "eagle3": ("eagle3", "EagleFitter"),
    "block": ("block", "BlockFitter"),
}
# that specc reads, and trainers elsewhere make
_OTHERS = ("dflash2", "dflash", "medusa", "hydra", "mtp", "pard", "peagle")


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
    module, name = _KINDS[kind]
    found: Fitter = getattr(import_module(f"specc.fit.drafters.{module}"), name)(depth)
    return found


def kinds() -> tuple[str, ...]:
    """Names of all kinds."""
    return tuple(_KINDS)
