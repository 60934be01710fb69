"""Trace a model with torch.export over flat tokens; no weight is read."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx.config
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.overrides import TorchFunctionMode

from specc.errors import NotCausalLMError, SpeccError, UnsupportedGraphError
from specc.passes.frontend.attention_function import registered_attention
from specc.passes.frontend.buffer_values import buffer_values
from specc.passes.frontend.recurrence_functions import registered_recurrences
from specc.passes.frontend.repeat_layers import equal_layers_once
from specc.passes.frontend.rotary import constant_frequencies
from specc.passes.program import RUNTIME_INPUTS, Program, RowInput, Weight

_WRAPPED = "model"
_NUMBER = re.compile(r"_\d+$")


class _KeepsValues(TorchFunctionMode):
    """Keep what a forward makes of plain numbers, also on the meta device, which has no values.

    Indices that are a list of neighbouring places, `x[..., [-2], :]`, are a slice: torch makes a
    tensor of the list, on the device of `x`. A number, `torch.tensor(0.95, device=x.device)`, is on
    the CPU, whose single values meet tensors of any device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], tuple(map(_as_slice, args[1])))
        elif func is torch.tensor and args and isinstance(args[0], int | float):
            given = {key: value for key, value in given.items() if key != "device"}
            given["device"] = "cpu"
        return func(*args, **given)


def _as_slice(index: Any) -> Any:
    is_list = isinstance(index, list) and len(index) > 0
    if not is_list or not all(type(place) is int for place in index):
        return index
    first, last = index[0], index[-1]
    is_run = index == list(range(first, last + 1)) and (first < 0) == (last < 0)
    return slice(first, None if last == -1 else last + 1) if is_run else index


class ModelCall(nn.Module):
    """Call a model with tokens and positions [B, T] in the way that its forward takes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        # some hand it on among others, and would fill a cache because of their configuration
        hands_on = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        config = getattr(model, "config", None)
        # of a model that takes images, too, it is that of its language model
        configs = (config, getattr(config, "text_config", None))
        is_known = hands_on and any(hasattr(item, "use_cache") for item in configs)
        self.use_cache = {"use_cache": False} if "use_cache" in parameters or is_known else {}
        self.names = [name for name in ("input_ids", "position_ids") if name in parameters]

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        inputs = {"input_ids": tokens, "position_ids": positions}
        with _KeepsValues():
            if self.names:
                named = {name: inputs[name] for name in self.names}
                output = self.model(**named, **self.use_cache)
            else:
                output = self.model(*inputs.values())
        return getattr(output, "logits", output)


class _FlatTokens(ModelCall):
    """Present a model of [1, T] tokens as one of flat tokens, with all runtime inputs.

    The inputs that the model does not know stay unused placeholders, so that later passes find
    them with symbolic shapes. `geometry` lends caches and states their symbolic sizes.
    """

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        q_start: Tensor,
        slot: Tensor,
        cache_len: Tensor,
        ancestors: Tensor,
        block_table: Tensor,
        logit_rows: Tensor,
        geometry: Tensor,
    ) -> Tensor:
        return self.logits(tokens.unsqueeze(0), positions.unsqueeze(0))


class _FlatRows(nn.Module):
    """The same of a model that takes more rows [1, T, D], and may hand on one beside its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        q_start: Tensor,
        slot: Tensor,
        cache_len: Tensor,
        ancestors: Tensor,
        block_table: Tensor,
        logit_rows: Tensor,
        geometry: Tensor,
        rows: dict[str, Tensor],
    ) -> Tensor | tuple[Tensor, Tensor]:
        others = {name: row.unsqueeze(0) for name, row in rows.items()}
        found = self.model(tokens.unsqueeze(0), positions.unsqueeze(0), **others)
        if isinstance(found, Tensor):
            return found
        handed_on, logits = found
        return logits, handed_on


