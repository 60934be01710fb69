"""What plans and their drafts are called, and which drafts go together."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specc.drafters.drafter import Drafter
from specc.drafters.registry import FIRST, PREFIX
from specc.errors import ConfigError

MERGE, VOTE = "merge", "vote"


def check_drafts(drafters: Sequence[Drafter], combine: str, is_dynamic: bool) -> None:
    """Refuse drafts that cannot propose together.

    Args:
        combine: `merge`, `vote` or empty.
        is_dynamic: the tree is expanded and reranked.
    Raises:
        ConfigError: one twice, or no such combination.
    """
    drafts = [drafter.name for drafter in drafters]
    if len(set(drafts)) < max(1, len(drafts)):
        raise ConfigError(
            f"a plan of the drafts {', '.join(drafts) or '(none)'}",
            "one or more drafts, each once",
            "name every draft once",
        )
    if combine not in ("", MERGE, VOTE) or bool(combine) != (len(drafts) > 1):
        raise ConfigError(
            f"{len(drafts)} drafts, combined by {combine or 'nothing'!r}",
            f"one draft, or several and {MERGE} or {VOTE}",
            "pass --combine merge or --combine vote",
        )
    if is_dynamic and (combine or not drafters[0].is_asked):
        raise ConfigError(
            f"a dynamic tree of {', '.join(drafts)}",
            "one draft model or self-draft, which every level asks anew",
            "choose a static tree for several drafts and for lookups",
        )


def prefix_of(drafters: Sequence[Drafter], combine: str) -> str:
    """What tells a plan from that of the first draft alone: `merge-0+1-`, `selfl0.2to5w512s4-`."""
    if not drafters or tuple(drafters) == FIRST:
        return ""
    # numbers stay apart
    bare = [drafter.name.removeprefix(PREFIX) for drafter in drafters]
    apart = (re.sub(r"(?<=\d)_(?=\d)", ".", name) for name in bare)
    names = "+".join(re.sub("[-_]", "", name) for name in apart)
    if combine:
        return f"{combine}-{names}-"
    return f"{names}-" if drafters[0].number is None else f"draft{names}-"
