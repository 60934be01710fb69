"""Let products read quantized weights in the order of fragments."""

from __future__ import annotations

import dataclasses

import torch

from specc.artifact.weight_layout import BLOCK
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program


class UseFragments(Pass):
    """Quantized weights in fragments (`specc.artifact.fragments`), where they may be so.

    A weight lies in one way for all that read it, whatever number of rows they have. Those of
    columns that are no whole tiles, of kinds without a kernel, and those that something else than
    products reads, stay in blocks; so do experts that fill no whole blocks, and all whose rows are
    not bfloat16.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.linear_q, ops.grouped_mm_q):
            rows, blocks = node.args[:2]
            weight = program.weights[blocks.target]  # type: ignore[union-attr]
            layout, readers = weight.quantized, list(blocks.users)  # type: ignore[union-attr]
            assert layout is not None
            if layout.is_fragments:
                continue
            if rows.meta["val"].dtype != torch.bfloat16:  # type: ignore[union-attr]
                result.decline(node.name, "its rows are not bfloat16")
            elif any(reader.target is not node.target for reader in readers):
                result.decline(node.name, "something else reads its weight")
            elif not layout.has_fragments(weight.shape[-1]):
                result.decline(node.name, f"no fragments of {weight.shape[-1]} columns")
            elif node.target is ops.grouped_mm_q and weight.shape[-2] % BLOCK:
                result.decline(node.name, f"no whole blocks of {weight.shape[-2]} outputs")
            else:
                order = layout.as_fragments
                moved = dataclasses.replace(weight, quantized=order)
                program.weights[blocks.target] = moved  # type: ignore[union-attr]
                # of mxfp4, a block may have fewer bytes
                stored = blocks.meta["val"].new_empty(moved.stored_shape)  # type: ignore[union-attr]
                blocks.meta["val"] = stored  # type: ignore[union-attr]
                for reader in readers:
                    reader.args = (*reader.args[:4], *order.facts)
                    result.rewrites += 1
        return result
