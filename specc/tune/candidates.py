"""Plans that are worth a measurement: what an engine has, and what the tables promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from specc.cost.plan_choice import PlanFigures, best_plan
from specc.cost.step_seconds import StepSeconds
from specc.drafters.drafter import Drafter
from specc.drafters.registry import model_draft
from specc.drafters.views import View
from specc.speculation.plans import DynamicTree, SpecPlan, models_of
from specc.speculation.sharpness import sharpened
from specc.tune.options import TuneOptions

# rows of windows that are tried besides those of the engine
BUDGETS = (128, 256, 512, 1024)
# tokens that lookups propose
LOOKUP_DEPTH = 16
# plans of self-drafts that are measured whole, besides those of the engine
_MOST_VIEWS = 3

Acceptance = Mapping[str, list[list[float]]]


def drafts_of(plans: Sequence[SpecPlan], num_models: int) -> list[Drafter]:
    """Draft models of an engine, and what else proposes in its plans."""
    models = models_of(plans)
    asked = {x.name: x for plan in plans if plan.speculates for x in plan.drafters}
    others = [asked[name] for name in sorted(asked) if asked[name].number is None]
    return [*(models.get(i) or model_draft(i) for i in range(num_models)), *others]


def views_to_measure(drafts: Sequence[Drafter], block_size: int, shortest: int) -> list[View]:
    """Self-drafts of an engine, and the same with other windows.

    Args:
        block_size: rows of a block of its caches; 0 is none, and no self-draft.
        shortest: committed rows of the shortest context. Of a window that holds all of it nothing
            is learned: such a draft is the target.
    """
    own = [x.view for x in drafts if x.view is not None and not x.has_second_program]
    others = [dataclasses.replace(view, window=budget) for view in own for budget in BUDGETS]
    fitting = [
        view
        for view in others
        if view.window >= block_size and is_outgrown(view, block_size, shortest)
    ]
    return list(dict.fromkeys([*own, *fitting]))


def is_outgrown(view: View, block_size: int, rows: int) -> bool:
    """Whether a sequence of so many committed rows has some that a view does not see."""
    return view.most_rows(block_size) < rows


def candidates(
    acceptance: Acceptance,
    seconds: Mapping[str, StepSeconds],
    known: Sequence[SpecPlan],
    options: TuneOptions,
) -> dict[SpecPlan, float | None]:
    """Plans to measure whole, and the speed-up that the tables promise.

    Of each draft model the best tree, the best chain and a dynamic tree, of each lookup the best
    chain. Of self-drafts, whose budgets are a choice, too, the best three of all their trees and
    chains, and a dynamic tree of the best. No tree of a block drafter is deeper than its blocks.

    Args:
        acceptance: draft → table by depth and sibling rank.
        seconds: draft → those of steps.
    """
    found: dict[SpecPlan, float | None] = dict.fromkeys(known)
    views: list[tuple[PlanFigures, str]] = []
    for draft, table in acceptance.items():
        drafter = seconds[draft].draft
        if not drafter.is_asked:
            choice = best_plan(table, seconds[draft], options.max_nodes, LOOKUP_DEPTH)
            _add(found, choice.speculative, draft)
            continue
        # a table ends where a block does, but its last row would stand for greater depths
        deepest = options.max_depth if drafter.most_depth is None else drafter.most_depth
        most = options.max_nodes, min(options.max_depth, deepest)
        tree = best_plan(table, seconds[draft], *most).speculative
        chain = best_plan([row[:1] for row in table], seconds[draft], *most).speculative
        if drafter.facts.is_self:
            alike = tree is not None and chain is not None and tree.tree == chain.tree
            views += [(one, draft) for one in (tree, None if alike else chain) if one is not None]
            continue
        _add(found, tree, draft)
        _add(found, chain, draft)
        _add_dynamic(found, tree, draft)
    views.sort(key=lambda one: -one[0].speedup)
    for figures, draft in views[:_MOST_VIEWS]:
        _add(found, figures, draft)
    if views:
        _add_dynamic(found, *views[0])
    return found


def with_sharpness(
    plans: Mapping[SpecPlan, float | None], factors: Mapping[str, Sequence[float]]
) -> dict[SpecPlan, float | None]:
    """Plans whose drafts are sharpened as the tables are, beside those that are not.

    Args:
        plans: of `candidates`; what the tables promise is promised of the sharpened ones.
        factors: draft → β by depth.
    """
    found: dict[SpecPlan, float | None] = {}
    for plan, predicted in plans.items():
        own = sharpened(plan, factors)
        if own != plan:
            found[plan] = None
        found[own] = predicted
    return found


def _add(found: dict[SpecPlan, float | None], figures: PlanFigures | None, draft: str) -> None:
    if figures is not None:
        found[SpecPlan.from_tree(figures.tree, (draft,))] = figures.speedup


def _add_dynamic(
    found: dict[SpecPlan, float | None], figures: PlanFigures | None, draft: str
) -> None:
    """One as large, as wide and as deep as a static tree."""
    if figures is None:
        return
    tree = figures.tree
    widest = max(len(tree.children(node)) for node in range(tree.num_nodes))
    top_k, depth = max(2, min(widest, 8)), tree.max_depth
    size = DynamicTree(2, top_k, depth).num_candidates
    dynamic = DynamicTree(min(tree.num_nodes, size), top_k, depth)
    found.setdefault(SpecPlan.from_dynamic(dynamic, draft), None)
