"""What steps know of the adapters of a target."""

from __future__ import annotations

from typing import NamedTuple


class TargetAdapters(NamedTuple):
    """Adapters that a target's program takes for each token.

    Args:
        names: in the order of their numbers; () is none.
        vocab_size: token ids of the target.
    """

    names: tuple[str, ...] = ()
    vocab_size: int = 0


NO_ADAPTERS = TargetAdapters()
