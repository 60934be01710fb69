"""Medusa heads: one pass, of one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from specc.artifact.safetensors_io import TensorReader
from specc.drafters.drafter import Drafter
from specc.drafters.medusa import MedusaHeads
from specc.passes.base import Pass
from specc.passes.drafters.block_pass import levels_of, rows_by_depth
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.head_spec import HeadSwitches, TargetFacts
from specc.passes.drafters.kinds import medusa_layout_of
from specc.passes.drafters.lattice import Lattice
from specc.passes.drafters.medusa_head import MedusaHead
from specc.passes.drafters.medusa_spec import MEDUSA_FILE, MedusaSpec, fit_medusa
from specc.passes.program import RowInput
from specc.passes.rewrite.read_features import TAPPED, ReadFeatures
from specc.passes.rewrite.stack_logits import StackLogits
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten


def medusa_levels(g: StepGraph, heads: MedusaHeads, depth: int) -> list[fx.Node]:
    """Logits [B, V] of each depth. All heads read one row: the target's, of the token before the
    root.

    That is the row from which the target has chosen the root; the first head proposes what comes
    after it. The pass is fed the root, whose row of a cache nobody writes.
    """
    draft, batch = heads.name, g.batch
    nodes = g.arange(0, 1, 1, torch.int32)
    slots, positions = g.rows(nodes, nodes)
    known = g.call(aten.sub.Tensor, g["cache_len"], 1)
    none = g.call(aten.full_like.default, known, -1)
    logits = g.model(
        draft,
        g.flat(g.last(g["last_tokens"], 1)),
        positions,
        g.arange(0, g.multiple(batch, 1, 1), 1, torch.int32),
        slots,
        g["cache_len"],
        None,
        g["block_table"],
        g.arange(0, g.multiple(batch, 1), 1, torch.int64),
        g.call(aten.stack.default, [known, none], 1),
    )
    rows = rows_by_depth(g, draft, torch.arange(depth), heads.size)
    return levels_of(g, g.call(aten.index_select.default, logits, 0, rows), depth)


class CompilerMedusa(CompilerDrafter):
    called = "Medusa heads"
    file = MEDUSA_FILE

    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        assert isinstance(drafter, MedusaHeads)
        return Lattice(drafter, medusa_levels(g, drafter, plan.max_depth))

    def says(self, raw: Mapping[str, Any], name: str) -> bool:
        return medusa_layout_of(raw, ()) is not None

    def fit(
        self,
        reader: TensorReader,
        raw: dict[str, Any],
        directory: Path,
        weights: Path,
        target: TargetFacts,
        switches: HeadSwitches,
    ) -> MedusaSpec | None:
        layout = medusa_layout_of(raw, reader.keys())
        if layout is None:
            return None
        return fit_medusa(reader, raw, layout, directory, weights, target)

    def has_layers(self, spec: MedusaSpec) -> bool:
        return False

    def rows(self, spec: MedusaSpec, dtype: torch.dtype) -> tuple[RowInput, ...]:
        return (RowInput(TAPPED, spec.feature_columns, dtype),)

    def module(self, spec: MedusaSpec) -> MedusaHead:
        return MedusaHead(spec)

    def passes(self, spec: MedusaSpec) -> tuple[Callable[[], Pass], ...]:
        return (ReadFeatures, partial(StackLogits, spec.block.size))


DRAFTER = CompilerMedusa()
