"""How much memory an engine needs: weights, caches, logits and workspace of each model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.backends import NATIVE, PARTS, SPLIT, WHOLE
from specc.artifact.kv_rows import AUTO, INT8, row_bytes
from specc.artifact.weight_layout import BLOCK
from specc.kernels import ops
from specc.passes.program import Program, bind_args, is_view

_FLOAT_BYTES = _INT_BYTES = 4
# rows of the tiles of attention that are split on a large GPU: 8 programs of up to 128 rows for
# each of 160 multiprocessors
_SPLIT_ROWS = 8 * 160 * 128
# tiles of attention in C++: keys, rows, floats of a vector, and threads that a machine may have
_NATIVE_TILE, _NATIVE_ROWS, _LANES, _THREADS = 64, 128, 16, 64
# of latents: bytes of what heads expand to at a time, and rows (kernels/cpu/attend_expanded.cpp)
_EXPANDED_BYTES, _LATENTS = 32 << 20, 1024
# rows of the parts of a product of few rows: 16 rows, 4 programs a block (few_rows_tiles.py)
_SHARED_ROWS = 16 * 4
# with many rows they run the operators that they were made of
_PRODUCTS = (
    ops.add_norm_linear, ops.add_norm_gate_up, ops.add_norm_rope_write,
    ops.embed_norm_rope_write, ops.add_norm_head,
)  # fmt: skip


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
class ModelMemory:
    """Bytes of one model."""

    weights: int
    cache: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.logits + self.workspace

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
    """
    rows = (program.placeholder(name).meta["val"].dtype for name in program.caches)
    kind = INT8 if torch.int8 in rows else AUTO
    row = sum(
        x.num_kv_heads * row_bytes(columns, dtype, kind)
        for x in program.layers
        for columns in x.cached_columns
    )
    row += program.feature_width * dtype.itemsize
    constants = sum(value.nbytes for value in program.constants.values())
    num_rows = max(num_kept, *(shape.num_rows for shape in shapes))
    return ModelMemory(
        weights=_stored_bytes(program, dtype) + constants,
        cache=row * cache_rows,
        logits=num_rows * logit_row_bytes(program),
        workspace=max(peak_bytes(program, shape, attention, decoded) for shape in shapes),
    )


def logit_row_bytes(program: Program) -> int:
    """Bytes of the logits after one token; of a rank's columns and of all, where they are cut."""
    logits = program.logits.meta["val"]
    columns = int(logits.shape[-1])
    if program.shard is not None and program.shard.cuts_vocabulary:
        columns += columns * program.shard.num_ranks
    return columns * logits.dtype.itemsize


def _stored_bytes(program: Program, dtype: torch.dtype) -> int:
    """Bytes of the weight file, padding of blocks included; tied weights count once."""
    unique = {weight.key: weight for weight in program.weights.values()}.values()
    items = [1 if weight.quantized is not None else dtype.itemsize for weight in unique]
    return sum(
        math.prod(weight.stored_shape) * item for weight, item in zip(unique, items, strict=True)
    )


