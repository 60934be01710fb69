"""Where a model's graph can be cut in two: between what is before and after one value.

A graph can be cut after a call if exactly one value that was computed up to there is read after it.
What follows from runtime inputs and constants alone (cosines and sines of positions, sizes) does
not count: whoever needs it computes it again. Of a transformer these values are those of its
residual stream, in serial blocks two a layer, and a few more at both ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from specc.errors import ConfigError, UnsupportedGraphError
from specc.kernels import ops
from specc.passes.program import MASS, Program, Weight, is_update

# what a layer attends by, and what keeps a state of its tokens
_ATTENDING = (ops.tree_attention, ops.attend, ops.masked_attention)
_KEEPING = (ops.tree_conv, ops.tree_recurrence)


@dataclass(frozen=True)
class CutPlace:
    """After one call of a graph.

    Args:
        value: the one value that is alive there: [..., tokens, ...].
        index: of the last call before the cut, in the order of all nodes of the graph. Calls up to
            it belong to the segment that ends here.
        weight_bytes: of the weights that calls up to it read, as the engine stores them. One that
            is read again after another place counts there, too.
    """

    value: fx.Node
    index: int
    weight_bytes: int


def follows_from_inputs(program: Program) -> set[fx.Node]:
    """Inputs of the runtime, constants, and calls that read nothing else.

    The sums that attention adds to, `mass`, are none of them: they change during a pass.
    """
    others = program.weights.keys() | program.caches.keys() | program.states.keys() | {MASS}
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            is_free = node.target not in others
        else:
            is_call = node.op == "call_function" and not is_update(node)
            is_free = is_call and found.issuperset(node.all_input_nodes)
        if is_free:
            found.add(node)
    return found


def cut_places(program: Program) -> list[CutPlace]:
    """All places where a program can be cut, in order; linear in its nodes.

    Args:
        program: after fusion, and after the cut for ranks where there is one.
    """
    return _scan(program)[0]


def _scan(program: Program) -> tuple[list[CutPlace], int]:
    """The places, and `weight_bytes` of the end."""
    free = follows_from_inputs(program)
    nodes = list(program.graph.nodes)
    last_use: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        last_use |= dict.fromkeys(node.all_input_nodes, index)
    alive: set[fx.Node] = set()
    places: list[CutPlace] = []
    read, seen = 0, set[str]()
    for index, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        alive -= {item for item in node.all_input_nodes if last_use[item] <= index}
        for weight in _weights_of(program, node):
            if weight.key not in seen:
                seen.add(weight.key)
                count = torch.Size(weight.stored_shape).numel()
                read += count * weight.stored_dtype.itemsize
        if node not in free and last_use.get(node, -1) > index:
            alive.add(node)
        if len(alive) != 1:
            continue
        (value,) = alive
        is_new = not places or places[-1].value is not value
        if is_new and _is_of_tokens(program, value) and not _is_result(value):
            places.append(CutPlace(value, index, read))
            seen.clear()
    return places, read


def layer_places(program: Program) -> list[CutPlace]:
    """Where each layer of a model begins, and where the last one ends.

    Segments between them are what comes before the first layer, each layer with its one attention,
    or with what it has beside or in place of one that keeps states, and what comes after the last
    one.

    Raises:
        UnsupportedGraphError: two attentions without a place between them.
    """
    places = stream_places(program)
    of_states, calls = (_call_places(program, kinds) for kinds in (_KEEPING, _ATTENDING))

    def start_of(call: int) -> int:
        return max((i for i, place in enumerate(places) if place.index < call), default=-1)

    attended = [start_of(call) for call in calls]
    for number, (before, start) in enumerate(itertools.pairwise([-1, *attended])):
        if start <= before:
            raise _refusal(program, number)
    starts = sorted({*attended, *map(start_of, of_states)})
    counts = [second - first for first, second in itertools.pairwise(starts)]
    # the last layer goes through as many values as the one before it
    end = min(starts[-1] + (counts[-1] if counts else 1), len(places) - 1)
    return [places[i] for i in dict.fromkeys([*starts, end])]


def stage_places(program: Program, num_stages: int) -> list[CutPlace]:
    """The num_stages - 1 places that make stages whose weights are nearest to equal.

    Nearest: the sum of the squares of their bytes is the least that there is.

    Raises:
        ConfigError: fewer places than that.
        UnsupportedGraphError: no residual stream.
    """
    places = stream_places(program)
    if not 1 <= num_stages <= len(places) + 1:
        raise ConfigError(
            f"{num_stages} stages of {program.name}, which has {len(places)} places to be cut at",
            f"1 to {len(places) + 1} stages",
            "choose fewer stages",
        )
    ends = [*(place.weight_bytes for place in places), _scan(program)[1]]
    # of stages that end at place j: the least sum of squares, and the places that they end at
    best: dict[int, tuple[int, tuple[int, ...]]] = {-1: (0, ())}
    for stage in range(1, num_stages + 1):
        last = [len(places)] if stage == num_stages else range(len(places))
        best = {
            j: min(
                (cost + (ends[j] - (ends[i] if i >= 0 else 0)) ** 2, (*cuts, j))
                for i, (cost, cuts) in best.items()
                if i < j
            )
            for j in last
            if any(i < j for i in best)
        }
    *cuts, _ = best[len(places)][1]
    return [places[j] for j in cuts]


def stream_places(program: Program) -> list[CutPlace]:
    """Places whose value is one of the residual stream: of the shape that the first layer reads.

    Raises:
        UnsupportedGraphError: no place before the first attention, or whatever is in its place.
    """
    places, calls = cut_places(program), _call_places(program, (*_ATTENDING, *_KEEPING))
    before = [place for place in places if calls and place.index < calls[0]]
    if not before:
        raise _refusal(program, 0)
    like = _described(before[-1].value)
    return [place for place in places if _described(place.value) == like]


def _call_places(program: Program, kinds: Sequence[object]) -> list[int]:
    index = {node: i for i, node in enumerate(program.graph.nodes)}
    return sorted(index[node] for node in program.calls(*kinds))


def _weights_of(program: Program, node: fx.Node) -> Iterator[Weight]:
    for item in node.all_input_nodes:
        if item.op == "placeholder" and item.target in program.weights:
            yield program.weights[item.target]


def _is_of_tokens(program: Program, node: fx.Node) -> bool:
    """Whether a value has one row for each token of the pass, in their order."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    tokens = str(program.placeholder("tokens").meta["val"].shape[0])
    return [str(n) for n in value.shape if not isinstance(n, int)] == [tokens]


def _is_result(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _described(node: fx.Node) -> tuple[str, str]:
    # sizes may be symbols: comparing them would guard on them
    value = node.meta["val"]
    return str(value.dtype), str(tuple(value.shape))


def _refusal(program: Program, layer: int) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"{program.name}: no place to cut before the attention of layer {layer}",
        "one value between two layers, which nothing leads past",
        "leave out what asks for segments: this model cannot be cut into them",
    )
