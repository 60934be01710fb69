"""Constants of a step program that follow from its plan: what the compiler wrote, once more.

`draft_stage.py`, `draft_levels.py`, `draft_dynamic.py` and `draft_budget.py` of `passes/step` and
`lattice.py` of `passes/drafters` say what each is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specc.speculation.dynamic_tree import BudgetTree
from specc.speculation.plans import MERGE, SpecPlan
from specc.speculation.tree import TokenTree


def plan_constants(plan: SpecPlan, is_padded: bool) -> dict[str, Tensor]:
    """Name → value of the constants that a step of this plan may have.

    Args:
        plan: of the step.
        is_padded: the step is one for programs that take padded batches.
    """
    made = {"slot_of_target": _int32(range(plan.num_nodes))}
    for drafter in plan.asked:
        made |= drafter.constants(plan.max_depth)
    if plan.dynamic is not None:
        return made | _dynamic(plan)
    made["parents"] = _int32(plan.shape.parents)
    if plan.is_static:
        made["depths"] = _int32(plan.tree.depths)
        made["ancestors"] = plan.tree.ancestor_words()
    trees = {drafter: plan.tree_of(drafter) for drafter in plan.drafters}
    if plan.self_drafts:
        made["view_root"] = torch.ones(1, 1, dtype=torch.int64)
    column, row, rows = 0, 0, list[int]()
    for drafter, tree in trees.items():
        draft, is_product = drafter.name, drafter.is_product
        if not drafter.is_asked:
            rows += [-1] * tree.num_nodes
        else:
            own = [depth - 1 for depth in tree.depths] if is_product else _q_rows(tree)
            rows += [q + row if q >= 0 else -1 for q in own]
            row += tree.max_depth if is_product else tree.num_nodes - len(tree.leaves)
            made[f"parents_of_{draft}"] = _int32(tree.parents)
            made[f"slots_in_{draft}"] = made[f"slot_of_{draft}"] = _int32(_fed_slots(tree))
            if is_product:
                made |= _product_levels(draft, tree, column)
            else:
                made |= _levels(plan, draft, tree, column, is_padded)
        column += tree.num_nodes
    made["q_rows"] = _int32(rows if plan.combine in ("", MERGE) else [-1] * plan.num_nodes)
    made["merge_start"] = _int32([0, *accumulate(tree.num_nodes for tree in trees.values())])
    made["vote_start"] = _int32([i * plan.num_nodes for i in range(len(trees) + 2)])
    return made


def earlier_constants(plan: SpecPlan) -> dict[str, Tensor]:
    """Name → value of those that engines compiled before may have in another form."""
    return {
        name: value
        for drafter in plan.models
        for name, value in drafter.earlier_constants(plan.max_depth).items()
    }


def _levels(
    plan: SpecPlan, draft: str, tree: TokenTree, column: int, is_padded: bool
) -> dict[str, Tensor]:
    """Of the levels that a draft grows its tree by, tile by tile."""
    made, words = {}, tree.ancestor_words()
    for depth in range(tree.max_depth):
        nodes = tree.levels[depth]
        place = {node: i for i, node in enumerate(nodes)}
        for first, fed in _tiles(plan, [node for node in nodes if node not in tree.leaves]):
            name = f"{draft}_level_{depth}" + (f"_{first}" if first else "")
            between = [n for n in nodes if fed[0] <= n <= fed[-1]] if is_padded else fed
            made[f"{name}_fed"] = torch.tensor([place[node] for node in between])
            made[f"{name}_ancestors"] = words[between]
            made[f"{name}_nodes"] = _int32(between)
            made[f"{name}_parents"] = _int32([tree.parents[node] for node in between])
            if depth:
                # of a block drafter whose nodes leave states: which node of those fed before
                above = [node for node in tree.levels[depth - 1] if node not in tree.leaves]
                places = [above.index(tree.parents[node]) for node in between]
                made[f"{name}_above"] = torch.tensor(places)
            made[f"{name}_rows"] = torch.tensor([between.index(node) for node in fed])
            children = [tree.children(node) for node in fed]
            made[f"{name}_columns"] = _int32([column + own[0] for own in children])
            widest = max(map(len, children))
            kept = [i * widest + rank for i, own in enumerate(children) for rank in range(len(own))]
            made[f"{name}_kept"] = torch.tensor(kept)
    return made


def _product_levels(draft: str, tree: TokenTree, column: int) -> dict[str, Tensor]:
    """Of the levels of its tree: all nodes of a depth have the same children, as far as they go."""
    made = {}
    for depth in range(tree.max_depth):
        nodes, name = tree.levels[depth], f"{draft}_level_{depth}"
        made[f"{name}_columns"] = _int32([column + tree.levels[depth + 1][0]])
        ranks = [rank for node in nodes for rank in range(len(tree.children(node)))]
        made[f"{name}_kept"] = torch.tensor(ranks)
    return made


def _dynamic(plan: SpecPlan) -> dict[str, Tensor]:
    assert plan.dynamic is not None
    dynamic, k = plan.dynamic, plan.dynamic.top_k
    if isinstance(dynamic, BudgetTree):
        return _budget(plan, dynamic)
    sizes = {last - first for first, last in plan.tiles(k)}
    columns = {"frontier_columns" + (f"_{n}" if n < k else ""): _int32([0] * n) for n in sizes}
    # of drafts that go on from every node that the tree may have
    sizes = {1} | {last - first for n in dynamic.path_widths for first, last in plan.tiles(n)}
    columns |= {f"level_columns_{n}": _int32([0] * n) for n in sizes}
    return {
        **({"view_root": torch.ones(1, 1, dtype=torch.int64)} if plan.self_drafts else {}),
        "root_column": _int32([0]),
        "first_candidates": torch.arange(1, k + 1),
        "no_rows": _int32([-1] * dynamic.num_candidates),
        "fed_rows": _int32(range(dynamic.num_fed)),
        **columns,
    }


def _budget(plan: SpecPlan, tree: BudgetTree) -> dict[str, Tensor]:
    """Of levels that are shared out: places of a level, a node's beside each other."""
    made: dict[str, Tensor] = {}
    (drafter,), column = plan.drafters, 1
    for depth, (above, own) in enumerate(zip(tree.fed_widths, tree.levels, strict=True)):
        # all nodes of a product have the same children
        for first, last in ((0, 1),) if drafter.is_product else plan.tiles(above):
            name = f"budget_{depth}_columns" + (f"_{first}" if first else "")
            made[name] = _int32([column + node * own for node in range(first, last)])
        column += above * own
    made["q_rows"] = _int32(tree.q_rows(drafter.is_product))
    made[f"slot_of_{drafter.name}"] = _int32(tree.fed_slots())
    return made | ({"view_root": torch.ones(1, 1, dtype=torch.int64)} if plan.self_drafts else {})


def _tiles(plan: SpecPlan, nodes: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    for first, last in plan.tiles(len(nodes)):
        yield first, nodes[first:last]


def _fed_slots(tree: TokenTree) -> list[int]:
    return [-1 if node in tree.leaves else node for node in range(tree.num_nodes)]


def _q_rows(tree: TokenTree) -> list[int]:
    fed = [node for node in range(tree.num_nodes) if node not in tree.leaves]
    row = {node: i for i, node in enumerate(fed)}
    return [-1, *(row[parent] for parent in tree.parents[1:])]


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
