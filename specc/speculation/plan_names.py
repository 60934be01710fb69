"""What plans and their drafts are called, and which drafts go together."""

from __future__ import annotations

import re

from specc.errors import ConfigError
from specc.speculation.self_drafts import is_self_draft

FIRST_DRAFT = ("draft_0",)
MERGE, VOTE = "merge", "vote"
# proposals that the host's index makes, for all plans of an engine
SUFFIX = "suffix"
_LOOKUP = re.compile(r"lookup-([1-9]\d?)")


def is_lookup(draft: str) -> bool:
    """Whether a draft looks tokens up, rather than asking a model or the target."""
    return draft == SUFFIX or _LOOKUP.fullmatch(draft) is not None


def lookup_ngram(draft: str) -> int | None:
    """N of `lookup-N`; None of other drafts."""
    match = _LOOKUP.fullmatch(draft)
    return int(match[1]) if match else None


def check_drafts(drafts: tuple[str, ...], combine: str, is_dynamic: bool) -> None:
    """Refuse names of no draft, and drafts that cannot propose together.

    Args:
        drafts: of a plan.
        combine: `merge`, `vote` or empty.
        is_dynamic: the tree is expanded and reranked.
    Raises:
        ConfigError: such a name, a name twice, or no such combination.
    """
    for name in drafts:
        if not (is_lookup(name) or is_self_draft(name) or re.fullmatch(r"draft_\d+", name)):
            raise ConfigError(
                f"a plan of the draft {name!r}",
                "draft_0, draft_1, …, self_wW_sS, self_l0toL, lookup-N or suffix",
                "compile the engine again",
            )
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
    if is_dynamic and (combine or is_lookup(drafts[0])):
        raise ConfigError(
            f"a dynamic tree of {', '.join(drafts)}",
            "one draft model or self-draft, which every level asks anew",
            "choose a static tree for several drafts and for lookups",
        )


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