def export_flat(model: nn.Module, rows: Sequence[RowInput] = ()) -> ExportedProgram:
    """Export `model(input_ids [1, T], position_ids [1, T]) -> logits [1, T, V]`, flat.

    Args:
        rows: what else it takes, see `trace`.
    Raises:
        NotCausalLMError: the model does not take these inputs or return logits of this shape.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    i64: dict[str, Any] = {"dtype": torch.int64, "device": device}
    i32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    inputs = {
        "tokens": torch.zeros(8, **i64),
        "positions": torch.arange(8, **i64),
        "q_start": torch.zeros(4, **i32),
        "slot": torch.zeros(8, **i32),
        "cache_len": torch.zeros(3, **i32),
        "ancestors": torch.zeros(8, 2, **i64),
        "block_table": torch.zeros(3, 5, **i32),
        "logit_rows": torch.zeros(6, **i64),
        "geometry": torch.zeros(7, 9, 5, 6, **i32),
    }
    batch, tokens = Dim("batch", min=1, max=4096), Dim("tokens", min=1, max=1 << 20)
    dynamic = {
        "tokens": {0: tokens},
        "positions": {0: tokens},
        "q_start": {0: Dim("starts", min=2, max=4097)},
        # own dimensions, so that sizes in the graph are read off tokens and positions alone
        "slot": {0: Dim("slots", min=1, max=1 << 20)},
        "cache_len": {0: batch},
        "ancestors": {0: Dim("ancestor_rows", min=1, max=1 << 20), 1: Dim("words", min=1, max=64)},
        "block_table": {
            0: Dim("tables", min=1, max=4096),
            1: Dim("row_blocks", min=1, max=1 << 20),
        },
        "logit_rows": {0: Dim("rows", min=1, max=1 << 20)},
        "geometry": {
            0: Dim("blocks", min=1),
            1: Dim("block_size", min=1),
            2: Dim("states", min=1),
            3: Dim("state_rows", min=1),
        },
    }
    if not rows:
        exported = export(_FlatTokens(model), model, inputs, dynamic)
    else:
        more = {
            row.name: torch.zeros(8, row.columns, dtype=row.dtype, device=device) for row in rows
        }
        by_row: dict[str, Any] = {"rows": {row.name: {0: tokens} for row in rows}}
        exported = export(_FlatRows(model), model, inputs | {"rows": more}, dynamic | by_row)
        for row in rows:
            # torch calls an item of a dictionary by both names
            place = f"rows_{row.name}"
            (node,) = exported.graph_module.graph.find_nodes(op="placeholder", target=place)
            node.target = row.name
    require_logits(exported, type(model).__name__, batch="1")
    return exported


def export(
    wrapper: nn.Module, model: nn.Module, inputs: dict[str, Any], dynamic: dict[str, Any]
) -> ExportedProgram:
    """Export a wrapped model for inputs of these dynamic sizes.

    Raises:
        NotCausalLMError: the model does not take tokens and positions.
        UnsupportedGraphError: torch cannot trace it.
    """
    try:
        with (
            warnings.catch_warnings(),
            torch.no_grad(),
            _without_what_nobody_reads(),
            equal_layers_once(model),
        ):
            warnings.simplefilter("ignore")
            return torch.export.export(
                wrapper.eval(),
                (),
                inputs,
                dynamic_shapes=dynamic,
                strict=False,
                # torch 2.11 otherwise guards on comparisons of strides that hold for any length
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except TypeError as error:
        raise NotCausalLMError(
            f"{type(model).__name__}.forward cannot be called: {error}",
            "a module that maps (input_ids, position_ids) to logits",
            "pass a causal language model, or wrap yours in such a module",
        ) from error
    except SpeccError:
        raise
    except Exception as error:  # whatever a forward makes of sizes that are no numbers
        raise UnsupportedGraphError(
            f"{type(model).__name__} cannot be traced: {_first_line(error)}",
            "a forward that torch.export can trace with a dynamic number of tokens",
            "report the architecture with this message",
        ) from error


def _first_line(error: Exception) -> str:
    """What an error says, which may be nothing; an assertion's name is all that it has."""
    lines = str(error).strip().splitlines()
    kind = type(error).__name__
    if not lines:
        return kind
    is_told = isinstance(error, torch._dynamo.exc.UserError | RuntimeError)
    return lines[0] if is_told else f"{kind}: {lines[0]}"


@contextlib.contextmanager
def _without_what_nobody_reads() -> Iterator[None]:
    """Have torch write no Python of graphs that never run, and no stack trace of a node.

    Passes and errors name modules (`nn_module_stack`), which nodes keep. Both together take
    about a fifth of a trace's time.
    """
    settings: Any = torch.fx.config
    name = "do_not_emit_stack_traces"
    # not in torch 2.11
    before = getattr(settings, name, None)
    try:
        if before is not None:
            setattr(settings, name, True)
        with _use_lazy_graph_module(True):
            yield
    finally:
        if before is not None:
            setattr(settings, name, before)


def require_logits(exported: ExportedProgram, name: str, batch: str) -> None:
    """Refuse an output that is not one row of logits for each token."""
    graph = exported.graph_module.graph
    (output,) = graph.find_nodes(op="output")
    (tokens,) = (n for n in graph.find_nodes(op="placeholder") if n.target == "tokens")
    needed = (batch, str(tokens.meta["val"].shape[-1]))
    node = output.args[0][0]
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point():
        shape = tuple(map(str, value.shape))
        if shape[:2] == needed and isinstance(value.shape[2], int):
            return
    found = "no tensor"
    if isinstance(value, Tensor):
        found = f"{value.dtype} [{', '.join(map(str, value.shape))}]"
    raise NotCausalLMError(
        f"{name} returns {found}",
        f"floating-point logits [{batch}, tokens, vocabulary], of every token",
        "pass a causal language model",
    )


