"""What the commands draw of plans: a line, a token tree, and where self-drafts pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.tree import Tree

from specc.cli.render import make_table
from specc.drafters.registry import FIRST, drafter_of
from specc.speculation.plans import SpecPlan
from specc.speculation.sharpness import describe_sharpness
from specc.speculation.tree import TokenTree

if TYPE_CHECKING:
    from specc.cost.critical_length import CriticalLength

_MOST_BRANCHES = 3  # children drawn under one node
_MOST_LINES = 32  # lines of one tree


def describe_plan(plan: SpecPlan) -> str:
    """A plan in one line: shape, size, and what proposes."""
    if not plan.speculates:
        return "plain decoding, 1 token a pass"
    size = f"{plan.num_nodes} nodes a pass, root included"
    if plan.dynamic is not None and plan.dynamic.knows_counts:
        levels = ", ".join(map(str, plan.dynamic.level_sizes))
        text = f"{size}: {levels} on its levels, below the nodes that the draft is surest of"
    elif plan.dynamic is not None:
        text = f"the {size}, that the draft finds likeliest, at most {plan.max_depth} deep"
    else:
        leaves = len(plan.shape.leaves)
        kind = "chain" if leaves == 1 else "tree"
        text = f"{kind} of depth {plan.max_depth}: {size}"
        text += f", {leaves} {'path' if leaves == 1 else 'paths'}" if plan.is_static else ""
    if plan.combine:
        text += f"; {plan.combine} of {', '.join(x.option for x in plan.drafters)}"
    elif plan.drafts != (FIRST[0].name,):
        text += f"; of {plan.drafters[0].option}"
    if plan.sharpness:
        text += f"; logits of drafts times {describe_sharpness(plan)} by depth"
    if plan.tile is not None:
        text += f"; logits of {plan.tile} nodes at a time"
    return text


def critical_table(lengths: Sequence[CriticalLength]) -> Table:
    """From which context on self-drafts beat plain decoding, by batch."""
    columns = ("batch size", "chain", "tokens a step", "pays from")
    table = make_table(("self-draft", *columns), columns)
    for one in lengths:
        rows = "never" if one.rows is None else f"{math.ceil(one.rows)} tokens"
        cells = one.batch_size, one.num_draft_tokens, f"{one.expected_tokens:.2f}", rows
        table.add_row(drafter_of(one.draft).option, *map(str, cells))
    return table


def draw_tree(tree: TokenTree) -> Tree:
    """The token tree of a plan: node numbers, chains on one line, wide levels abbreviated."""
    children: dict[int, list[int]] = {node: [] for node in range(tree.num_nodes)}
    for node, parent in enumerate(tree.parents[1:], start=1):
        children[parent].append(node)
    sizes = [1] * tree.num_nodes
    for node in range(tree.num_nodes - 1, 0, -1):
        sizes[tree.parents[node]] += sizes[node]
    lines = 1

    def label(node: int) -> tuple[str, int]:
        names = ["root" if node == 0 else str(node)]
        while len(children[node]) == 1:
            (node,) = children[node]
            names.append(str(node))
        if len(names) > 10:
            names = [*names[:4], "…", *names[-2:]]
        return " ─ ".join(names), node

    def grow(branch: Tree, node: int) -> None:
        nonlocal lines
        drawn = children[node]
        if len(drawn) > _MOST_BRANCHES + 1:
            drawn = drawn[:_MOST_BRANCHES]
        if lines + len(drawn) > _MOST_LINES:
            drawn = []
        lines += len(drawn)
        for child in drawn:
            text, end = label(child)
            grow(branch.add(text), end)
        hidden = children[node][len(drawn) :]
        if hidden:
            nodes = sum(sizes[child] for child in hidden)
            branch.add(f"… {len(hidden)} more, {nodes} nodes")
            lines += 1

    text, end = label(0)
    root = Tree(text)
    grow(root, end)
    return root
