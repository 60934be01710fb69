"""The residual stream of a model: values that all paths from tokens to logits go through.

In the graph of a model without names, a value is on every path from the tokens to the output if no
edge leads past it: it dominates the output. Of these, those of the stream's shape are where layers
begin and end; a serial block (x + attention, then x + feed-forward) also has one in its middle.
What follows from positions or sizes alone comes from the side and counts as no path.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor, fx

from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.passes.program import Program, upstream


@dataclass(frozen=True)
class LayerRegion:
    """What is computed between two values of the stream, with one attention or recurrence in it.

    Args:
        start: the value that it reads.
        end: the value that takes its place; that of another layer's start, but for the last.
        attention: the first call inside that mixes tokens.
    """

    start: fx.Node
    end: fx.Node
    attention: fx.Node


def stream_values(program: Program) -> list[fx.Node]:
    """Tensors that all paths from tokens to logits go through, in order, of whatever shape."""
    (output,) = program.graph.find_nodes(op="output")
    reaches = upstream(output.args[0])  # type: ignore[arg-type]
    tokens = program.placeholder("tokens")
    found = {tokens}
    for node in program.graph.nodes:
        is_tensor = isinstance(node.meta.get("val"), Tensor)
        if is_tensor and node in reaches and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    order = [node for node in program.graph.nodes if node in found]
    place = {node: i for i, node in enumerate(order)}
    values, furthest = [], 0
    for i, node in enumerate(order):
        if furthest <= i:
            values.append(node)
        furthest = max([furthest, *(place[user] for user in node.users if user in place)])
    return values


# of a layer that has one of these, all calls that mix tokens are one layer's
_OVER_STATES = (ops.tree_conv, ops.tree_recurrence)
# calls that mix tokens
MIXERS = (ops.tree_attention, *_OVER_STATES)
_SKIPPED = "leave out --draft self:layers and self:skip: this model's layers cannot be skipped"


def layer_regions(program: Program, do: str = _SKIPPED) -> list[LayerRegion]:
    """The layers of a program, one for each attention, in the order of execution.

    A layer begins at the last value of the stream before its attention, and ends where the next one
    begins; the last one ends after as many values as the one before it. A recurrence, with the
    convolution before it and attention beside it, makes a layer likewise.

    Args:
        program: after its attention was rewritten.
        do: what a refusal advises.
    Raises:
        UnsupportedGraphError: no such values between two attentions, or values that lead past all.
    """
    calls = program.calls(*MIXERS)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    values = stream_values(program)
    before = [node for node in values if calls and order[node] < order[calls[0]]]
    if not before:
        raise _refusal(
            program, "no value that all of it goes through before the first attention", do
        )
    like = before[-1].meta["val"]
    values = [node for node in values if _is_like(node.meta["val"], like)]
    starts = [
        max((i for i, node in enumerate(values) if order[node] < order[call]), default=-1)
        for call in calls
    ]
    beside = set()
    for i, (first, second, call) in enumerate(zip(starts, starts[1:], calls[1:], strict=False)):
        if second > first:
            continue
        if second < first or not any(x.target in _OVER_STATES for x in calls[i : i + 2]):
            raise _refusal(
                program, f"no value of the stream between {call.name} and the one before", do
            )
        beside.add(call)
    starts = [start for start, call in zip(starts, calls, strict=True) if call not in beside]
    calls = [call for call in calls if call not in beside]
    counts = [second - first for first, second in itertools.pairwise(starts)]
    if program.state_layers and len(set(counts)) > 1:
        # blocks without a mixer of tokens are layers, too (Nemotron-H): which, no graph says
        raise _refusal(program, "layers that add to the stream once, and others twice", do)
    ends = [*starts[1:], starts[-1] + (counts[-1] if counts else 1)]
    if ends[-1] >= len(values):
        raise _refusal(program, "a last layer that is another than the one before it", do)
    return [
        LayerRegion(values[start], values[end], call)
        for start, end, call in zip(starts, ends, calls, strict=True)
    ]


def _is_like(value: Tensor, other: Tensor) -> bool:
    # sizes may be symbols: comparing them would guard on them
    return value.dtype == other.dtype and str(tuple(value.shape)) == str(tuple(other.shape))


def _refusal(program: Program, found: str, do: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"layers of {program.name}: {found}",
        "a residual stream: blocks that add to one value, which nothing leads past",
        do,
    )
