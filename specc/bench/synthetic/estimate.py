"""What steps would cost on a GPU that is not here: nodes, bytes, floor and an estimate."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specc.artifact.in_memory import BenchPrograms
from specc.bench.step_bytes import ModelShape, count_passes, count_step_bytes
from specc.bench.synthetic.live_values import LiveValues
from specc.bench.synthetic.nodes import Launches, Node, nodes_per_layer, step_nodes
from specc.cost.graph_costs import H200, GraphCosts
from specc.kernels.cuda.recorded import recorded
from specc.kernels.cuda.register import kernels

SCHEMA_VERSION = 1
# operators that choose tokens; a request reads less in them than what is counted for the batch
_DRAWING = ("accept", "draft_children", "node_winners", "accept_winners")
# what a report calls the models
LABELS = {"target": "target", "draft_0": "draft"}


class Counted(NamedTuple):
    """Nodes of a step, and the most bytes that what they make takes at once."""

    nodes: Sequence[Node]
    values_bytes: int


def make_estimate(
    programs: BenchPrograms,
    context: int,
    settings: Mapping[str, Any],
    costs: GraphCosts = H200,
    on_plan: Callable[[str], object] = lambda name: None,
) -> dict[str, Any]:
    """Count and estimate the steps of all plans; the schema is in docs/design/synthetic.md.

    Args:
        programs: lowered for CUDA.
        context: committed rows of each sequence.
        settings: what was asked for, which the report repeats.
        on_plan: called with the name of each plan before it is counted.
    """
    launches = Launches(recorded, kernels())
    nodes: dict[str, Counted] = {}
    filtered: dict[str, Counted] = {}
    for plan in programs.plans:
        on_plan(plan.name)
        for found, is_filtered in ((nodes, False), (filtered, True)):
            live = LiveValues()
            own = step_nodes(programs, plan, context, launches, is_filtered=is_filtered, live=live)
            found[plan.name] = Counted(own, live.most)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "settings": dict(settings) | {"dtype": programs.dtype},
        "device": costs.device,
        "assumptions": costs.assumptions(),
    }
    for model in programs.models:
        per_layer = Counter(
            count
            for own in nodes.values()
            for count in nodes_per_layer(own.nodes, model.entry.name)
        )
        report[LABELS[model.entry.name]] = {
            "source": model.entry.source,
            "layers": len(model.entry.layers),
            # of plans that differ the most; `plans` has them one by one
            "nodes_per_layer": max(per_layer, default=None),
        }
    report["plans"] = {
        plan.name: _plan(programs, plan.name, nodes[plan.name], filtered[plan.name], context, costs)
        for plan in programs.plans
    }
    return report


def _plan(
    programs: BenchPrograms,
    name: str,
    unfiltered: Counted,
    filtered: Counted,
    context: int,
    costs: GraphCosts,
) -> dict[str, Any]:
    plan = next(plan for plan in programs.plans if plan.name == name)
    nodes = unfiltered.nodes
    shapes = {
        model.entry.name: ModelShape(
            model.program, model.entry.layers, model.entry.dtype, copies=model.copies
        )
        for model in programs.models
    }
    step = programs.steps[name]
    moved = count_step_bytes(step, shapes, plan, context, programs.limits.max_batch_size)
    floor_ms = costs.floor_ms(moved.total)
    estimate_ms = _total_ms(nodes, costs)
    models = {}
    for model in programs.models:
        own = [node for node in nodes if node.model == model.entry.name]
        passes = count_passes(step)[model.entry.name]
        if not passes:
            continue
        per_layer = nodes_per_layer(nodes, model.entry.name)
        models[LABELS[model.entry.name]] = {
            "passes": passes,
            "nodes_per_pass": len(own) / passes,
            "nodes_per_layer": max(per_layer, default=None),
            "estimate_ms": _total_ms(own, costs),
        }
    between = [node for node in nodes if not node.model]
    return {
        "nodes": len(nodes),
        "bytes": moved.total,
        "floor_ms": floor_ms,
        "estimate_ms": estimate_ms,
        "ratio": estimate_ms / floor_ms,
        "values_bytes": unfiltered.values_bytes,
        "models": models,
        "between": {
            "nodes": len(between),
            "estimate_ms": _total_ms(between, costs),
        },
        # a part of what lies between passes
        "sampling": _sampling(nodes, costs),
        # where kernels start early: what is left of the gaps that this closes is not known, so this
        # is the least that a step may take, and `estimate_ms` the most
        "dependent": {
            "nodes": sum(node.is_dependent for node in nodes),
            "gaps": num_early_starts(nodes),
            "least_ms": estimate_ms - num_early_starts(nodes) * 1e3 * costs.gap_s,
            "least_ratio": (estimate_ms - num_early_starts(nodes) * 1e3 * costs.gap_s) / floor_ms,
        },
        # of a batch with filters, or that tries proposals one by one
        "filtered": {
            "nodes": len(filtered.nodes),
            "estimate_ms": _total_ms(filtered.nodes, costs),
            "ratio": _total_ms(filtered.nodes, costs) / floor_ms,
            "values_bytes": filtered.values_bytes,
            "sampling": _sampling(filtered.nodes, costs),
        },
        "kernels": dict(Counter(node.name for node in nodes).most_common()),
    }


def num_early_starts(nodes: Sequence[Node]) -> int:
    """Nodes that start before the node before them has ended: both are dependent launches.

    After any other kernel, which does not say that the next one may start, such a node starts when
    that has ended, as it would in the ordinary way.
    """
    return sum(a.is_dependent and b.is_dependent for a, b in itertools.pairwise(nodes))


def _sampling(nodes: Sequence[Node], costs: GraphCosts) -> dict[str, Any]:
    drawing = [node for node in nodes if node.operator in _DRAWING]
    return {
        "nodes": len(drawing),
        "bytes": sum(node.num_bytes for node in drawing),
        "estimate_ms": _total_ms(drawing, costs),
    }


def _total_ms(nodes: Sequence[Node], costs: GraphCosts) -> float:
    return sum(costs.node_ms(node.kind, node.num_bytes) for node in nodes)
