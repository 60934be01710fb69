"""Read the program of an engine back, so that passes can go on from it without the model.

A stored graph has everything that passes need but values on fake tensors. Sizes of the inputs get
the symbols that they had when the model was traced: torch derives them from the names of the
inputs, so tracing nothing but these inputs gives them again. All other values are computed anew,
and compared with what the file says of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher

from specc.artifact.graph_io import describe_value, graph_from_json
from specc.artifact.kv_rows import holds_quantized
from specc.artifact.quantized_layout import QuantizedLayout
from specc.errors import EngineError
from specc.kernels import ops
from specc.passes.frontend.trace import export_flat
from specc.passes.program import (
    FEATURE_ROWS,
    FEATURES,
    HANDED_ON,
    RUNTIME_INPUTS,
    STATES,
    AttentionLayer,
    Program,
    Weight,
    bind_args,
    constant_key,
)
from specc.passes.rewrite.absorb_latent import values_in_keys
from specc.passes.rewrite.insert_block_mass import erase_block_mass
from specc.passes.rewrite.tree_recurrence import state_layer, with_states
from specc.speculation.taps import Taps

_GEOMETRY = "geometry"
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)


def read_program(
    data: Mapping[str, Any],
    constants: Mapping[str, Tensor],
    layers: Sequence[tuple[str, int]],
    keys: Sequence[str],
    state_layers: Sequence[str] = (),
) -> Program:
    """The program that `program_to_json` was given.

    Args:
        data: JSON of a program of flat tokens.
        constants: key in the weight file → value.
        layers: name and window of each attention layer, in the order of execution.
        keys: of weights and constants in the order in which the program had them, and in which
            its weight file has them; the graph has its inputs in another one.
        state_layers: name of each layer that keeps a state, in the order of execution.
    Raises:
        EngineError: it is no such program, or one of another torch.
    """
    graph_module = graph_from_json(data["graph"], keeps_names=True)
    erase_block_mass(graph_module.graph)
    try:
        program = Program(data["name"], graph_module, {}, {})
        _Values(program, data["inputs"], constants).compute()
        _add_layers(program, layers)
        calls = program.calls(ops.tree_conv, ops.tree_recurrence)
        named = zip(calls, state_layers, strict=True)
        program.state_layers += [state_layer(node, name) for node, name in named]
        _put_in_order(program, keys)
    except _MALFORMED as error:
        raise EngineError(
            f"a program that cannot be read: {type(error).__name__}: {error}",
            "one that this version of specc has written",
            "compile the engine again",
        ) from error
    return program


class _Inputs(nn.Module):
    """Takes what every model takes; what it computes is thrown away."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return (input_ids + position_ids).unsqueeze(-1).float()


