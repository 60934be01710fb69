"""Let projections read integers: `specc.linear_q` in place of `aten.linear`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from specc.artifact.mixes import MIXES
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.pipeline import Phases
from specc.passes.program import Program, bind_args
from specc.passes.quantize.quantize_embeddings import QuantizeEmbeddings
from specc.passes.quantize.quantize_experts import QuantizeExperts
from specc.passes.quantize.quantized_inputs import (
    QuantizedInputs,
    kept_of,
    name_sums,
    order_columns,
    whole_shape,
)
from specc.passes.quantize.row_integers import RowIntegers
from specc.passes.quantize.use_fragments import UseFragments
from specc.passes.rewrite.flat_rows import replace_linear, why_not

aten = torch.ops.aten
# of the head: its errors are those of the logits, and nothing after it evens them out
HEAD = QuantizedLayout(8)
# the phase
QUANTIZE = "quantize"
# float16 on devices, and in files for others
_ROWS = (torch.float32, torch.bfloat16, torch.float16)


def quantize_phases(
    name: str | None,
    keeps_integers: bool = False,
    experts: bool = True,
    activation_bits: int | None = None,
    embeddings: str | None = None,
    lookups: bool = False,
    fragments: bool = False,
) -> Phases:
    """What the pipeline does before the backend's own phases.

    Args:
        name: of the layout of weights, or of a mix; None leaves them in the engine's dtype.
        keeps_integers: a model has integers in its checkpoint, see `Program.integers`.
        experts: of mixtures, too, where the backend multiplies them by integers.
        activation_bits: of the integers that rows become; None is as many as their type asks for.
        embeddings: name of the layout that was asked for where tables of tokens are to be rounded:
            they get that of heads. None leaves those that nothing else has integers of.
        lookups: tables of tokens are read as integers at all.
        fragments: weights lie in the order of fragments, where they may.
    """
    if name is None and not keeps_integers:
        return ()
    # a mix has said of each weight which layout it has, see `ApplyMix`
    layout = None if name is None or name in MIXES else QuantizedLayout.named(name)
    of_tables = None if embeddings is None else HEAD
    if embeddings is not None and embeddings not in MIXES:
        of_tables = head_layout(QuantizedLayout.named(embeddings))
    passes: list[Callable[[], Pass]] = [
        partial(QuantizeLinear, layout),
        partial(QuantizeExperts, layout, experts),
        partial(QuantizeEmbeddings, of_tables, lookups),
    ]
    if activation_bits is not None:
        passes.append(partial(RowIntegers, activation_bits))
    if fragments:
        passes.append(UseFragments)
    return ((QUANTIZE, tuple(passes)),)


def head_layout(layout: QuantizedLayout) -> QuantizedLayout:
    """Of heads and of tables of tokens, where the other weights have this one."""
    return layout if layout.kind == HEAD.kind else HEAD


class QuantizeLinear(Pass):
    """`aten.linear(x, w, b)` → `specc.linear_q` over the flattened rows of x and a quantized w.

    The quantized weight is an input of its own: what else reads w reads it as before, and an input
    that nobody reads any more is dropped. `QuantizeEmbeddings` lets an embedding that the head is
    tied to read the head's integers. The last projection, the head, is int8 whatever the others
    are. Projections of fewer than 32 outputs, such as the routers of small mixtures, keep their
    weights. One of several ranks has what the rounded weight of all has in its rows and columns.

    A weight of which the checkpoint has integers keeps those, the head's, too.

    Args:
        layout: of the others; None leaves them as they are.
    """

    def __init__(self, layout: QuantizedLayout | None) -> None:
        self._layout = layout

    def run(self, program: Program) -> PassResult:
        result, calls = PassResult(), program.calls(aten.linear.default)
        inputs = QuantizedInputs(program)
        for node in calls:
            weight_node = bind_args(node)["weight"]
            if weight_node.target not in program.weights:
                result.decline(node.name, "its weight is computed")
                continue
            weight = program.weights[weight_node.target]
            reason, outputs = why_not(node, [weight_node], _ROWS), whole_shape(program, weight)[0]
            if reason is None and outputs < BLOCK:
                reason = f"{outputs} outputs, fewer than a block has"
            if reason is not None:
                result.decline(node.name, reason)
                continue
            kept = kept_of(program, weight)
            if kept is not None and kept.is_turned != weight.is_turned:
                result.decline(node.name, "the checkpoint's integers are of columns, not of rows")
                continue
            layout = None if kept is None else kept.layout
            if layout is None and self._layout is not None:
                layout = head_layout(self._layout) if node is calls[-1] else self._layout
            if layout is None:
                result.decline(node.name, "the checkpoint has no integers of its weight")
                continue
            blocks = inputs.add(weight_node, layout)
            if kept is not None and kept.columns is not None:
                order_columns(program, node, blocks, kept.columns)
            replace_linear(node, ops.linear_q, blocks, weight.shape[0], *layout.facts)
            inputs.drop(weight_node)
            result.rewrites += 1
        name_sums(program)
        return result