def peak_bytes(program: Program, shape: PassShape, attention: str = WHOLE, decoded: int = 0) -> int:
    """Most bytes of intermediate values that live at one time, in order of execution.

    Views take no memory of their own: they extend the life of what they look into.

    Args:
        program: after its last phase.
        shape: of the pass.
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
        self.shape = shape
        self._attention, self._decoded = attention, decoded
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
        """What an operator needs inside: attention does.

        Of the operators in C++: tiles and partial results of each thread. Of those in torch:
        gathered keys and values, scores and probabilities, of as many rows as they take at once.
        On a GPU: partial results of the splits of a context, which fill the machine up to four
        times.

        And what the experts of a mixture do: a row of each product for every pair of a token and
        one of its experts, and the order of these pairs; and a quantized weight, as much of it as
        is decoded at a time, with what comes of it.
        """
        if node.target is ops.experts:
            x, ids, _, gate_up, down = (item.meta["val"] for item in node.args[:5])
            num_pairs = self._size(ids.shape[0]) * int(ids.shape[1])
            inner, outer = int(down.shape[2]) * x.dtype.itemsize, int(down.shape[1]) * _FLOAT_BYTES
            return num_pairs * (inner + outer + _INT_BYTES) + int(gate_up.shape[0]) * _INT_BYTES
        if node.target is ops.linear_q:
            return self._decoded_part(node)
        if node.target in _PRODUCTS:
            return self._inside_product(node)
        if node.target is ops.skinny_linear:
            # parts of sums that programs hand to each other
            return _FLOAT_BYTES * _SHARED_ROWS * int(node.args[1].meta["val"].shape[0])
        if node.target is ops.attend_expanded:
            return self._expanded(node)
        if node.target not in (ops.tree_attention, ops.attend):
            return 0
        bound = bind_args(node)
        num_heads = int(bound["q"].meta["val"].shape[0])
        num_kv_heads = int(bound["k_cache"].meta["val"].shape[2])
        widths = [int(value.shape[2]) for value in (bound["q"].meta["val"], node.meta["val"])]
        if self._attention == PARTS:
            return _FLOAT_BYTES * _SPLIT_ROWS * (widths[1] + 1)
        # the wider of keys and values
        head_dim = max(widths)
        if self._attention == NATIVE:
            return self._native_attention(head_dim)
        rows = self.shape.longest
        if self._attention == SPLIT:
            rows = min(rows, ops.rows_at_once(num_heads, self.shape.context))
        scores = 2 * num_heads * rows * self.shape.context
        gathered = 2 * num_kv_heads * head_dim * self.shape.context
        return _FLOAT_BYTES * (scores + gathered)

    @staticmethod
    def _native_attention(width: int) -> int:
        """What threads of attention hold, of heads that are so wide."""
        accumulators = 3 * _NATIVE_ROWS * (width + 2 * _LANES)
        tiles = _NATIVE_TILE * (2 * width + _NATIVE_ROWS) + _NATIVE_ROWS * width
        return _FLOAT_BYTES * _THREADS * (accumulators + tiles)

    def _expanded(self, node: fx.Node) -> int:
        """Keys and values of a sequence's latents, of some heads, or of all and their scores."""
        bound = bind_args(node)
        latents, up_v = (bound[name].meta["val"] for name in ("k_cache", "up_v"))
        num_heads, rows = int(up_v.shape[0]), self.shape.context
        width = int(bound["q"].meta["val"].shape[2]) + int(up_v.shape[1])
        gathered = min(rows, _LATENTS) * int(latents.shape[3])
        if self._attention == NATIVE:
            head = rows * width * latents.dtype.itemsize
            # of fewer rows, more heads at a time; attention over them has its own
            expanded = max(head, min(_EXPANDED_BYTES, num_heads * head))
            # latents, and the blocks of a head's projection
            multiplied = gathered + (width + BLOCK) * int(up_v.shape[2])
            return expanded + multiplied * latents.dtype.itemsize + self._native_attention(width)
        tokens = min(self.shape.longest, ops.rows_at_once(num_heads, rows))
        # own keys, values, both together, and once more in float32
        return _FLOAT_BYTES * (2 * num_heads * tokens * rows + 3 * num_heads * rows * width)

    def _decoded_part(self, node: fx.Node) -> int:
        x, num_out = node.args[0].meta["val"], int(node.args[3])
        num_rows, size = map(self._size, x.shape)
        whole = num_out * size * x.dtype.itemsize
        if whole <= self._decoded or not self._decoded:
            return min(whole, self._decoded)
        return self._decoded + num_rows * self._decoded // size

    def _inside_product(self, node: fx.Node) -> int:
        """Of many rows: what the norm makes of them, and a product before what follows it."""
        bound = bind_args(node)
        weight = bound["weight"].meta["val"]
        # those of the embedding are its tokens; the head takes those that are chosen
        first = next(bound[name] for name in ("rows", "tokens", "x") if name in bound)
        shape = first.meta["val"].shape
        counts = shape[:-1] if first is bound.get("x") else shape
        num_rows = math.prod(map(self._size, counts))
        is_last = node.target in (ops.add_norm_linear, ops.add_norm_head)
        num_out, size = map(int, weight.shape)
        return int(num_rows * (size + (0 if is_last else num_out)) * weight.dtype.itemsize)

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
