"""Drafts and trees as users write them, and the plans that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specc.close_name import advice
from specc.drafters.drafter import Drafter
from specc.drafters.registry import FIRST, drafters_of, model_draft, parse_draft
from specc.errors import ConfigError, TreeError
from specc.speculation.dynamic_tree import BudgetTree, DynamicTree
from specc.speculation.plans import MERGE, VOTE, SpecPlan
from specc.speculation.tree import TokenTree

BEST, MEASURED = "best", "measured"
COMBINE = (MERGE, VOTE, BEST)
DEFAULT_CHAIN, DEFAULT_LOOKUP = 4, 8
Tree = Sequence[int] | TokenTree | DynamicTree


def split_drafts(drafts: Any) -> tuple[list[Any], tuple[Drafter, ...]]:
    """Models to compile, and all that proposes.

    Args:
        drafts: None, or one or several of a model, a self-draft such as `self:window=512`,
            `lookup:N` and `suffix`.
    Returns:
        the models, and what proposes in the order given; a model is an ordinary one, until its
        files are read.
    Raises:
        ConfigError: a malformed self-draft or lookup, or one draft twice.
    """
    if drafts is None:
        return [], ()
    given = list(drafts) if isinstance(drafts, (list, tuple)) else [drafts]
    models: list[Any] = []
    found: list[Drafter] = []
    for draft in given:
        drafter = parse_draft(draft)
        if drafter is None:
            drafter = model_draft(len(models))
            models.append(draft)
        if drafter in found:
            raise ConfigError(f"--draft {draft} twice", "different drafts", "leave one of them out")
        found.append(drafter)
    return models, tuple(found)


def choose_plans(
    trees: Sequence[Tree],
    num_speculative_tokens: int | None,
    drafts: Sequence[str | Drafter] = FIRST,
    combine: str | None = None,
) -> tuple[SpecPlan, ...]:
    """The plans that options name, the default first; empty where they name none.

    Args:
        trees: shapes of what every draft proposes.
        num_speculative_tokens: length of a chain, instead.
        drafts: what proposes, see `split_drafts`, or its names in plans.
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
    drafters = drafters_of(*drafts)
    _check_combine(drafters, combine)
    if num_speculative_tokens == 0:
        return (SpecPlan.from_widths(()),)
    shapes = [as_shape(tree) for tree in trees]
    if num_speculative_tokens is not None:
        shapes = [TokenTree.chain(num_speculative_tokens)]
    if combine == BEST:
        model, lookup = _asked_and_not(drafters)
        lengths = shapes or [TokenTree.chain(DEFAULT_CHAIN)]
        deepest = num_speculative_tokens or DEFAULT_LOOKUP
        return (
            *(_plan(shape, (model,), "") for shape in lengths),
            SpecPlan.from_widths((1,) * deepest, (lookup,)),
        )
    if not shapes:
        if not drafters:
            return ()
        looks_up = not any(drafter.is_asked for drafter in drafters)
        shapes = [TokenTree.chain(DEFAULT_LOOKUP if looks_up else DEFAULT_CHAIN)]
    how = (combine or MERGE) if len(drafters) > 1 else ""
    # trees without a draft are refused where it is known that there is none
    return tuple(_plan(shape, drafters or FIRST, how) for shape in shapes)


def policy_of(combine: str | None, plans: Sequence[SpecPlan]) -> str:
    """The engine's policy; see `CompileConfig.policy`."""
    if combine == BEST:
        return BEST
    return MEASURED if any(plan.speculates for plan in plans) else "fixed"


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
    """`3,2,1`, widths; `dynamic:N,K,D`, the N best nodes of K children a node on D levels;
    `budget:4,6,4`, nodes of each level.

    Raises:
        TreeError: neither of these.
    """
    kind, colon, rest = text.rpartition(":")
    try:
        numbers = tuple(int(number) for number in rest.split(","))
        if kind == "dynamic":
            num_nodes, top_k, depth = numbers
            return DynamicTree(num_nodes, top_k, depth)
        if kind == "budget":
            return BudgetTree.of(numbers)
        if not colon:
            return numbers
    except ValueError:
        pass
    raise TreeError(
        f"--tree {text}",
        "widths separated by commas, dynamic:NODES,CHILDREN,LEVELS, or budget: and the nodes of"
        " each level",
        "for example --tree 3,2,1, --tree dynamic:16,4,4 or --tree budget:4,6,4",
    )


def _plan(shape: TokenTree | DynamicTree, drafts: tuple[Drafter, ...], combine: str) -> SpecPlan:
    if isinstance(shape, TokenTree):
        return SpecPlan.from_tree(shape, drafts, combine)
    if len(drafts) > 1:
        raise ConfigError(
            f"a dynamic tree of {len(drafts)} drafts",
            "one draft model or self-draft, which every level asks anew",
            "choose a static tree, or --combine best",
        )
    return SpecPlan.from_dynamic(shape, drafts[0])


def _check_combine(drafts: Sequence[Drafter], combine: str | None) -> None:
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


def _asked_and_not(drafts: Sequence[Drafter]) -> tuple[Drafter, Drafter]:
    """The one that asks a model, and the lookup that competes with it."""
    asked = [drafter for drafter in drafts if drafter.is_asked]
    others = [drafter for drafter in drafts if not drafter.is_asked]
    if len(asked) != 1 or len(others) != 1:
        raise ConfigError(
            f"--combine best of {', '.join(drafter.name for drafter in drafts)}",
            "one draft model or self-draft, and one lookup that it competes with",
            "for example --draft D/ --draft suffix --combine best",
        )
    return asked[0], others[0]
