"""Let passes of a target keep hidden states of its tokens, which drafts read."""

from __future__ import annotations

import torch
from torch import fx

from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.facts import attention_is_a_tree, features_are_written, logits_are_selected
from specc.passes.program import (
    FEATURES,
    Program,
    add_placeholder,
    emit_call,
    last_placeholder,
    upstream,
)
from specc.passes.residual import layer_regions
from specc.speculation.taps import Taps

aten = torch.ops.aten
# what layers have, and norms have not
_PRODUCTS = (
    aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default, ops.grouped_mm,
    ops.tree_attention,
)  # fmt: skip
_SCALINGS = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)
_DO = "choose another draft: this model's hidden states cannot be read"


class TapFeatures(Pass):
    """`specc.write_rows` of what the residual stream is at some boundaries, side by side.

    The slab that it writes to is one more input, after the caches: paged as these are, by the same
    table, a row for each token. Programs so keep their one output, and rows of what was accepted
    move, are shared, and are computed again with those of K and V. Boundaries are found from the
    graph alone (`specc.passes.residual`).
    """

    requires = (attention_is_a_tree, logits_are_selected)
    ensures = (attention_is_a_tree, features_are_written)

    def __init__(self, taps: Taps) -> None:
        self._taps = taps

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        graph = program.graph
        tapped = tapped_values(program, self._taps)
        cache = program.placeholder(next(iter(program.caches))).meta["val"]
        (output,) = graph.find_nodes(op="output")
        # last: what reads a sum before the product of its norm is done keeps the two apart
        with graph.inserting_before(output):
            rows = [_rows(graph, node, cache.dtype) for node in tapped]
            row = rows[0] if len(rows) == 1 else emit_call(graph, aten.cat.default, rows, -1)
        width = int(row.meta["val"].shape[1])
        value = cache.new_empty(*cache.shape[:2], width)
        slab = add_placeholder(program, FEATURES, value, last_placeholder(graph))
        inputs = [program.placeholder(name) for name in ("q_start", "slot", "block_table")]
        with graph.inserting_before(output):
            emit_call(graph, ops.write_rows, row, slab, *inputs)
        program.taps = self._taps
        result.rewrites += len(tapped)
        return result


def tapped_values(program: Program, taps: Taps) -> list[fx.Node]:
    """The value at each boundary, [1, Nt, H] or [Nt, H].

    Raises:
        ConfigError: a boundary that a target of so many layers does not have.
        UnsupportedGraphError: the graph does not say which value one is.
    """
    if taps == Taps((len(program.layers),), True) and not program.state_layers:
        # whatever leads past layers: of the last one nothing but what is projected counts
        return [_normed(program)]
    regions = layer_regions(program, _DO)
    taps.check(len(regions))
    values = [region.start for region in regions]
    num_layers = len(regions)
    if num_layers not in taps.boundaries:
        return [values[b] for b in taps.boundaries]
    normed, end = _normed(program, values[-1]), regions[-1].end
    if taps.is_last_normed:
        values.append(normed)
    elif num_layers == 1:
        # where a layer ends is known from the one before it
        raise _refusal(program, "a single layer, whose end is not known without another")
    elif any(node.target in _PRODUCTS for node in upstream(normed) - upstream(end)):
        raise _refusal(program, f"a product between {end.name} and the final norm's output")
    else:
        values.append(end)
    return [values[b] for b in taps.boundaries]


def _normed(program: Program, like: fx.Node | None = None) -> fx.Node:
    """What logits are projected from: the value that `logit_rows` chooses rows of.

    A number that it is multiplied with before that belongs to the projection (MiniCPM 3).

    Args:
        like: a value of the residual stream, where it is known.
    """
    users = list(program.placeholder("logit_rows").users)
    chosen = users[0].args[0] if len(users) == 1 else None
    while isinstance(chosen, fx.Node) and chosen.target in _SCALINGS:
        if isinstance(chosen.args[1], fx.Node):
            break
        chosen = chosen.args[0]
    is_other = like is not None and chosen is not None and _width(chosen) != _width(like)
    if not isinstance(chosen, fx.Node) or is_other:
        raise _refusal(program, "logits that no projection of the final norm's output gives")
    return chosen


def _width(node: fx.Node) -> str:
    return str(node.meta["val"].shape[-1])


def _rows(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """[Nt, H] in the type of the model."""
    value = node.meta["val"]
    if value.dim() == 3 and isinstance(value.shape[0], int) and value.shape[0] == 1:
        node = emit_call(graph, aten.squeeze.dim, node, 0)
    elif value.dim() != 2:
        raise UnsupportedGraphError(
            f"hidden states of shape {list(value.shape)}", "[1, tokens, columns]", _DO
        )
    if value.dtype != dtype:
        node = emit_call(graph, aten.to.dtype, node, dtype)
    return node


def _refusal(program: Program, found: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"taps of {program.name}: {found}",
        "a residual stream through layers of one make, then a norm and a projection",
        _DO,
    )
