"""Uno: one pass of the target over noise, through an adapter; then trees of its rows of logits."""

from __future__ import annotations

import torch
from torch import fx

from specc.drafters.drafter import Drafter
from specc.drafters.uno import Uno
from specc.passes.drafters.block_pass import levels_of, rows_by_depth
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.lattice import Lattice
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import ADAPTERS, STATES, TARGET, StepGraph
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten
# Knuth's multiplicative hash: bits of positions that are neighbors differ in all places
_FACTOR, _BITS = 2654435761, 32


def uno_levels(g: StepGraph, draft: Uno, depth: int) -> list[fx.Node]:
    """Logits [B, V] of each depth.

    Rows stand in the cache where the nodes of the tree will: verification writes those before it
    attends to them. Where layers keep states, no row is certain.
    """
    batch, number = g.batch, g.adapters.names.index(draft.adapter)
    nodes = g.arange(0, depth, 1, torch.int32)
    slots, positions = g.rows(nodes, nodes)
    wide = g.reshape(positions, batch, depth)
    root = g.last(g["last_tokens"], 1)
    of_request = g.call(aten.unsqueeze.default, g[ADAPTERS], 1)
    tokens, adapters = [root], [of_request]
    if depth > 1:
        tokens.append(noise(g, g.column(wide, 1, depth), g.adapters.vocab_size))
        of_noise = g.call(aten.full_like.default, of_request, number)
        adapters.append(g.call(aten.expand.default, of_noise, [batch, depth - 1]))
    states = []
    if TARGET in g.stateful:
        places = g.column(g[STATES], 0, 1)
        states = [g.cat(places, g.call(aten.full_like.default, places, 0))]
    logits = g.model(
        TARGET,
        g.flat(g.cat(*tokens)),
        positions,
        g.arange(0, g.multiple(batch, depth, 1), depth, torch.int32),
        slots,
        g["cache_len"],
        None,
        g["block_table"],
        rows_by_depth(g, draft.name, torch.arange(depth), depth),
        *states,
        g.reshape(g.cat(*adapters), -1, 1),
    )
    return levels_of(g, logits, depth)


def noise(g: StepGraph, positions: fx.Node, vocab_size: int) -> fx.Node:
    """A token for each of these positions, as if it were drawn from all of them.

    It follows from the position alone: proposals may depend on what is fixed before tokens are
    drawn, and nothing that draws them has part in it.
    """
    mixed = g.call(aten.mul.Tensor, positions, _FACTOR)
    mixed = g.call(aten.remainder.Scalar, mixed, 1 << _BITS)
    scaled = g.call(aten.mul.Tensor, mixed, vocab_size)
    return g.call(aten.div.Tensor_mode, scaled, 1 << _BITS, rounding_mode="floor")


class CompilerUno(CompilerDrafter):
    called = "adapter of noise rows"

    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        assert isinstance(drafter, Uno)
        return Lattice(drafter, uno_levels(g, drafter, plan.max_depth))


DRAFTER = CompilerUno()