class _Values:
    """The values of a program's nodes, inputs first."""

    def __init__(
        self, program: Program, inputs: Sequence[Mapping[str, Any]], constants: Mapping[str, Tensor]
    ) -> None:
        self._program, self._constants = program, constants
        self._entries = {entry["name"]: entry for entry in inputs}
        placeholders = export_flat(_Inputs()).graph_module.graph.find_nodes(op="placeholder")
        self._traced: dict[str, Any] = {node.target: node.meta["val"] for node in placeholders}
        self._like: Any = self._traced["tokens"]
        self._mode = self._like.fake_mode

    def compute(self) -> None:
        with self._mode, enable_python_dispatcher():
            for node in self._program.graph.nodes:
                if node.op == "output":
                    return
                node.meta["val"] = self._value(node)
                described = node.meta.pop("described", None)
                if (found := describe_value(node.meta["val"])) != described:
                    raise EngineError(
                        f"a program whose {node.name} is {found} here, and {described} in its file",
                        "one that this version of torch computes alike",
                        "compile the engine again",
                    )

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._input(str(node.target))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _input(self, name: str) -> Tensor:
        entry, program = self._entries[name], self._program
        kind = entry["kind"]
        if kind == "input":
            if name == FEATURE_ROWS:
                program.runtime_inputs += (FEATURE_ROWS,)
                program.row_inputs = (FEATURE_ROWS,)
                return self._like.new_empty((self._like.shape[0], 2), dtype=torch.int32)
            if name == STATES:
                program.runtime_inputs = with_states(program.runtime_inputs)
                lengths = self._traced["cache_len"]
                return lengths.new_empty((lengths.shape[0], 2))
            if name not in RUNTIME_INPUTS:
                raise ValueError(f"an input {name}")
            return self._traced[name]
        dtype = getattr(torch, entry["dtype"])
        shape = tuple(entry.get("blocks_of", entry["shape"]))
        if kind == "weight":
            program.weights[name] = weight_of(entry)
        elif kind == "constant":
            program.constants[name] = self._constants[entry["key"]]
        elif kind == "cache":
            if program.reads_features and name in (HANDED_ON, FEATURES):
                pass  # what they are, their names say
            elif "target_layer" in entry:
                program.target_caches[name] = (entry["target_layer"], entry["part"])
            elif name == FEATURES:
                program.taps = Taps(tuple(entry["boundaries"]), entry["is_last_normed"])
            else:
                program.caches[name] = (entry["layer"], entry["part"])
            shape = (*self._traced[_GEOMETRY].shape[:2], *shape)
        elif kind == "state":
            program.states[name] = (entry["layer"], entry["part"])
            sizes = self._traced[_GEOMETRY].shape[2:]
            shape = (*sizes[: 1 if entry["part"] == "state" else 2], *shape)
        else:
            raise ValueError(f"{name} is a {kind}")
        return self._like.new_empty(shape, dtype=dtype)


def weight_of(entry: Mapping[str, Any]) -> Weight:
    """The weight that an input of a stored program is bound to."""
    if "quantized_of" in entry:
        return _quantized(entry)
    shape = tuple(entry.get("blocks_of", entry["shape"]))
    return Weight(
        tuple(entry["key"].split("+")),
        getattr(torch, entry["dtype"]),
        shape,
        "blocks_of" in entry,
        is_turned=entry.get("is_turned", False),
    )


def _quantized(entry: Mapping[str, Any]) -> Weight:
    """A weight of which the file says how it is stored, and not what it was before that."""
    layout = QuantizedLayout.named(entry["layout"].removeprefix("blocks-"))
    parameters = tuple(entry["key"].removesuffix(f":{layout.name}").split("+"))
    shape = tuple(entry["quantized_of"])
    is_turned = entry.get("is_turned", False)
    return Weight(parameters, torch.float32, shape, quantized=layout, is_turned=is_turned)


def _add_layers(program: Program, layers: Sequence[tuple[str, int]]) -> None:
    calls = program.calls(ops.tree_attention)
    for node, (name, window) in zip(calls, layers, strict=True):
        bound = bind_args(node)
        queries, keys, values = (bound[name].meta["val"] for name in ("q", "k", "v"))
        heads, kv_heads, head_dim = (int(x) for x in (queries.shape[0], *keys.shape[::2]))
        own = 0 if values.shape[2] == head_dim else int(values.shape[2])
        sizes = name, heads, kv_heads, head_dim, window, bound["sink"], own
        beside = bound["sink_logits"] is not None
        has_slopes = bound["slopes"] is not None
        is_quantized = holds_quantized(bound["k_cache"].meta["val"].dtype)
        in_keys = not is_quantized and values_in_keys(node)
        extras = beside, bound["softcap"], has_slopes, bound["chunk"], in_keys
        layer = AttentionLayer(*sizes, *extras)
        program.layers.append(layer)


def _put_in_order(program: Program, keys: Sequence[str]) -> None:
    place = {key: number for number, key in enumerate(keys)}
    weights, constants = program.weights, program.constants
    program.weights = {n: weights[n] for n in sorted(weights, key=lambda n: place[weights[n].key])}
    program.constants = {
        n: constants[n] for n in sorted(constants, key=lambda n: place[constant_key(n)])
    }
