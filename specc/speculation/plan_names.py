"""Names of plans: what tells one from the plan of the first draft alone."""

from __future__ import annotations

import re

FIRST_DRAFT = ("draft_0",)


def prefix_of(drafts: tuple[str, ...], combine: str) -> str:
    """What tells a plan from that of the first draft alone: `merge-0+1-`, `selfl0.2to5w512s4-`."""
    if not drafts or drafts == FIRST_DRAFT:
        return ""
    # numbers stay apart
    apart = (re.sub(r"(?<=\d)_(?=\d)", ".", name.removeprefix("draft_")) for name in drafts)
    names = "+".join(re.sub("[-_]", "", name) for name in apart)
    if combine:
        return f"{combine}-{names}-"
    return f"draft{names}-" if drafts[0].startswith("draft_") else f"{names}-"
