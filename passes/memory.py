"""How much memory an engine needs: weights, caches, logits and workspace of each model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.backends import WHOLE
from specc.artifact.kv_rows import AUTO, kind_of, row_bytes
from specc.kernels.operator import Operand, PassLimits
from specc.kernels.ops import operator_of
from specc.passes.program import Program, bind_args, is_view


@dataclass(frozen=True)
class PassShape:
    """Sizes of one model pass.

    Args:
        num_tokens: in-flight tokens of all sequences.
        num_rows: rows that get logits.
        batch_size: sequences.
        longest: in-flight tokens of one sequence.
        context: cache rows that one sequence may attend to.
    """

    num_tokens: int
    num_rows: int
    batch_size: int
    longest: int
    context: int


@dataclass(frozen=True)
class StateCounts:
    """States of layers that keep some.

    Args:
        num_seqs: sequences that have one, and replay rows.
        num_nodes: replay rows of each.
        num_kept: states of prefixes that there is room for besides.
    """

    num_seqs: int = 0
    num_nodes: int = 0
    num_kept: int = 0


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of one model; see `specc.artifact.manifest_entries.MemoryEntry`."""

    weights: int
    cache: int
    logits: int
    workspace: int
    states: int = 0
    checkpoints: int = 0

    @property
    def total(self) -> int:
        beside = self.states + self.checkpoints
        return self.weights + self.cache + self.logits + self.workspace + beside

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def plan_memory(
    program: Program,
    dtype: torch.dtype,
    cache_rows: int,
    shapes: list[PassShape],
    num_kept: int = 0,
    attention: str = WHOLE,
    decoded: int = 0,
    states: StateCounts | None = None,
) -> ModelMemory:
    """Memory of one model, from its final graph.

    Args:
        program: after its last phase.
        dtype: of weights, and of caches unless they hold int8.
        cache_rows: cache rows of all sequences.
        shapes: the largest passes: prefill and step. The workspace is the largest of theirs.
        num_kept: rows of logits that several passes leave alive, where one makes fewer.
        attention: see `specc.artifact.backends.BackendFacts`.
        decoded: `decoded_bytes` of these facts.
        states: how many there are, where layers keep some.
    """
    states = states or StateCounts()
    constants = sum(value.nbytes for value in program.constants.values())
    num_rows = max(num_kept, *(shape.num_rows for shape in shapes))
    return ModelMemory(
        weights=_stored_bytes(program, dtype) + constants,
        cache=cache_bytes(program, dtype, cache_rows),
        logits=num_rows * logit_row_bytes(program),
        workspace=max(peak_bytes(program, shape, attention, decoded) for shape in shapes),
        states=states.num_seqs * (state_bytes(program) + states.num_nodes * replay_bytes(program)),
        checkpoints=states.num_kept * state_bytes(program),
    )


def cache_bytes(program: Program, dtype: torch.dtype, cache_rows: int) -> int:
    """Bytes of so many rows of a model's caches; see `plan_memory`."""
    kinds = {kind_of(program.placeholder(name).meta["val"].dtype) for name in program.caches}
    # one for all layers, and none of a model without any
    (kind,) = kinds or {AUTO}
    row = sum(
        x.num_kv_heads * row_bytes(columns, dtype, kind)
        for x in program.layers
        for columns in x.cached_columns
    )
    return (row + program.feature_width * dtype.itemsize) * cache_rows


def state_bytes(program: Program) -> int:
    """Bytes of the states of one sequence."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in program.state_layers)


def replay_bytes(program: Program) -> int:
    """Bytes of the replay rows of one node."""
    return sum(x.columns * x.dtype.itemsize for x in program.state_layers)


def logit_row_bytes(program: Program) -> int:
    """Bytes of the logits after one token; of a rank's columns and of all, where they are cut."""
    logits = program.logits.meta["val"]
    columns = int(logits.shape[-1])
    if program.shard is not None and program.shard.cuts_vocabulary:
        columns += columns * program.shard.num_ranks
    return columns * logits.dtype.itemsize


