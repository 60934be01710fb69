"""Drafts and trees as users write them, and the plans that they ask for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specc.close_name import advice, close_name
from specc.errors import ConfigError, TreeError
from specc.speculation.plans import MERGE, SUFFIX, VOTE, DynamicTree, SpecPlan, is_lookup
from specc.speculation.self_drafts import SelfDraft
from specc.speculation.tree import TokenTree

BEST = "best"
COMBINE = (MERGE, VOTE, BEST)
DEFAULT_CHAIN, DEFAULT_LOOKUP = 4, 8
Tree = Sequence[int] | TokenTree | DynamicTree
MTP = "mtp"
# of other programs
_OTHER_NAMES = {"ngram": "lookup:3", "[ngram]": "lookup:3", "prompt_lookup": "lookup:3"}
_LOOKUP = re.compile(r"lookup:(\d+)")


def split_drafts(drafts: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Models to compile, and what plans call all that proposes.

    Args:
        drafts: None, or one or several of a model, a self-draft such as `self:window=512`,
            `lookup:N` and `suffix`.
    Returns:
        the models, and names in the order given: `draft_0`, `self_w512_s4`, `lookup-3`, …
    Raises:
        ConfigError: a malformed self-draft or lookup, or one draft twice.
    """
    if drafts is None:
        return [], ()
    given = list(drafts) if isinstance(drafts, (list, tuple)) else [drafts]
    models: list[Any] = []
    names: list[str] = []
    for draft in given:
        name = _name_without_model(draft)
        if name is None:
            name = f"draft_{len(models)}"
            models.append(draft)
        if name in names:
            raise ConfigError(f"--draft {draft} twice", "different drafts", "leave one of them out")
        names.append(name)
    return models, tuple(names)


def choose_plans(
    trees: Sequence[Tree],
    num_speculative_tokens: int | None,
    drafts: tuple[str, ...] = ("draft_0",),
    combine: str | None = None,
) -> tuple[SpecPlan, ...]:
    """The plans that options name, the default first; empty where they name none.

    Args:
        trees: shapes of what every draft proposes.
        num_speculative_tokens: length of a chain, instead.
        drafts: names, see `split_drafts`.
        combine: `merge`, `vote`, `best`; None is merge.
    Raises:
        ConfigError: options that contradict each other.
        TreeError: a width below 1, or too many nodes.
    """
    if trees and num_speculative_tokens is not None:
        raise ConfigError(
            "both a tree and a number of speculative tokens",
            "one of them: a chain of K is the tree 1,1,…,1",
            "pass --tree or --num-speculative-tokens",
        )
    if num_speculative_tokens is not None and num_speculative_tokens < 0:
        raise ConfigError(
            f"--num-speculative-tokens {num_speculative_tokens}",
            "0 (off) or more",
            "choose a length such as 4",
        )
    _check_combine(drafts, combine)
    if num_speculative_tokens == 0:
        return (SpecPlan.from_widths(()),)
    shapes = [as_shape(tree) for tree in trees]
    if num_speculative_tokens is not None:
        shapes = [TokenTree.chain(num_speculative_tokens)]
    if combine == BEST:
        model, lookup = _of_each_kind(drafts)
        lengths = shapes or [TokenTree.chain(DEFAULT_CHAIN)]
        deepest = num_speculative_tokens or DEFAULT_LOOKUP
        return (
            *(_plan(shape, (model,), "") for shape in lengths),
            SpecPlan.from_widths((1,) * deepest, (lookup,)),
        )
    if not shapes:
        if not drafts:
            return ()
        looks_up = all(is_lookup(draft) for draft in drafts)
        shapes = [TokenTree.chain(DEFAULT_LOOKUP if looks_up else DEFAULT_CHAIN)]
    how = (combine or MERGE) if len(drafts) > 1 else ""
    # trees without a draft are refused where it is known that there is none
    return tuple(_plan(shape, drafts or ("draft_0",), how) for shape in shapes)


def policy_of(combine: str | None) -> str:
    """The engine's policy; see `CompileConfig.policy`."""
    return BEST if combine == BEST else "fixed"


