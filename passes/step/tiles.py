"""Rows of logits that a step holds at a time, and tiles that bound them.

Between verification and acceptance a plan without a tile holds the target's logits of all nodes,
and those that children were drawn from where a rule verifies with them. In tiles, a step holds
the logits of one pass over at most `tile` nodes of each sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from specc.drafters.drafter import Drafter
from specc.errors import ConfigError
from specc.passes.step.draft_stage import num_levels
from specc.passes.step.step_graph import TARGET
from specc.speculation.plans import SpecPlan
from specc.system.files import format_bytes


def logit_rows(plan: SpecPlan, model: str) -> int:
    """Rows of logits a sequence that one model's passes of a step leave alive at a time.

    Args:
        plan: of the step.
        model: `target`, `draft_0`, …; 0 rows where it takes no part. The logits of views are the
            target's.
    """
    if model != TARGET:
        return _drafted_rows(plan, [x for x in plan.models if x.name == model])
    rows = min(plan.num_nodes, plan.tile or plan.num_nodes)
    drafted = _drafted_rows(plan, plan.self_drafts)
    # what no rule verifies with is let go of before the tree is verified
    return rows + drafted if num_levels(plan) else max(rows, drafted)


def pass_rows(plan: SpecPlan, model: str) -> int:
    """Tokens a sequence of the widest pass that a step makes with a model."""
    if model == TARGET:
        own = min(plan.num_nodes, plan.tile or plan.num_nodes)
        return max([own, *(rows for x in plan.self_drafts for rows in _level_rows(plan, x))])
    drafter = next((x for x in plan.models if x.name == model), None)
    if drafter is None:
        return 0
    levels = (plan.catch_up, *_level_rows(plan, drafter))
    return max(drafter.passes(plan.max_depth, levels))


def tile_plan(plan: SpecPlan, row_bytes: Mapping[str, int], batch: int, limit_mb: int) -> SpecPlan:
    """The plan itself where the logits of its step fit into a limit, else in tiles that do.

    Args:
        plan: one with a tile keeps it, or gets a smaller one.
        row_bytes: model → bytes of a row of its logits; the target and the plan's drafts are read.
        batch: sequences of a step.
        limit_mb: MiB of logits at a time, of all models.
    Raises:
        ConfigError: not even the logits of one node of each sequence fit.
    """
    limit = limit_mb << 20
    models = (TARGET, *plan.model_names)
    largest = limit // (batch * max(row_bytes[model] for model in models))
    if largest == 0:
        needed = batch * max(row_bytes[model] for model in models)
        raise ConfigError(
            f"--max-logits-mb {limit_mb}; the logits of one node of each of {batch} sequences take"
            f" {format_bytes(needed)}",
            f"{-(-needed >> 20)} or more",
            f"pass --max-logits-mb {-(-needed >> 20)}, or lower --max-batch-size",
        )
    if not plan.speculates or (plan.tile is None and _fits(plan, row_bytes, batch, limit)):
        return plan
    for drafter in plan.models:
        _check_pass_fits(plan, drafter, batch * row_bytes[drafter.name], batch, limit)
    levels = [rows for draft in plan.asked for rows in _level_rows(plan, draft)]
    widest = max([plan.num_nodes, *levels])
    # as few tiles as fit, all of about one size
    count = -(-widest // min(largest, widest))
    tile = -(-widest // count)
    tiled = dataclasses.replace(plan, tile=min(tile, plan.tile or tile))
    if any(drafter.depends_on_path for drafter in plan.models):
        # beside the rows of a tile there are those of the block, and what is added to them
        while tiled.tile and tiled.tile > 1 and not _fits(tiled, row_bytes, batch, limit):
            tiled = dataclasses.replace(tiled, tile=tiled.tile - 1)
        _check_block_fits(tiled, row_bytes, batch, limit)
    return tiled


def _check_pass_fits(
    plan: SpecPlan, drafter: Drafter, row_bytes: int, batch: int, limit: int
) -> None:
    """Raises ConfigError: the logits that the one pass of a draft makes are above the limit.

    Args:
        plan: of the step.
        drafter: of the plan.
        row_bytes: of a row of logits of every sequence.
        batch: sequences.
        limit: bytes.
    """
    needed = drafter.num_logits(plan.max_depth) * row_bytes
    if needed <= limit:
        return
    # all heads of a pass may be computed, whatever the depth
    fits = drafter.num_logits(1) * row_bytes <= limit
    made = drafter.describe_logits(plan.max_depth)
    raise ConfigError(
        f"--max-logits-mb {limit >> 20}; the logits of {made} for each of {batch} sequences take"
        f" {format_bytes(needed)}",
        f"{-(-needed >> 20)} or more: one pass makes all of them",
        f"pass --max-logits-mb {-(-needed >> 20)}, or lower --max-batch-size"
        + (" or --num-speculative-tokens" if fits else ""),
    )


def _check_block_fits(plan: SpecPlan, row_bytes: Mapping[str, int], batch: int, limit: int) -> None:
    """Raises ConfigError: what a block adds to the smallest tiles is above the limit."""
    needed = max(batch * logit_rows(plan, m) * row_bytes[m] for m in (TARGET, *plan.model_names))
    if needed > limit:
        raise ConfigError(
            f"--max-logits-mb {limit >> 20}; a block of {plan.max_depth} tokens whose logits depend"
            f" on the token before takes {format_bytes(needed)} for {batch} sequences, a node at a"
            " time",
            f"{-(-needed >> 20)} or more",
            f"pass --max-logits-mb {-(-needed >> 20)}, or lower --max-batch-size or"
            " --num-speculative-tokens",
        )


def _fits(plan: SpecPlan, row_bytes: Mapping[str, int], batch: int, limit: int) -> bool:
    sizes = [batch * logit_rows(plan, m) * row_bytes[m] for m in (TARGET, *plan.model_names)]
    # what no rule verifies with is let go of, level by level
    return (sum(sizes) if num_levels(plan) else max(sizes)) <= limit


def _drafted_rows(plan: SpecPlan, drafts: Sequence[Drafter]) -> int:
    """Rows of logits a sequence that drafting leaves alive at a time."""
    levels = [rows for draft in drafts for rows in _level_rows(plan, draft)]
    rows = sum(levels) if num_levels(plan) else max(levels, default=0)
    if any(drafter.depends_on_path for drafter in drafts):
        # beside what one pass has made of all depths, and what is added to it
        made = max(drafter.num_logits(plan.max_depth) for drafter in drafts)
        rows += max(plan.max_depth, made) + max(levels)
    return rows


def _level_rows(plan: SpecPlan, draft: Drafter) -> list[int]:
    """Nodes a sequence that a draft is asked about at a time, level by level."""
    if draft.is_product:
        # of all levels at once
        return [draft.num_logits(plan.max_depth)]
    if plan.dynamic is not None:
        dynamic = plan.dynamic
        levels = list(dynamic.path_widths if draft.keeps_paths else dynamic.fed_widths)
    else:
        tree = plan.tree_of(draft)
        leaves = set(tree.leaves)
        levels = [len(set(level) - leaves) for level in tree.levels[: tree.max_depth]]
    return [min(level, plan.tile or level) for level in levels]
