"""Fuse draft, verify, accept and commit into one step program.

A step program is three graphs over one environment of named tensors: `draft` calls the draft
program once per tree level, `verify` calls the target once over all nodes, `accept_commit` walks
the trees and moves the accepted rows. Nothing in them reads a value on the host, and all shapes
follow from the batch size and the tree. What enters and leaves is listed in STEP_INPUTS and
STEP_OUTPUTS.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from specc.config import SpecPlan
from specc.graph_io import graph_to_json

aten = torch.ops.aten
specc = torch.ops.specc

TARGET = "target"
# [B, 2] i64 tokens at cache_len - 1 and cache_len, [B] i32 committed rows, [B, n] i32
STEP_INPUTS = ("last_tokens", "cache_len", "block_table")
STEP_OUTPUTS = (
    "tokens",  # [B, N] i64 token of each node
    "logits",  # [B * N, V] target logits
    "path",  # [B, P] i32 accepted nodes, then -1
    "num_accepted",  # [B] i32
    "output_tokens",  # [B, P] i64 accepted tokens, bonus token, then -1
    "next_cache_len",  # [B] i32
    "next_last_tokens",  # [B, 2] i64
)


@dataclass(frozen=True)
class StepProgram:
    """The step of one plan: constants of its tree, and the stages in order."""

    plan: SpecPlan
    constants: dict[str, torch.Tensor]
    stages: dict[str, fx.Graph]

    def to_json(self) -> dict[str, Any]:
        constants = {
            name: {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
            for name, value in self.constants.items()
        }
        stages = [
            {"name": name, "graph": graph_to_json(graph)} for name, graph in self.stages.items()
        ]
        return {
            "schema_version": 1,
            "plan": {"name": self.plan.name, "widths": list(self.plan.widths)},
            "constants": constants,
            "stages": stages,
        }


def fuse_step(plan: SpecPlan, slabs: dict[str, int]) -> StepProgram:
    """Compose the step of a plan.

    Args:
        plan: off, a chain or a static expansion tree.
        slabs: number of cache slabs of each model, `target` and, where the plan speculates, one
            draft.
    """
    tree = plan.tree
    constants = {
        "parents": torch.tensor(tree.parents, dtype=torch.int32),
        "has_row_target": torch.ones(tree.num_nodes, dtype=torch.int32),
    }
    stages: dict[str, fx.Graph] = {}
    drafts = [name for name in slabs if name != TARGET] if plan.widths else []
    if plan.widths:
        (draft,) = drafts
        fed = [node not in tree.leaves for node in range(tree.num_nodes)]
        constants |= {
            "depths": torch.tensor(tree.depths, dtype=torch.int32),
            "ancestors": tree.ancestor_words(),
            # a draft has rows of the nodes that were fed to it; its last level never is
            **{f"has_row_{draft}": torch.tensor(fed, dtype=torch.int32)},
        }
        stages["draft"] = _draft_stage(plan, draft)
    stages["verify"] = _verify_stage(plan)
    stages["accept_commit"] = _accept_commit_stage(plan, slabs, drafts)
    return StepProgram(plan, constants, stages)


class _Builder:
    """A graph under construction: named inputs, calls, named outputs."""

    def __init__(self, *inputs: str) -> None:
        self.graph = fx.Graph()
        self.inputs = {name: self.graph.placeholder(name) for name in inputs}

    def __getitem__(self, name: str) -> fx.Node:
        return self.inputs[name]

    def call(self, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def model(self, name: str, *inputs: fx.Node | None) -> fx.Node:
        """Call a model program with its runtime inputs; returns logits [R, V]."""
        return self.graph.call_module(name, inputs)

    def flat(self, node: fx.Node) -> fx.Node:
        return self.call(aten.reshape.default, node, [-1])

    def add_outer(self, base: fx.Node, offsets: fx.Node) -> fx.Node:
        """Base [B] + offsets [M] → [B, M]."""
        return self.call(aten.add.Tensor, self.call(aten.unsqueeze.default, base, 1), offsets)

    def rows(self, nodes: fx.Node, depths: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Slots [B * M] i32 and positions [B * M] i64 of nodes [M]."""
        made = self.call(specc.tree_rows.default, self["cache_len"], nodes, depths)
        return self.call(operator.getitem, made, 0), self.call(operator.getitem, made, 1)

    def multiple(self, size: fx.Node, factor: int, extra: int = 0) -> fx.Node:
        return self.call(operator.add, self.call(operator.mul, size, factor), extra)

    def arange(self, start: Any, end: Any, step: int, dtype: torch.dtype) -> fx.Node:
        return self.call(
            aten.arange.start_step, start, end, step, dtype=dtype, device=torch.device("cpu")
        )

    def repeat_rows(self, node: fx.Node, batch: fx.Node) -> fx.Node:
        """[M, W] → [B * M, W]."""
        return self.call(aten.repeat.default, node, [batch, 1])

    def column(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        return self.call(aten.slice.Tensor, node, 1, start, stop)

    def finish(self, **outputs: fx.Node) -> fx.Graph:
        self.graph.output(outputs)
        self.graph.lint()
        return self.graph


def _draft_stage(plan: SpecPlan, draft: str) -> fx.Graph:
    """Grow the tree level by level; node i of the tree lives in slot cache_len + i of the draft.

    The first level feeds the tokens at cache_len - 1 and cache_len: after a step in which a leaf
    was accepted, the draft has not seen the former. Feeding it always is idempotent and keeps the
    shape; at cache_len == 0 there is none, and its slot -1 makes it a dead token.
    """
    tree = plan.tree
    g = _Builder(*STEP_INPUTS, "ancestors")
    batch = g.call(aten.sym_size.int, g["last_tokens"], 0)
    pair = g.arange(-1, 1, 1, torch.int32)
    slots, positions = g.rows(pair, pair)
    logits = g.model(
        draft,
        g.flat(g["last_tokens"]),
        positions,
        g.arange(0, g.multiple(batch, 2, 1), 2, torch.int32),
        slots,
        g["cache_len"],
        None,
        g["block_table"],
        g.arange(1, g.multiple(batch, 2, 1), 2, torch.int64),
    )
    levels = [
        g.column(g["last_tokens"], 1, 2),
        g.call(specc.tree_expand.default, logits, plan.widths[0]),
    ]
    for depth, width in enumerate(plan.widths[1:], start=1):
        first, count = tree.levels[depth][0], len(tree.levels[depth])
        nodes = g.arange(first, first + count, 1, torch.int32)
        depths = g.call(aten.full_like.default, nodes, depth)
        slots, positions = g.rows(nodes, depths)
        rows = g.call(aten.slice.Tensor, g["ancestors"], 0, first, first + count)
        total = g.multiple(batch, count)
        logits = g.model(
            draft,
            g.flat(levels[-1]),
            positions,
            g.arange(0, g.multiple(batch, count, 1), count, torch.int32),
            slots,
            g["cache_len"],
            g.repeat_rows(rows, batch),
            g["block_table"],
            g.arange(0, total, 1, torch.int64),
        )
        children = g.call(specc.tree_expand.default, logits, width)
        levels.append(g.call(aten.reshape.default, children, [batch, count * width]))
    return g.finish(tokens=g.call(aten.cat.default, levels, 1))


def _verify_stage(plan: SpecPlan) -> fx.Graph:
    """One pass of the target over all nodes of all sequences."""
    num_nodes = plan.tree.num_nodes
    if not plan.widths:
        g = _Builder(*STEP_INPUTS)
        batch = g.call(aten.sym_size.int, g["last_tokens"], 0)
        tokens = g.column(g["last_tokens"], 1, 2)
        root = g.arange(0, 1, 1, torch.int32)
        slots, positions = g.rows(root, root)
        ancestors = None
    else:
        g = _Builder(*STEP_INPUTS, "tokens", "depths", "ancestors")
        batch = g.call(aten.sym_size.int, g["last_tokens"], 0)
        tokens = g["tokens"]
        slots, positions = g.rows(g.arange(0, num_nodes, 1, torch.int32), g["depths"])
        ancestors = g.repeat_rows(g["ancestors"], batch)
    logits = g.model(
        TARGET,
        g.flat(tokens),
        positions,
        g.arange(0, g.multiple(batch, num_nodes, 1), num_nodes, torch.int32),
        slots,
        g["cache_len"],
        ancestors,
        g["block_table"],
        g.arange(0, g.multiple(batch, num_nodes), 1, torch.int64),
    )
    return g.finish(logits=logits) if plan.widths else g.finish(tokens=tokens, logits=logits)


def _accept_commit_stage(plan: SpecPlan, slabs: dict[str, int], drafts: list[str]) -> fx.Graph:
    """Walk the trees, move the accepted rows, and say where each sequence stands."""
    num_nodes, max_depth = plan.tree.num_nodes, plan.tree.max_depth
    models = (TARGET, *drafts)
    names = [slab_name(m, i) for m in models for i in range(slabs[m])]
    rows = [f"has_row_{m}" for m in models]
    g = _Builder(*STEP_INPUTS, "tokens", "logits", "parents", *rows, *names)
    batch = g.call(aten.sym_size.int, g["last_tokens"], 0)
    parents = g.call(aten.unsqueeze.default, g["parents"], 0)
    parents = g.call(aten.expand.default, parents, [batch, num_nodes])
    accepted = g.call(specc.accept_greedy.default, g["logits"], g["tokens"], parents, max_depth)
    path, num_accepted, output_tokens = (g.call(operator.getitem, accepted, i) for i in range(3))
    outputs = {"path": path, "num_accepted": num_accepted, "output_tokens": output_tokens}

    targets = g.add_outer(g["cache_len"], g.arange(0, max_depth + 1, 1, torch.int32))
    for model in models:
        made = g.call(specc.commit_rows.default, path, g["cache_len"], g[f"has_row_{model}"])
        source, length = (g.call(operator.getitem, made, i) for i in range(2))
        outputs["next_cache_len" if model == TARGET else f"{model}_len"] = length
        for i in range(slabs[model]):
            slab = g[slab_name(model, i)]
            g.call(specc.commit_kv.default, slab, source, targets, g["block_table"])
    outputs["next_last_tokens"] = g.call(
        specc.next_tokens.default, g["last_tokens"], output_tokens, num_accepted
    )
    return g.finish(**outputs)


def slab_name(model: str, index: int) -> str:
    """Environment name of a model's cache slab."""
    return f"{model}_slab_{index}"
