"""Take the cache write out of tree attention, and rotary embedding along with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.facts import attention_is_a_tree, has_no_layers
from specc.passes.program import Program, bind_args, emit_call, replace
from specc.passes.rewrite.absorb_latent import values_in_keys
from specc.passes.rewrite.columns import (
    columns,
    columns_of,
    is_conversion,
    only_user,
    through_widening,
)
from specc.passes.rewrite.rotated import Rotated, rotated

aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# operators that write keys and values to a layer's caches
_WRITERS = (
    ops.write_kv, ops.rope_write, ops.norm_rope_write, ops.rope_write_latent,
    ops.add_norm_rope_write, ops.embed_norm_rope_write,
)  # fmt: skip
# between rotary embedding and attention, and between the tables and their use
MOVES = (
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.transpose.int,
    aten.permute.default,
    aten.contiguous.default,
    aten.clone.default,
)
_TABLE_MOVES = (aten.unsqueeze.default, aten.squeeze.dim)
# a walk back from attention ends where the layer's projections begin
_PROJECTIONS = (
    aten.linear.default,
    aten.addmm.default,
    aten.mm.default,
    aten.matmul.default,
    aten.embedding.default,
    ops.linear,
    ops.linear_q,
    ops.attend,
    ops.tree_attention,
)


def attention_reads_caches(program: Program) -> bool:
    """Every layer writes its keys and values to its caches, and attends to them afterwards."""
    if has_no_layers(program):
        return True
    written: set[fx.Node] = set()
    num_layers = 0
    for node in program.graph.nodes:
        if node.target is ops.tree_attention:
            return False
        if node.target in _WRITERS:
            bound = bind_args(node)
            written |= {bound["k_cache"], bound["v_cache"]}
        elif node.target is ops.attend:
            bound = bind_args(node)
            if not written.issuperset((bound["k_cache"], bound["v_cache"])):
                return False
            num_layers += 1
    return num_layers == len(program.layers) > 0 and len(written) == 2 * num_layers


class FuseRopeWrite(Pass):
    """Rotary embedding, then `specc.tree_attention` → `specc.rope_write`, `specc.attend`.

    The embedding is that of rotate_half, in one sum or with its halves apart, on all or on the
    first columns of a head. Tables of cos and sin stay where they are: they are computed once for
    all layers.
    """

    requires = (attention_is_a_tree,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        tables: dict[tuple[fx.Node, bool], fx.Node] = {}
        for node in program.calls(ops.tree_attention):
            bound = bind_args(node)
            with result.attempt(node.name):
                if values_in_keys(node):
                    raise NoMatch("its cache holds latents")
                operands = {name: _before_hadamard(bound[name]) for name in ("q", "k")}
                q, k = (_match(operand, name) for name, (operand, _) in operands.items())
                hadamard = {found for _, found in operands.values()}
                if len(hadamard) > 1:
                    raise NoMatch("one of q and k is transformed")
                if (q.cos, q.sin, q.is_shared) != (k.cos, k.sin, k.is_shared):
                    raise NoMatch("q and k are rotated by different tables")
                cos, sin = (flat_table(table, q.is_shared, tables) for table in (q.cos, q.sin))
                with program.graph.inserting_before(node):
                    turned = emit_call(
                        program.graph,
                        ops.rope_write,
                        *(side_by_side(moved(item.source, item.moves)) for item in (q, k)),
                        side_by_side(bound["v"]),
                        cos,
                        sin,
                        *(bound[name] for name in WRITE_INPUTS),
                        # graphs without it are what they were
                        *([True] if hadamard == {True} else []),
                    )
                attend_to_caches(node, turned, bound)
        program.graph.eliminate_dead_code()
        return result


class SplitTreeAttention(Pass):
    """What is left of `specc.tree_attention` → `specc.write_kv`, `specc.attend`."""

    ensures = (attention_reads_caches,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.tree_attention):
            bound = bind_args(node)
            with program.graph.inserting_before(node):
                q, k, v = (side_by_side(bound[name]) for name in ("q", "k", "v"))
                inputs = [bound[name] for name in WRITE_INPUTS]
                options = {"values_in_keys": True} if values_in_keys(node) else {}
                emit_call(program.graph, ops.write_kv, k, v, *inputs, **options)
            attend_to_caches(node, q, bound)
            result.rewrites += 1
        return result


WRITE_INPUTS = ("k_cache", "v_cache", "q_start", "slot", "block_table")
_ATTEND_INPUTS = (
    "k_cache", "v_cache", "q_start", "position", "slot", "cache_len",
    "ancestors", "block_table",
)  # fmt: skip


@dataclass(frozen=True)
class _Rotation:
    """An operand of attention: rows of `source`, rotated by two tables, then moved by `moves`.

    Tables that `is_shared` have half of the columns, for both halves of a head.
    """

    source: fx.Node
    cos: fx.Node
    sin: fx.Node
    is_shared: bool
    moves: tuple[fx.Node, ...]


def attend_to_caches(node: fx.Node, q: fx.Node, bound: dict) -> None:
    options = {name: bound[name] for name in ("scale", "window", "sink")}
    if values_in_keys(node):
        options["values_in_keys"] = True
    # beside what every call has, so that graphs without these are what they were
    scores = [bound["sink_logits"], bound["slopes"]]
    if scores == [None, None]:
        scores = []
    for name in ("softcap", "rounds_bias", "most_rows", "chunk"):
        if bound[name]:
            options[name] = bound[name]
    inputs = (bound[name] for name in _ATTEND_INPUTS)
    with node.graph.inserting_before(node):
        attended = emit_call(node.graph, ops.attend, q, *inputs, *scores, **options)
    attended.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    replace(node, attended)


def _before_hadamard(operand: fx.Node) -> tuple[fx.Node, bool]:
    """What is multiplied by a Hadamard matrix, and whether it is."""
    if operand.target is not ops.hadamard or only_user(operand) is None:
        return operand, False
    return operand.args[0], True


def _match(operand: fx.Node, name: str) -> _Rotation:
    moves = []
    node = operand
    while node.target in MOVES:
        moves.append(node)
        node = node.args[0]
    narrow = node
    node = _through_conversions(node)
    passed = None
    found = rotated(node)
    if found is None and node.target is aten.cat.default and len(node.args[0]) == 2:
        node, passed = node.args[0]
        node = _through_conversions(node)
        found = rotated(node)
    if found is None:
        if node.target is aten.add.Tensor and node.kwargs.get("alpha", 1) != 1:
            raise NoMatch(f"{name} is rotated by a scaled sum")
        raise NoMatch(_why_not_rotary(operand))
    x = found.x
    source = through_widening(x) if passed is None else _common_source(x, passed)
    _require_columns(source, x, passed, name)
    if narrow.meta["val"].dtype != source.meta["val"].dtype:
        raise NoMatch(
            f"{name} is {source.meta['val'].dtype} before rotary embedding and"
            f" {narrow.meta['val'].dtype} after it"
        )
    for item in (operand, *moves, narrow, node):
        if only_user(item) is None:
            raise NoMatch(f"{item.name}, the rotated {name}, is used elsewhere too")
        if item.meta["val"].dtype not in _DTYPES:
            raise NoMatch(f"{item.name} is {item.meta['val'].dtype}")
    require_heads_in_rows(moves, name)
    cos, sin = (_table(table, found, name) for table in (found.cos, found.sin))
    return _Rotation(source, cos, sin, found.is_shared, tuple(reversed(moves)))


def _through_conversions(node: fx.Node) -> fx.Node:
    while is_conversion(node) and only_user(node) is not None:
        node = node.args[0]
    return node


def _common_source(x: fx.Node, passed: fx.Node) -> fx.Node:
    """What the rotated and the passed columns are cut from: the nearest such node."""
    sources = []
    for node in (through_widening(x), through_widening(passed)):
        chain = [node]
        while (found := _cut_from(chain[-1])) is not None:
            chain.append(found)
        sources.append(chain)
    return next((node for node in sources[1][1:] if node in sources[0]), sources[0][0])


def _cut_from(node: fx.Node) -> fx.Node | None:
    found = columns(node)
    return found[0] if found else None


def _require_columns(source: fx.Node, x: fx.Node, passed: fx.Node | None, name: str) -> None:
    """The first columns are rotated, the rest is passed, and nothing is left."""
    size = int(source.meta["val"].shape[-1])
    rotated = columns_of(through_widening(x), source)
    rest = (size, size) if passed is None else columns_of(through_widening(passed), source)
    if rotated is None or rest is None or (rotated[0], rotated[1], rest[1]) != (0, rest[0], size):
        raise NoMatch(f"{name} is not rotated in its first columns")


def require_heads_in_rows(moves: list[fx.Node], name: str) -> None:
    """Raises NoMatch: a move of `MOVES` that takes the last dimension elsewhere."""
    for node in moves:
        ndim = node.args[0].meta["val"].dim()
        if node.target in (aten.contiguous.default, aten.clone.default):
            continue
        if node.target is aten.permute.default:
            moved = {i for i, dim in enumerate(node.args[1]) if dim % ndim != i}
        elif node.target is aten.unsqueeze.default:
            moved = {node.args[1] % (ndim + 1)} - set(range(ndim))
        else:
            moved = {dim % ndim for dim in node.args[1:]}
        if ndim - 1 in moved or ndim in moved:
            raise NoMatch(f"{node.name} moves the columns of {name}")


def _table(node: fx.Node, found: Rotated, name: str) -> fx.Node:
    """The node that holds [Nt, R] numbers of a table, besides dimensions of one entry."""
    shape, value = [str(size) for size in node.meta["val"].shape], found.x.meta["val"]
    dynamic = [dim for dim, size in enumerate(value.shape) if not isinstance(size, int)]
    if len(dynamic) != 1 or dynamic[0] == value.dim() - 1:
        raise NoMatch(f"{name} has no dimension of tokens")
    width = int(value.shape[-1]) // (2 if found.is_shared else 1)
    needed = ["1"] * value.dim()
    needed[dynamic[0]], needed[-1] = str(value.shape[dynamic[0]]), str(width)
    if ["1"] * (value.dim() - len(shape)) + shape != needed:
        raise NoMatch(f"{name} is multiplied with a table of [{', '.join(shape)}]")
    # the operator computes in float32: what widens a table, for each operand anew, changes nothing
    while (wide := through_widening(node)) is not node or node.target in _TABLE_MOVES:
        node = wide if wide is not node else node.args[0]
    if node.meta["val"].dtype not in _DTYPES:
        raise NoMatch(f"{node.name} is {node.meta['val'].dtype}")
    return node


def flat_table(
    table: fx.Node, is_shared: bool, known: dict[tuple[fx.Node, bool], fx.Node]
) -> fx.Node:
    """A table as [Nt, R]; the same node for all layers."""
    if (table, is_shared) not in known:
        node = table
        while node.meta["val"].dim() > 2:
            shape = node.meta["val"].shape
            dim = next(i for i, size in enumerate(shape) if isinstance(size, int) and size == 1)
            with table.graph.inserting_after(node):
                node = emit_call(table.graph, aten.squeeze.dim, node, dim)
        if is_shared:
            with table.graph.inserting_after(node):
                node = emit_call(table.graph, aten.cat.default, [node, node], -1)
        known[table, is_shared] = node
    return known[table, is_shared]


def moved(node: fx.Node, moves: Iterable[fx.Node]) -> fx.Node:
    """The same moves of another node: of what is not rotated yet, or not normalized."""
    for move in moves:
        # a copy was for the layout of what attention reads; the new operator takes any
        if move.target not in (aten.contiguous.default, aten.clone.default):
            node = emit_call(node.graph, move.target, node, *move.args[1:], **move.kwargs)
    return node


def side_by_side(node: fx.Node) -> fx.Node:
    """An operand whose columns are contiguous, as kernels read them; copied where they are not."""
    if node.meta["val"].stride(-1) == 1:
        return node
    return emit_call(node.graph, aten.contiguous.default, node)


def _why_not_rotary(operand: fx.Node) -> str:
    """What stands between a layer's projection and attention, if not rotate_half."""
    seen, stack = {operand}, [operand]
    has_tables = False
    while stack:
        node = stack.pop()
        if node.target in (aten.cos.default, aten.sin.default):
            has_tables = True
        if _makes_pairs(node):
            return "rotary embedding of interleaved pairs"
        if node.target not in _PROJECTIONS:
            following = [item for item in node.all_input_nodes if item not in seen]
            seen.update(following)
            stack += following
    if has_tables:
        return "rotary embedding in a form other than x · cos + rotate_half(x) · sin"
    return "no rotary embedding before attention"


def _makes_pairs(node: fx.Node) -> bool:
    """Whether a node takes neighbors apart: every second column, or columns two by two."""
    if node.target is aten.slice.Tensor:
        return bind_args(node)["step"] == 2
    if node.target in (aten.view.default, aten.reshape.default, aten.unflatten.int):
        value = node.meta["val"]
        return value.dim() > 3 and value.shape[-1] == 2
    return False
