"""Fuse draft, verify, accept and commit into one step program.

A step program is three graphs over one environment of named tensors: `draft` calls draft programs
and makes the tree, `verify` calls the target over all nodes, once or tile by tile, `accept_commit`
walks the trees and moves the accepted rows. Nothing in them reads a value on the host, and all
shapes follow from the batch size and the plan. What enters and leaves is listed in STEP_INPUTS and
STEP_OUTPUTS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from specc.artifact.graph_io import store_graph
from specc.artifact.state_entry import CONV, StateGeometry
from specc.lora.target_adapters import NO_ADAPTERS, TargetAdapters
from specc.passes.step.draft_stage import draft_stage, num_levels
from specc.passes.step.step_graph import (
    BLOCK_MASS,
    DRAFT_STATES,
    HISTORY,
    STATES,
    STEP_INPUTS,
    TARGET,
    StepGraph,
    int32,
    slab_name,
    slots_name,
    state_names,
)
from specc.speculation.plan_json import plan_to_json
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten
specc = torch.ops.specc

SCHEMA_VERSION = 2
STEP_OUTPUTS = (
    "tokens",  # [B, N] i64 token of each node
    "logits",  # [B * N, V] target logits; a plan in tiles has "winners" [B, N] i64 instead
    "path",  # [B, P] i32 accepted nodes, then -1
    "num_accepted",  # [B] i32
    "output_tokens",  # [B, P] i64 accepted tokens, bonus token, then -1
    "next_cache_len",  # [B] i32
    "next_last_tokens",  # [B, C] i64
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
            {"name": name, "graph": store_graph(graph)} for name, graph in self.stages.items()
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "plan": plan_to_json(self.plan),
            "constants": constants,
            "stages": stages,
        }


def fuse_step(
    plan: SpecPlan,
    slabs: dict[str, int],
    is_padded: bool = False,
    block_size: int = 0,
    reads_winners: bool = False,
    windowed: Collection[str] = (),
    states: Sequence[StateGeometry] = (),
    draft_states: Mapping[str, Sequence[StateGeometry]] = MappingProxyType({}),
    adapters: TargetAdapters = NO_ADAPTERS,
) -> StepProgram:
    """Compose the step of a plan.

    Args:
        plan: off, or what proposes in which shape.
        slabs: number of cache slabs of each model, `target` and the drafts of the plan.
        is_padded: the models' programs write the nodes of a pass to rows that follow each
            other.
        block_size: rows of a block of the caches; only plans with views ask.
        reads_winners: acceptance reads what the target wants after each node, as that of a plan in
            tiles does in any case. Trees are accepted so under rules that follow the target's own
            token.
        windowed: self-drafts whose programs see a part of the cache by themselves; others get
            another block table.
        states: of each slab of states that the target's layers keep.
        draft_states: draft model → the same of its layers, where they keep some.
        adapters: that the target takes for each token.
    """
    reads_winners = reads_winners or plan.tile is not None
    constants: dict[str, torch.Tensor] = {}
    stages: dict[str, fx.Graph] = {}
    if plan.speculates:
        stateful = {*draft_states, *([TARGET] if states else [])}
        given = is_padded, block_size, windowed, stateful, adapters
        stages["draft"] = draft_stage(plan, constants, *given)
    has_states = bool(states)
    stages["verify"] = _verify_stage(plan, constants, reads_winners, has_states, adapters)
    kept = {TARGET: states, **draft_states}
    stages["accept_commit"] = _accept_commit_stage(plan, slabs, constants, reads_winners, kept)
    return StepProgram(plan, constants, stages)


def _verify_stage(
    plan: SpecPlan,
    constants: dict[str, torch.Tensor],
    reads_winners: bool,
    has_states: bool,
    adapters: TargetAdapters,
) -> fx.Graph:
    """Passes of the target over all nodes of all sequences, and what it wants after each.

    Parents precede their children, so that what a tile attends to is in the cache by then: the
    prefix, earlier tiles, and its own nodes. Dead nodes of a tree that is data are fed, too:
    nothing attends to their rows, and the walk never reaches them.
    """
    # where layers keep states, the host says whose are where
    names = *STEP_INPUTS, *([STATES] if has_states else [])
    g = StepGraph(constants, *names, adapters=adapters)
    if not plan.speculates:
        tokens = g.last(g["last_tokens"], 1)
        nodes = g.arange(0, 1, 1, torch.int32)
        slots, positions = g.rows(nodes, nodes)
        logits = _target(g, plan, 1, tokens, positions, slots, None)
        if reads_winners:
            return g.finish(tokens=tokens, winners=_winners(g, plan, tokens, logits, 0, 1))
        return g.finish(tokens=tokens, logits=logits)
    if not reads_winners:
        return g.finish(logits=_verify_nodes(g, plan, 0, plan.num_nodes))
    tiles = [
        _winners(g, plan, g["tokens"], _verify_nodes(g, plan, first, last), first, last)
        for first, last in plan.tiles(plan.num_nodes)
    ]
    return g.finish(winners=g.cat(*tiles))


def _winners(
    g: StepGraph, plan: SpecPlan, tokens: fx.Node, logits: fx.Node, first: int, last: int
) -> fx.Node:
    """[B, last - first] tokens that the target wants after nodes first … last - 1."""
    found = g.call(
        specc.node_winners.default,
        logits, tokens, _parents(g, plan), first,
        g["sampling_values"], g["sampling_words"], g["cache_len"], g[HISTORY], g["block_table"],
    )  # fmt: skip
    return g.reshape(found, g.batch, last - first)


def _verify_nodes(g: StepGraph, plan: SpecPlan, first: int, last: int) -> fx.Node:
    """Logits [B * T, V] of nodes first … last - 1 of each sequence."""
    batch, num_nodes, count = g.batch, plan.num_nodes, last - first
    nodes = g.arange(first, last, 1, torch.int32)
    tokens = g.part(g["tokens"], 1, first, last, num_nodes)
    if plan.is_static:
        depths = g.constant("depths", int32(plan.tree.depths))
        words = g.constant("ancestors", plan.tree.ancestor_words())
        slots, positions = g.rows(nodes, g.part(depths, 0, first, last, num_nodes))
        ancestors = g.repeat_rows(g.part(words, 0, first, last, num_nodes), batch)
    else:
        slots, _ = g.rows(nodes, nodes)
        # positions are data; those of padding are far below zero
        depths = g.reshape(g["depths"], batch, num_nodes)
        depths = g.part(depths, 1, first, last, num_nodes)
        lengths = g.call(aten.unsqueeze.default, g["cache_len"], 1)
        positions = g.call(aten.clamp.default, g.call(aten.add.Tensor, lengths, depths), 0)
        positions = g.flat(g.call(aten._to_copy.default, positions, dtype=torch.int64))
        ancestors = g.node_rows(g["ancestors"], first, last, num_nodes)
    return _target(g, plan, count, tokens, positions, slots, ancestors)


def _target(
    g: StepGraph,
    plan: SpecPlan,
    count: int,
    tokens: fx.Node,
    positions: fx.Node,
    slots: fx.Node,
    ancestors: fx.Node | None,
) -> fx.Node:
    """A pass of the target over `count` nodes [B, count] of each sequence.

    Its nodes vote on the blocks that the plan's views are to see, as the host says.
    """
    batch = g.batch
    states = [g[STATES]] if STATES in g else []
    mass = [g[BLOCK_MASS]] if plan.chooses_blocks else []
    return g.model(
        TARGET,
        g.flat(tokens),
        positions,
        g.arange(0, g.multiple(batch, count, 1), count, torch.int32),
        slots,
        g["cache_len"],
        ancestors,
        g["block_table"],
        g.arange(0, g.multiple(batch, count), 1, torch.int64),
        *states,
        *g.adapter_rows(count),
        *mass,
    )


def _parents(g: StepGraph, plan: SpecPlan) -> fx.Node:
    """[B, N]."""
    if not plan.is_static and plan.speculates:
        return g["parents"]
    return g.expand_rows(g.constant("parents", int32(plan.shape.parents)), plan.num_nodes)


def _accept_commit_stage(
    plan: SpecPlan,
    slabs: dict[str, int],
    constants: dict[str, torch.Tensor],
    reads_winners: bool,
    states: Mapping[str, Sequence[StateGeometry]],
) -> fx.Graph:
    """Walk the trees, move the accepted rows, and say where each sequence stands."""
    num_nodes, max_depth = plan.num_nodes, plan.max_depth
    g = StepGraph(constants, *STEP_INPUTS, "tokens", "winners" if reads_winners else "logits")
    path, num_accepted, output_tokens = _walk(g, plan, reads_winners)
    outputs = {"path": path, "num_accepted": num_accepted, "output_tokens": output_tokens}

    moves_rows = not plan.is_in_place
    if moves_rows:
        width = g.arange(0, max_depth + 1, 1, torch.int32)
        targets = g.call(aten.add.Tensor, g.call(aten.unsqueeze.default, g["cache_len"], 1), width)
    g.constant(slots_name(TARGET), torch.arange(num_nodes, dtype=torch.int32))
    again = [x for x in plan.models if x.has_rows and not x.moves_rows]
    for drafter in sorted(again, key=lambda x: -x.rows_ahead):
        # rows of what was accepted are computed by the next pass
        length = g.call(aten.add.Tensor, g["cache_len"], drafter.rows_ahead)
        outputs[f"{drafter.name}_len"] = length
    for model in (TARGET, *(x.name for x in plan.models if x.moves_rows)):
        source, length = g.parts(
            specc.commit_rows.default, 2, path, g["cache_len"], g[slots_name(model)]
        )
        outputs["next_cache_len" if model == TARGET else f"{model}_len"] = length
        for i in range(slabs[model] if moves_rows else 0):
            slab = g[slab_name(model, i)]
            g.call(specc.commit_kv.default, slab, source, targets, g["block_table"])
        if plan.speculates:
            # without a tree, the only node is in the states: the pass has folded it
            _fold_states(g, model, states.get(model, ()), source)
    run = (g["last_tokens"], output_tokens, num_accepted)
    g.call(specc.record_tokens.default, g[HISTORY], g["block_table"], g["cache_len"], *run)
    outputs["next_last_tokens"] = g.call(specc.next_tokens.default, *run)
    return g.finish(**outputs)


def _fold_states(
    g: StepGraph, model: str, states: Sequence[StateGeometry], source: fx.Node
) -> None:
    """Fold what accepted nodes have brought into the states, after that of the root."""
    places = STATES if model == TARGET else DRAFT_STATES
    for index, slab in enumerate(states):
        state, rows = (g[name] for name in state_names(model, index))
        given = state, rows, source, g["cache_len"], g[places]
        if slab.kind == CONV:
            g.call(specc.fold_conv.default, *given)
        else:
            sizes = {"key_heads": slab.key_heads, "has_beta": slab.has_beta}
            g.call(specc.fold_recurrence.default, *given, **sizes)


def _walk(g: StepGraph, plan: SpecPlan, reads_winners: bool) -> list[fx.Node]:
    """Path, number of accepted tokens and output tokens."""
    parents = _parents(g, plan)
    if reads_winners:
        tree = (g["winners"], g["tokens"], parents, plan.max_depth)
        return g.parts(specc.accept_winners.default, 3, *tree)
    levels = [g[f"q_{i}"] for i in range(num_levels(plan))]
    return g.parts(
        specc.accept.default,
        3,
        g["logits"], g["tokens"], parents, plan.max_depth,
        g["image"] if plan.has_image else None,
        g["q_rows"] if levels else None,
        levels,
        g["sampling_values"], g["sampling_words"], g["cache_len"], g[HISTORY], g["block_table"],
    )  # fmt: skip
