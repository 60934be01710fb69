"""Advice for a name that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None where none is close."""
    names = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name[:80].lower(), names, n=1)
    return names[close[0]] if close else None


def advice(name: str, known: Iterable[str], otherwise: str) -> str:
    """What to do about a name: `did you mean suffix?`, or `otherwise` where nothing is close."""
    close = close_name(name, known)
    return f"did you mean {close}?" if close else otherwise