def as_shape(tree: Tree) -> TokenTree | DynamicTree:
    """A tree from widths; others as they are.

    Raises:
        ConfigError: no sequence of integers.
    """
    if isinstance(tree, (TokenTree, DynamicTree)):
        return tree
    if isinstance(tree, str) or not all(type(width) is int for width in tree):
        raise ConfigError(f"tree {tree!r}", "a sequence of integers", "for example (3, 2, 1)")
    if not tree:
        raise ConfigError("an empty tree", "one or more widths", "for example --tree 3,2,1")
    return TokenTree.from_widths(tuple(tree))


def parse_tree(text: str) -> Tree:
    """`3,2,1`, widths; `dynamic:N,K,D`, the N best nodes of K children a node on D levels.

    Raises:
        TreeError: neither of these.
    """
    kind, colon, rest = text.rpartition(":")
    try:
        numbers = tuple(int(number) for number in rest.split(","))
        if kind == "dynamic":
            num_nodes, top_k, depth = numbers
            return DynamicTree(num_nodes, top_k, depth)
        if not colon:
            return numbers
    except ValueError:
        pass
    raise TreeError(
        f"--tree {text}",
        "widths separated by commas, or dynamic:NODES,CHILDREN,LEVELS",
        "for example --tree 3,2,1 or --tree dynamic:16,4,4",
    )


def _plan(shape: TokenTree | DynamicTree, drafts: tuple[str, ...], combine: str) -> SpecPlan:
    if isinstance(shape, TokenTree):
        return SpecPlan.from_tree(shape, drafts, combine)
    if len(drafts) > 1:
        raise ConfigError(
            f"a dynamic tree of {len(drafts)} drafts",
            "one draft model or self-draft, which every level asks anew",
            "choose a static tree, or --combine best",
        )
    return SpecPlan.from_dynamic(shape, drafts[0])


def _name_without_model(draft: Any) -> str | None:
    """What plans call a self-draft or a lookup; None of a model."""
    if not isinstance(draft, (str, Path)):
        return None
    text = str(draft)
    if text == SUFFIX:
        return SUFFIX
    if isinstance(draft, str) and (own := SelfDraft.parse(text)) is not None:
        return own.name
    match = _LOOKUP.fullmatch(text)
    if match is None:
        if text.startswith("lookup:") or text == "lookup":
            raise ConfigError(
                f"--draft {text}", "lookup:N, N tokens at most are compared", "for example lookup:3"
            )
        return None
    if not 1 <= int(match[1]) <= 99:
        raise ConfigError(f"--draft {text}", "lookup:1 … lookup:99", "for example lookup:3")
    return f"lookup-{int(match[1])}"


def meant_draft(text: str) -> str | None:
    """What proposes without a model of its own, where `text` was probably meant to say so.

    Args:
        text: as written for a draft, and no model.
    """
    kind, colon, rest = text.partition(":")
    if kind.lower() in _OTHER_NAMES:
        return _OTHER_NAMES[kind.lower()]
    close = close_name(kind, (SUFFIX, MTP, "lookup", "self"))
    # values are kept where there are some: `lookp:5` is `lookup:5`
    values = {"lookup": "3", "self": "window=512"}
    if close is None or close not in values:
        return close
    return f"{close}:{rest if colon else values[close]}"


def _check_combine(drafts: tuple[str, ...], combine: str | None) -> None:
    if combine is None:
        return
    if combine not in COMBINE:
        do = advice(combine, COMBINE, "choose one of them")
        raise ConfigError(f"--combine {combine}", " or ".join(COMBINE), do)
    if len(drafts) < 2:
        raise ConfigError(
            f"--combine {combine} with {len(drafts)} draft{'s' * (len(drafts) != 1)}",
            "two drafts or more",
            "pass --draft several times, or leave out --combine",
        )


def _of_each_kind(drafts: tuple[str, ...]) -> tuple[str, str]:
    """The model or view, and the lookup that competes with it."""
    models = [draft for draft in drafts if not is_lookup(draft)]
    lookups = [draft for draft in drafts if is_lookup(draft)]
    if len(models) != 1 or len(lookups) != 1:
        raise ConfigError(
            f"--combine best of {', '.join(drafts)}",
            "one draft model or self-draft, and one lookup that it competes with",
            "for example --draft D/ --draft suffix --combine best",
        )
    return models[0], lookups[0]
