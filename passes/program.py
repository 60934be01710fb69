"""What passes rewrite: one model's graph, inputs by kind, origins of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.model_entry import cached_columns
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import blocks_shape
from specc.errors import UnsupportedGraphError
from specc.passes.values import value_of_call
from specc.sharding.shard_plan import ShardPlan
from specc.speculation.taps import Taps

# inputs of every model program, in order, before the caches; shapes in kernels/reference/core.py
RUNTIME_INPUTS = (
    "tokens",
    "positions",
    "q_start",
    "slot",
    "cache_len",
    "ancestors",
    "block_table",
    "logit_rows",
)
# one more, last, of targets whose attention says which blocks it looks at
MASS = "mass"
# one more, after those, of a part of a model: the value that the part before it hands on
HIDDEN = "hidden"
# one more, directly after `RUNTIME_INPUTS`, of models whose layers keep states: [B, 2] int32, for
# each sequence its place in the states, and how many region nodes are committed in any case
STATES = "states"
# one more, after those, of targets with adapters: [Nt, 1] int32, the adapter of each token, -1 for
# none
ADAPTERS = "adapters"
# one more cache, after those of the layers: rows that a target keeps for drafts
FEATURES = "features"
# of a head, caches after those of its layers are rows that it keeps for itself, and `FEATURES` of
# its target; and one more input of its passes, which of their rows each token reads
HANDED_ON, FEATURE_ROWS = "handed_on", "feature_rows"
# the layout of a weight as checkpoints have it
ROWS = "rows"
# lends caches and states their symbolic sizes, until they are there: [blocks, rows of a block,
# states, replay rows of a state]
GEOMETRY = "geometry"
# those of programs that take padded batches; masks follow, one for each window
PADDED_INPUTS = ("tokens", "positions", "write_index", "logit_rows")


@dataclass(frozen=True)
class RowInput:
    """One more input of a program beside tokens and positions: a row for each token of a pass.

    Args:
        name: of the input, and of the argument of the model's forward.
        columns: of the row.
    """

    name: str
    columns: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Weight:
    """One weight input: the concatenation of these model parameters along dim 0.

    Args:
        shape: of the concatenation.
        in_blocks: whether the engine's file holds it in blocks; see `specc.artifact.weight_layout`.
        quantized: how it holds it as integers, in blocks of their own.
        is_turned: of [..., N, K]: each parameter has matrices [..., K, N]. Parameters are
            transposed first, then concatenated.
    """

    parameters: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    in_blocks: bool = False
    quantized: QuantizedLayout | None = None
    is_turned: bool = False

    @property
    def key(self) -> str:
        """Name in the engine's weight file, which may hold a quantized copy beside the weight."""
        return "+".join(self.parameters) + (f":{self.quantized.name}" if self.quantized else "")

    @property
    def layout(self) -> str:
        """`rows`, `blocks`, `blocks-int8`, `blocks-int4-g64`, …"""
        if self.quantized is not None:
            return f"blocks-{self.quantized.name}"
        return "blocks" if self.in_blocks else ROWS

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the engine's weight file."""
        if self.quantized is not None:
            return self.quantized.stored_shape(self.shape)
        return blocks_shape(self.shape, self.dtype) if self.in_blocks else self.shape

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the elements in the engine's weight file."""
        return self.dtype if self.quantized is None else torch.uint8


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer, in the order of execution."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    sink: int = 0
    value_dim: int = 0  # columns of a value; 0 is those of a key
    has_sinks: bool = False  # scores of heads that take a share and have no value
    softcap: float = 0.0
    has_slopes: bool = False  # scores depend on how far a key is
    chunk: int = 0  # positions of a chunk, whose tokens see each other alone; 0 is no chunks
    values_in_keys: bool = False  # a value is the first columns of its key, which is cached alone

    @property
    def columns_of_values(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def cached_columns(self) -> tuple[int, ...]:
        """Widths of the rows that the cache has for a token and a KV head."""
        return cached_columns(self.head_dim, self.value_dim, self.values_in_keys)


@dataclass(frozen=True)
class StateLayer:
    """One convolution or recurrence over tokens, in the order of execution: what it remembers of a
    sequence is a state of one size, however long the sequence is.

    Args:
        kind: `conv` or `recurrence`.
        shape: of a sequence's state: [K - 1, C] inputs of a convolution, oldest first; [HV, DK, DV]
            of a recurrence.
        columns: of a replay row, the input of one region node: C; k, v, g, and beta in that order.
        key_heads: HK of a recurrence, which divides HV.
        has_beta: of a recurrence: it corrects what its key finds (delta rule).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    columns: int
    dtype: torch.dtype
    key_heads: int = 0
    has_beta: bool = False


@dataclass(frozen=True, eq=False)
class Slopes:
    """What a mask adds to scores besides hiding keys, see `tree_attention_reference`.

    Args:
        values: [H] float32.
        rounds: positions and products with them are rounded to bfloat16.
    """

    values: Tensor
    rounds: bool = False


@dataclass(frozen=True)
class Declined:
    """A node that a pass looked at and left alone, and why."""

    node: str
    reason: str


@dataclass
class Program:
    """A model graph in the making.

    Args:
        name: `target`, `draft_0`, …
        graph_module: placeholders are weights, constants, then `runtime_inputs`, then caches; the
            output is one tensor of logits, or (logits, row that each token hands on), see
            `handed_on`.
        weights: placeholder name → where its values come from.
        constants: placeholder name → small tensor (rotary frequencies, embedding scales).
        caches: placeholder name → (layer, "k" or "v").
        layers: filled by the tree-attention rewrite.
        states: placeholder name → (layer of `state_layers`, "state" or "rows").
        state_layers: filled by the rewrite of recurrences.
        windows: attention node name → window (0 = none); filled by mask classification.
        chunks: attention node name → chunk, where it has one; filled likewise.
        slopes: attention node name → what its mask adds to scores; filled likewise.
        runtime_inputs: names of the inputs that a runtime brings to every pass.
        shard: how it was cut, where it is that of one rank of several.
        constant_keys: placeholder name → name of a constant in the engine's weight file, where that
            is not `constant_key`: of programs that read the file of another one.
        ends_hidden: it is a part of a model, whose output is a value [..., tokens, ...] that the
            next part takes as `hidden`.
        integers: parameter → how the engine holds the integers that its checkpoint has of it.
        row_inputs: of `runtime_inputs`, those that have a row for each token.
        taps: what it writes to its input `features`; None: it has no such input.
        most_positions: positions that its sequences have at most; None: any number.
        hidden_columns: of its output, hidden states that come after the logits of each row.
        of_target: of a draft, placeholder name → key of the weight of its target that it is.
        is_lent: these are in the target's file alone.
        target_caches: of a draft, placeholder name → (layer of its target, "k" or "v") of caches
            that it reads and does not write.
    """

    name: str
    graph_module: fx.GraphModule
    weights: dict[str, Weight]
    constants: dict[str, Tensor]
    caches: dict[str, tuple[int, str]] = field(default_factory=dict)
    layers: list[AttentionLayer] = field(default_factory=list)
    states: dict[str, tuple[int, str]] = field(default_factory=dict)
    state_layers: list[StateLayer] = field(default_factory=list)
    windows: dict[str, int] = field(default_factory=dict)
    chunks: dict[str, int] = field(default_factory=dict)
    slopes: dict[str, Slopes] = field(default_factory=dict)
    runtime_inputs: tuple[str, ...] = RUNTIME_INPUTS
    shard: ShardPlan | None = None
    constant_keys: dict[str, str] = field(default_factory=dict)
    ends_hidden: bool = False
    integers: dict[str, KeptIntegers] = field(default_factory=dict)
    row_inputs: tuple[str, ...] = ()
    taps: Taps | None = None
    hidden_columns: int = 0
    most_positions: int | None = None
    of_target: dict[str, str] = field(default_factory=dict)
    is_lent: bool = False
    target_caches: dict[str, tuple[int, str]] = field(default_factory=dict)

    def copy(self, name: str) -> Program:
        """Another program of the same graph, which passes may change without changing this one."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        (old,), (new,) = (g.find_nodes(op="output") for g in (self.graph, graph))
        new.meta = dict(old.meta)
        return Program(
            name,
            fx.GraphModule(torch.nn.Module(), graph),
            dict(self.weights),
            dict(self.constants),
            dict(self.caches),
            list(self.layers),
            dict(self.states),
            list(self.state_layers),
            dict(self.windows),
            dict(self.chunks),
            dict(self.slopes),
            self.runtime_inputs,
            self.shard,
            dict(self.constant_keys),
            self.ends_hidden,
            dict(self.integers),
            self.row_inputs,
            self.taps,
            self.hidden_columns,
            self.most_positions,
        )

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    def placeholder(self, name: str) -> fx.Node:
        return next(iter(self.graph.find_nodes(op="placeholder", target=name)))

    @property
    def logits(self) -> fx.Node:
        """The node of the logits, or of what a part of a model hands on."""
        (output,) = self.graph.find_nodes(op="output")
        result: Any = output.args[0]
        return result[0] if isinstance(result, tuple | list) else result

    @logits.setter
    def logits(self, node: fx.Node) -> None:
        (output,) = self.graph.find_nodes(op="output")
        other = self.handed_on
        output.args = (node,) if other is None else ((node, other),)

    @property
    def handed_on(self) -> fx.Node | None:
        """[1, tokens, D] that each token hands on to those that follow it, beside its logits.

        None of models that do not: what follows a token finds all in the caches.
        """
        (output,) = self.graph.find_nodes(op="output")
        result: Any = output.args[0]
        return result[1] if isinstance(result, tuple | list) else None

    def calls(self, *targets: Any) -> list[fx.Node]:
        """Nodes that call one of these operators, in order."""
        found = [n for t in targets for n in self.graph.find_nodes(op="call_function", target=t)]
        return sorted(found)

    @property
    def feature_width(self) -> int:
        """Columns of the rows that it keeps besides K and V; 0 where it keeps none."""
        kept = HANDED_ON if self.taps is None else FEATURES
        found = list(self.graph.find_nodes(op="placeholder", target=kept))
        return int(found[0].meta["val"].shape[2]) if found else 0

    @property
    def reads_features(self) -> bool:
        """Whether it is a draft that reads its target's slab, see `ReadFeatures`."""
        return FEATURE_ROWS in self.row_inputs

    @property
    def attended_layers(self) -> list[int]:
        """Layers of its target that it attends to, ascending."""
        return sorted({layer for layer, _ in self.target_caches.values()})

    @property
    def num_parameters(self) -> int:
        """Parameters, each counted once where models tie them."""
        unique = {weight.parameters: weight.shape for weight in self.weights.values()}
        if self.shard is not None:
            # a rank's part of a model says nothing about the model
            unique = {tuple(cut.parameters): cut.shape for cut in self.shard.weights}
        return sum(torch.Size(shape).numel() for shape in unique.values())

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, of all ranks together."""
        if self.shard is not None:
            return self.shard.vocab_size
        return int(self.logits.meta["val"].shape[-1]) - self.hidden_columns


def emit_call(graph: fx.Graph, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call and compute its `meta["val"]` from those of its arguments."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = value_of_call(graph, target, args, kwargs)
    return node


def add_placeholder(program: Program, name: str, value: Tensor, after: fx.Node) -> fx.Node:
    """Add an input after `after`; value is fake."""
    with program.graph.inserting_after(after):
        node = program.graph.placeholder(name)
    node.meta["val"] = value
    return node


def last_placeholder(graph: fx.Graph) -> fx.Node:
    return list(graph.find_nodes(op="placeholder"))[-1]


def bind_args(node: fx.Node) -> dict[str, Any]:
    """Arguments of an operator call by schema name, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            bound[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def upstream(node: fx.Node) -> set[fx.Node]:
    """A node and everything that it depends on."""
    found, stack = {node}, [node]
    while stack:
        for item in stack.pop().all_input_nodes:
            if item not in found:
                found.add(item)
                stack.append(item)
    return found


def is_update(node: fx.Node) -> bool:
    """Whether a call changes one of its arguments in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def is_view(node: fx.Node) -> bool:
    """Whether a call may return a view of its first argument."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns or not node.args:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and not alias.is_write and isinstance(node.args[0], fx.Node)


def module_path(node: fx.Node) -> str:
    """Path of the module that made this node, e.g. `model.layers.0.self_attn`; may be empty."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0]
    return path.removeprefix("model.").removeprefix("L['self'].").strip(".")


def replace(node: fx.Node, replacement: fx.Node) -> None:
    """Replace all uses of a node and erase it, explicitly: dead-code elimination keeps some ops."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def refusal(node: fx.Node, phase: str, reason: str) -> UnsupportedGraphError:
    """The error that names a node, its layer and the reason."""
    where = module_path(node)
    return UnsupportedGraphError(
        f"{where + ': ' if where else ''}node {node.name} after {phase}: {reason}",
        "token-wise operators of aten and specc, and attention",
        "choose a model of a supported architecture (docs/guide/models.md), or report it",
    )


def constant_key(placeholder: str) -> str:
    """Name of a constant in the engine's weight file."""
    return f"constant.{placeholder}"