def trace(
    model: nn.Module,
    name: str,
    rope_length: int | None = None,
    rows: Sequence[RowInput] = (),
    hands_on: bool = False,
) -> Program:
    """Trace a model into a Program whose weights are placeholders with names of parameters.

    Args:
        rope_length: see `rotary.constant_length`.
        rows: what its forward takes besides tokens and positions, each [1, T, columns].
        hands_on: it returns (row that each token hands on [1, T, D], logits [1, T, V]), and the
            program has both outputs, see `Program.handed_on`.
    """
    with (
        registered_attention(model),
        registered_recurrences(model),
        constant_frequencies(model, rope_length) as frequencies,
    ):
        exported = export_flat(model, rows)
        names = tuple(row.name for row in rows)
        inputs = RUNTIME_INPUTS + names
        program = to_program(exported, model, name, inputs, frequencies, hands_on)
        program.row_inputs = names
        return program


def to_program(
    exported: ExportedProgram,
    model: nn.Module,
    name: str,
    runtime_inputs: tuple[str, ...],
    frequencies: Mapping[str, Tensor] = MappingProxyType({}),
    hands_on: bool = False,
) -> Program:
    """The Program of an exported model, with the values of its constants and buffers.

    Args:
        frequencies: path of a buffer → what it is in the program, see `constant_frequencies`.
        hands_on: it has a second output, see `Program.handed_on`.
    Raises:
        UnsupportedGraphError: a buffer has no value, or frequencies are of no use.
    """
    graph_module = exported.graph_module
    weights: dict[str, Weight] = {}
    constants: dict[str, Tensor] = {}
    buffers: dict[str, str] = {}
    for spec in exported.graph_signature.input_specs:
        placeholder = spec.arg.name
        if _is_stored(spec, exported):
            value = exported.state_dict[spec.target]
            path = spec.target.removeprefix(f"{_WRAPPED}.")
            weights[placeholder] = Weight((path,), value.dtype, tuple(value.shape))
        elif spec.kind is InputKind.BUFFER:
            buffers[placeholder] = spec.target.removeprefix(f"{_WRAPPED}.")
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[placeholder] = exported.constants[spec.target]
    program = Program(name, graph_module, weights, constants, runtime_inputs=runtime_inputs)
    _drop_unused_inputs(program, buffers)
    if lost := [placeholder for placeholder, value in constants.items() if value.is_meta]:
        raise UnsupportedGraphError(
            f"{type(model).__name__}: the forward makes tensor {lost[0]} of numbers, on the device"
            " of its input, which has no values",
            "a forward that computes with its inputs and its parameters",
            "pass the loaded module to specc.compile instead of its path",
        )
    if unread := frequencies.keys() - set(buffers.values()):
        raise UnsupportedGraphError(
            f"rotary frequencies that are not those of {min(unread)}",
            "a model whose rotary embeddings are those of transformers",
            "report the architecture with this message",
        )
    values = buffer_values(model, set(buffers.values()) - frequencies.keys())
    for path, value in frequencies.items():
        values[path] = value.to(model.get_buffer(path).dtype)
    program.constants |= {placeholder: values[path] for placeholder, path in buffers.items()}
    (output,) = graph_module.graph.find_nodes(op="output")
    results = tuple(output.args[0])
    output.args = (results[:2] if hands_on else results[0],)
    _number_calls(graph_module.graph)
    graph_module.graph.lint()
    return program


def _is_stored(spec: InputSpec, exported: ExportedProgram) -> bool:
    """Whether an input is a tensor of checkpoints: a parameter, or a buffer that is saved.

    What `_init_weights` puts into such a buffer (the correction bias of a router, say) is where
    training starts from.
    """
    if spec.kind is InputKind.BUFFER and spec.persistent:
        return exported.state_dict[spec.target].is_floating_point()
    return spec.kind is InputKind.PARAMETER


def _number_calls(graph: fx.Graph) -> None:
    """Name calls by what they call and how many came before, whatever else was traced meanwhile.

    torch counts sizes that nothing reads, which it computes or not depending on earlier traces.
    """
    names = fx.graph._Namespace()
    for node in graph.nodes:
        is_call = node.op == "call_function"
        node.name = names.create_name(_NUMBER.sub("", node.name) if is_call else node.name, node)
    graph._graph_namespace = names


def _drop_unused_inputs(program: Program, buffers: dict[str, str]) -> None:
    graph = program.graph
    for node in list(graph.find_nodes(op="placeholder")):
        if node.users or node.target in (*program.runtime_inputs, "geometry"):
            continue
        program.weights.pop(node.target, None)
        program.constants.pop(node.target, None)
        buffers.pop(node.target, None)
        graph.erase_node(node)