def _stored_bytes(program: Program, dtype: torch.dtype) -> int:
    """Bytes of the weight file, padding of blocks included; tied weights count once."""
    lent = program.of_target if program.is_lent else ()
    own = (weight for name, weight in program.weights.items() if name not in lent)
    unique = {weight.key: weight for weight in own}.values()
    items = [1 if weight.quantized is not None else dtype.itemsize for weight in unique]
    return sum(
        math.prod(weight.stored_shape) * item for weight, item in zip(unique, items, strict=True)
    )


def peak_bytes(program: Program, shape: PassShape, attention: str = WHOLE, decoded: int = 0) -> int:
    """Most bytes of intermediate values that live at one time, in order of execution.

    Views take no memory of their own: they extend the life of what they look into.

    Args:
        program: after its last phase.
        attention: see `specc.artifact.backends.BackendFacts`.
        decoded: `decoded_bytes` of these facts.
    """
    sizes = _Sizes(program, shape, attention, decoded)
    owner: dict[fx.Node, fx.Node] = {}
    last_use: dict[fx.Node, int] = {}
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    for place, node in enumerate(nodes):
        source = node.args[0] if node.args else None
        looks_into = _has_no_memory(node) and isinstance(source, fx.Node)
        owner[node] = owner.get(source, source) if looks_into else node
        for used in node.all_input_nodes:
            if owner.get(used, used).op == "call_function":
                last_use[owner[used]] = place
    result = owner.get(program.logits)
    releases: dict[int, list[fx.Node]] = {}
    for node, place in last_use.items():
        releases.setdefault(place, []).append(node)
    live = peak = 0
    for place, node in enumerate(nodes):
        # the logits are counted apart
        if owner[node] is node and node is not result:
            live += sizes.of(node)
        peak = max(peak, live + sizes.scratch(node))
        live -= sum(sizes.of(item) for item in releases.get(place, ()) if item is not result)
    return peak


class _Sizes:
    """Bytes of values whose sizes are symbols, for one shape of pass."""

    def __init__(self, program: Program, shape: PassShape, attention: str, decoded: int) -> None:
        self._limits = PassLimits(shape.longest, shape.context, attention, decoded)
        self.known: dict[str, int] = {}
        values = {
            "tokens": (shape.num_tokens,),
            "positions": (shape.num_tokens,),
            "q_start": (shape.batch_size + 1,),
            "logit_rows": (shape.num_rows,),
        }
        self.symbols: dict[Any, int] = {}
        for name, numbers in values.items():
            value = program.placeholder(name).meta["val"]
            for size, number in zip(value.shape, numbers, strict=True):
                if isinstance(size, torch.SymInt):
                    self.symbols.setdefault(size.node.expr, number)

    def of(self, node: fx.Node) -> int:
        leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
        return sum(self._bytes(leaf) for leaf in leaves if isinstance(leaf, Tensor))

    def scratch(self, node: fx.Node) -> int:
        """What an operator needs inside, beside its results: its table says it."""
        known = operator_of(node.target)
        if known is None or known.scratch is None:
            return 0
        return int(known.scratch(self._limits, **self._operands(node)))

    def _operands(self, node: fx.Node) -> dict[str, Any]:
        found = bind_args(node)
        for name, item in found.items():
            if isinstance(item, fx.Node) and isinstance(value := item.meta.get("val"), Tensor):
                found[name] = Operand(tuple(map(self._known, value.shape)), value.dtype)
        return found

    def _known(self, size: int | torch.SymInt) -> Any:
        """A size of this pass; one that it has nothing to do with stays a symbol."""
        if isinstance(size, int) or size.node.expr.free_symbols <= self.symbols.keys():
            return self._size(size)
        return size

    def _bytes(self, value: Tensor) -> int:
        count = 1
        for size in value.shape:
            count *= self._size(size)
        return count * value.dtype.itemsize

    def _size(self, size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        key = str(size)
        if key not in self.known:
            self.known[key] = int(size.node.expr.subs(self.symbols))
        return self.known[key]


def _has_no_memory(node: fx.Node) -> bool:
    is_operator = hasattr(node.target, "_schema")
    return is_view(node) or not is_operator  # getitem, arithmetic on sizes
