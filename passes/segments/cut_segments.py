"""Cut a model's program into segments, programs that run one after another.

    segments = cut_segments(program, layer_places(program))     # a layer each, for offloading
    segments = cut_segments(program, stage_places(program, 2))  # two stages, for a pipeline

Of n places n + 1 segments. Each is a `Program` like any other, which passes may lower:

- inputs, in order: weights `w0` … and constants `c0` … that it reads, in the order in which it
  first reads them; all inputs of the runtime that the whole program has (`tokens`, `positions`, …,
  also those that it does not read); then, of all but the first, `hidden`; then the caches
  `k_cache_0`, `v_cache_0`, … of its layers, numbered from 0, and `state_0`, `rows_0`, … of its
  layers that keep states, numbered likewise;
- `hidden` is the output of the segment before it: the one value that was alive at the place;
- its output is the value at its own place, and of the last one the logits.

What follows from inputs of the runtime and constants alone, such as cosines and sines of positions,
each segment computes again. All names are made from the places of nodes in a segment, so that
segments of equal layers are equal, to the letter, but for the keys of their weights and the numbers
of their layers: `Segment.kind` is the number of the first segment that is the same. Only one of
each kind has to be compiled.

What a runtime needs is `segments_to_json`: kinds, each as a `program.json`, and for each segment
its kind, the keys of its weights and constants in the order of the kind's inputs, and the numbers
of its layers in the whole model, of those that keep states apart from the others.
`specc.artifact.segments` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from specc.artifact.segments import SCHEMA_VERSION
from specc.passes.program import HIDDEN, Program, constant_key
from specc.passes.program_json import program_to_json
from specc.passes.segments.places import CutPlace, follows_from_inputs


@dataclass
class Segment:
    """A part of a model.

    Args:
        number: of the segment, from 0.
        program: see above; named after the whole one and its number.
        layers: number in the whole model of each layer whose caches it has.
        state_layers: likewise, among those that keep states.
        keys: in the engine's weight file, of its weights and constants, in their order.
        kind: number of the first segment that is equal but for keys and layers.
    """

    number: int
    program: Program
    layers: tuple[int, ...]
    state_layers: tuple[int, ...]
    keys: tuple[str, ...]
    kind: int

    @property
    def is_first(self) -> bool:
        """Whether it begins with the tokens: it takes no hidden value."""
        return HIDDEN not in self.program.runtime_inputs

    @property
    def is_last(self) -> bool:
        """Whether its output is the logits."""
        return not self.program.ends_hidden

    @property
    def weight_bytes(self) -> int:
        """Of its weights and constants, as the engine stores them; tied ones count once."""
        program = self.program
        found = {w.key: (w.stored_shape, w.stored_dtype) for w in program.weights.values()}
        sizes = (torch.Size(shape).numel() * dtype.itemsize for shape, dtype in found.values())
        return sum(sizes) + sum(value.nbytes for value in program.constants.values())


def cut_segments(program: Program, places: Sequence[CutPlace]) -> list[Segment]:
    """Cut a program; it is left as it is.

    Args:
        program: whose inputs and values have their `meta["val"]`.
        places: of `cut_places` of this program, in order.
    Returns:
        one segment more than places.
    Raises:
        ValueError: a place where something else is alive, or places out of order.
    """
    nodes = list(program.graph.nodes)
    free = follows_from_inputs(program)
    (output,) = program.graph.find_nodes(op="output")
    ends = [*((place.index, place.value) for place in places), (len(nodes), output.args[0])]
    segments: list[Segment] = []
    kinds: dict[str, int] = {}
    begin, hidden = 0, None
    for number, (end, value) in enumerate(ends):
        if end < begin:
            raise ValueError(f"place {number} is before the one before it")
        calls = [n for n in nodes[begin : end + 1] if n.op == "call_function" and n not in free]
        part = _Part(program, f"{program.name}_{number}", hidden, value, value is output.args[0])
        made = part.build(calls, free)
        kind = kinds.setdefault(_text(made), number)
        segments.append(Segment(number, made, part.layers, part.state_layers, part.keys, kind))
        begin, hidden = end + 1, value
    return segments


def segments_to_json(segments: Sequence[Segment]) -> dict[str, Any]:
    """Segments as a runtime reads them; see the module. Kinds are numbered in order of use."""
    order = {kind: i for i, kind in enumerate(dict.fromkeys(item.kind for item in segments))}
    return {
        "schema_version": SCHEMA_VERSION,
        "name": segments[0].program.name.rpartition("_")[0],
        "kinds": [program_to_json(segments[kind].program) for kind in order],
        "segments": [
            {"kind": order[item.kind], "keys": list(item.keys), "layers": list(item.layers)}
            | ({"states": list(item.state_layers)} if item.state_layers else {})
            for item in segments
        ],
    }


def _text(program: Program) -> str:
    """All of a segment but for keys, layers and its name."""
    data = program_to_json(program)
    inputs = [{k: v for k, v in entry.items() if k != "key"} for entry in data["inputs"]]
    return json.dumps([inputs, data["graph"]], sort_keys=True)


class _Part:
    """One segment in the making: a new graph, and the nodes of the whole one that are in it."""

    def __init__(
        self, whole: Program, name: str, hidden: fx.Node | None, value: fx.Node, is_last: bool
    ) -> None:
        self._whole, self._hidden, self._value = whole, hidden, value
        self._new: dict[fx.Node, fx.Node] = {}
        self.layers: tuple[int, ...] = ()
        self.state_layers: tuple[int, ...] = ()
        self.keys: tuple[str, ...] = ()
        inputs = whole.runtime_inputs + ((HIDDEN,) if hidden is not None else ())
        module = fx.GraphModule(torch.nn.Module(), fx.Graph())
        self._program = Program(
            name, module, {}, {}, runtime_inputs=inputs, shard=whole.shard, ends_hidden=not is_last
        )

    def build(self, calls: Sequence[fx.Node], free: set[fx.Node]) -> Program:
        """Copy calls, and before them what they read that follows from inputs alone."""
        whole, graph = self._whole, self._program.graph
        wanted = [*self._read_again(calls, free), *calls]
        read = [item for node in wanted for item in node.all_input_nodes]
        inputs = [item for item in dict.fromkeys(read) if item.op == "placeholder"]
        for kind, letter in ((whole.weights, "w"), (whole.constants, "c")):
            for i, node in enumerate(item for item in inputs if item.target in kind):
                self._placeholder(node, f"{letter}{i}")
        for name in whole.runtime_inputs:
            self._placeholder(whole.placeholder(name), name)
        if self._hidden is not None:
            self._placeholder(self._hidden, HIDDEN)
        self._caches(inputs)
        self._states(inputs)
        for node in wanted:
            self._copy(node)
        if self._value not in self._new:
            raise ValueError(f"{self._program.name} does not compute {self._value.name}")
        result = graph.output(self._new[self._value])
        result.meta = {"val": self._value.meta["val"]}
        self._program.graph_module.recompile()
        graph.lint()
        return self._program

    def _read_again(self, calls: Sequence[fx.Node], free: set[fx.Node]) -> list[fx.Node]:
        """Calls that other segments may make too, in the order in which they are first needed.

        Their order in the whole graph is another in the segment that was traced first.
        """
        found: dict[fx.Node, None] = {}
        stack = [item for node in calls for item in node.all_input_nodes][::-1]
        while stack:
            node = stack[-1]
            is_known = node in found or node not in free or node.op != "call_function"
            missing = [item for item in node.all_input_nodes if item.op == "call_function"]
            missing = [] if is_known else [item for item in missing if item not in found]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if not is_known:
                found[node] = None
        return list(found)

    def _placeholder(self, node: fx.Node, name: str) -> None:
        whole, made = self._whole, self._program
        new = made.graph.placeholder(name)
        new.meta = {"val": node.meta["val"]}
        self._new[node] = new
        if node.op != "placeholder":
            return  # the hidden value, which a call of another segment makes
        if node.target in whole.weights:
            made.weights[name] = whole.weights[node.target]
            self.keys += (made.weights[name].key,)
        elif node.target in whole.constants:
            made.constants[name] = whole.constants[node.target]
            key = whole.constant_keys.get(node.target, constant_key(node.target))
            made.constant_keys[name] = key
            self.keys += (key,)

    def _caches(self, inputs: Sequence[fx.Node]) -> None:
        """Caches of the layers that are read, both of each, in the order of layers."""
        whole, made = self._whole, self._program
        caches = {whole.caches[n.target]: n for n in inputs if n.target in whole.caches}
        self.layers = tuple(sorted({layer for layer, _ in caches}))
        for (layer, part), node in sorted(caches.items()):
            local = self.layers.index(layer)
            name = f"{part}_cache_{local}"
            self._placeholder(node, name)
            made.caches[name] = (local, part)
        # a program that skips layers has caches under the numbers of the whole model's
        numbers = sorted({layer for layer, _ in whole.caches.values()})
        made.layers = [whole.layers[numbers.index(layer)] for layer in self.layers]

    def _states(self, inputs: Sequence[fx.Node]) -> None:
        """States and replay rows of the layers that keep some, as `_caches`."""
        whole, made = self._whole, self._program
        slabs = {whole.states[n.target]: n for n in inputs if n.target in whole.states}
        self.state_layers = tuple(sorted({layer for layer, _ in slabs}))
        for local, layer in enumerate(self.state_layers):
            for part in ("state", "rows"):
                name = f"{part}_{local}"
                self._placeholder(slabs[layer, part], name)
                made.states[name] = (local, part)
        made.state_layers = [whole.state_layers[layer] for layer in self.state_layers]

    def _copy(self, node: fx.Node) -> None:
        missing = [item for item in node.all_input_nodes if item not in self._new]
        if missing:
            raise ValueError(
                f"{self._program.name} reads {missing[0].name}, which a segment before it computes"
            )
        args = fx.map_arg(node.args, self._new.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._new.__getitem__)
        # no name: fx makes one of the operator and its number, the same in equal segments
        new = self._program.graph.create_node("call_function", node.target, args, kwargs)
        new.meta = dict(node.meta)
        self._new[node] = new
