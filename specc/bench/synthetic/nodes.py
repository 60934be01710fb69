"""Nodes of a captured step, counted without a GPU: the step runs on tensors without data.

What runs is what the backend cuda captures: the lowered programs and the plan's stages, bound to
one batch size (`BoundStep`), with every operator's own launches noted instead of made. So a kernel
that is launched twice counts twice, and what is computed once, before a capture, does not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specc.artifact.graph_io import graph_from_json
from specc.artifact.in_memory import BenchPrograms
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.bench.synthetic.engine import make_states
from specc.bench.synthetic.live_values import LiveValues
from specc.cost.graph_costs import ATTEND, OTHER, PRODUCT
from specc.kernels import ops as _ops  # noqa: F401  registers the operators
from specc.kernels.reference.products import num_matrices
from specc.runtime.backends.captured.bound_step import BoundStep, StepParts
from specc.runtime.backends.captured.confident_step import CONFIDENCE
from specc.runtime.backends.captured.live_pass import without_output
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.engine_cache import caches_of, slab_shapes, states_of
from specc.runtime.backends.program_files import place
from specc.runtime.backends.step_constants import drafter_tensors, step_constants
from specc.runtime.backends.step_io import STATES
from specc.runtime.execution.batch_rows import last_tokens_of
from specc.runtime.scheduling.kv_cache import CacheShape, KVCache
from specc.sampling.rows import Value, Word
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten
META = torch.device("meta")
_PRODUCTS = {aten.linear, aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
# memory is handed out, nothing is launched
_ALLOCATIONS = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided}
_ALLOCATIONS |= {aten.new_empty_strided, aten.detach, aten.lift_fresh}
# of the first argument only rows are read
_LOOKUPS = {aten.embedding, aten.index_select, aten.index, aten.gather}
# arguments that are caches as a whole
_CACHES = ("k_cache", "v_cache", "slab")
# of states, which are read and written, and replay rows, of which a pass writes as many as it has
# tokens, and a fold reads those of a path
_STATE, _REPLAY = "state", "rows"
# argument of which a kernel reads the rows that this other one names
_TABLE, _TOKENS = "x", "tokens"
# a quantized weight as scales and zero points: its bytes are those of its levels
_LEVELS, _OF_LEVELS = "levels", ("scales", "zeros")
# what programs of one launch hand to each other: as large as it may get, and used again at once
_SCRATCH = ("partial", "lse", "sums", "arrived")
_ATTENTION = ("attend", "invariant_attend", "tree_attention")
_EXPERTS = ("experts", "invariant_experts")
# operators that a pass of a model starts with
_STARTS = ("embedding", "embed_norm_rope_write")


@dataclass(frozen=True)
class Node:
    """One node of a graph.

    Args:
        name: of the kernel, or of the operator of torch.
        kind: `product`, `attend` or `other`.
        model: whose pass it belongs to; empty between passes.
        num_bytes: read and written, caches by the rows that are in use; of attention with several
            launches the first has these.
        is_dependent: its kernel has a configuration that waits for the node before by itself, and
            lets the next one start early.
        product: rows, outputs and columns of a product by a quantized weight.
    """

    name: str
    operator: str
    kind: str
    model: str
    num_bytes: int
    is_dependent: bool = False
    product: tuple[int, int, int] | None = None


class Launches:
    """Runs operators as a GPU's: `recorded` notes launches, `kernels` has what launches them."""

    def __init__(self, recorded: Callable[[Any], Any], kernels: Mapping[str, Callable]) -> None:
        self.recorded = recorded
        self.kernels = kernels


def step_nodes(
    programs: BenchPrograms,
    plan: SpecPlan,
    context: int,
    launches: Launches,
    *,
    is_filtered: bool = True,
    live: LiveValues | None = None,
) -> list[Node]:
    """Nodes of one step, in the order of the graph.

    Args:
        programs: lowered for CUDA.
        plan: one of theirs.
        context: committed rows of each sequence.
        launches: of the kernels that the programs are lowered to.
        is_filtered: some request has filters, or tries proposals one by one.
        live: gets to know what is made on the way.
    """
    limits = programs.limits
    shape = CacheShape(
        limits.max_seq_len, limits.max_nodes, limits.block_size, limits.max_batch_size
    )
    specs = {model.entry.name: slab_shapes(model.entry) for model in programs.models}
    states = make_states(programs, META)
    cache = KVCache(shape, specs, getattr(torch, programs.dtype), META, states=states)
    counter = _Counter(context, launches, live or LiveValues())
    modules = {model.entry.name: _CountedModel(model, cache, counter) for model in programs.models}
    bound = _bind(programs, plan, cache, modules, is_filtered)
    with launches.recorded(counter.note), torch.inference_mode(), counter:
        bound.run()
    return counter.nodes


def nodes_per_layer(nodes: Sequence[Node], model: str) -> list[int]:
    """Nodes of each layer but a pass's first, from after one attention to the end of the next."""
    own = [node for node in nodes if node.model == model]
    ends = [i for i, node in enumerate(own) if _ends_attention(own, i)]
    starts = [i for i, node in enumerate(own) if node.operator in _STARTS]
    return [
        end - begin
        for begin, end in itertools.pairwise(ends)
        if not any(begin < start < end for start in starts)
    ]


def _ends_attention(nodes: Sequence[Node], index: int) -> bool:
    is_last = index + 1 == len(nodes) or nodes[index + 1].operator not in _ATTENTION
    return nodes[index].operator in _ATTENTION and is_last


class _CountedModel(nn.Module):
    """A model's program without weights, whose nodes bear its name."""

    def __init__(self, model: Any, cache: KVCache, counter: _Counter) -> None:
        super().__init__()
        self._name = model.entry.name
        self._counter = counter
        # of drafters, steps read some by themselves
        self.weights = dict(model.copies) | {
            item["key"]: torch.empty(
                item["shape"], dtype=getattr(torch, item["dtype"]), device=META
            )
            for item in model.program["inputs"]
            if item["kind"] in ("weight", "constant")
        }
        caches, states = caches_of(model.entry, cache), states_of(model.entry, cache)
        self._program = ModelProgram(model.program, self.weights, caches, META, states=states)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        self._counter.model = self._name
        try:
            return self._program(*inputs)
        finally:
            self._counter.model = ""


def _bind(
    programs: BenchPrograms,
    plan: SpecPlan,
    cache: KVCache,
    modules: Mapping[str, nn.Module],
    is_filtered: bool,
) -> BoundStep:
    program = programs.steps[plan.name]
    stages = {
        stage["name"]: place(_unasked(graph_from_json(stage["graph"], modules=dict(modules))), META)
        for stage in program["stages"]
    }
    given = step_constants(program, plan) | drafter_tensors(plan, modules)
    constants = {name: value.to(META) for name, value in given.items()}
    batch, depth = programs.limits.max_batch_size, plan.max_depth

    def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, *sizes, dtype=dtype, device=META)

    inputs = {
        **cache.environment,
        "last_tokens": empty(last_tokens_of(programs.plans), dtype=torch.int64),
        "cache_len": empty(dtype=torch.int32),
        "block_table": empty(cache.shape.blocks_per_sequence, dtype=torch.int32),
        "sampling_values": empty(len(Value), dtype=torch.float32),
        "sampling_words": empty(len(Word), dtype=torch.int64),
        "proposals": empty(depth, dtype=torch.int64),
        "vote_weights": empty(len(plan.drafts), dtype=torch.float32),
        "chosen_blocks": empty(plan.num_chosen(cache.shape.rows_per_block), dtype=torch.int64),
        STATES: empty(2, dtype=torch.int32),
    }
    results = empty(2 + depth + 1 + len(modules) - 1, dtype=torch.int64)
    lens = tuple(plan.draft_lens.values())
    return BoundStep(StepParts(stages, constants, inputs, results, lens), is_filtered)


def _unasked(stage: fx.GraphModule) -> fx.GraphModule:
    """A stage of a step that verifies whole trees: no drafter is asked how sure it is."""
    return without_output(stage, CONFIDENCE)


class _Counter(TorchDispatchMode):
    """Notes what operators launch while it is active."""

    def __init__(self, context: int, launches: Launches, live: LiveValues) -> None:
        super().__init__()
        self._live = live
        self.nodes: list[Node] = []
        self.model = ""
        self._operator = ""
        # of the experts of a mixture, the share that tokens choose if each chooses others
        self._share = 1.0
        # bytes of the cache that the next launch reads
        self._pending = 0
        self._context = context
        self._kernels = launches.kernels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "specc" and name in self._kernels:
            return self._launch(func, name, args, kwargs)
        result = func(*args, **kwargs)
        self._live.note(_tensors((args, kwargs)), _tensors(result))
        if func.overloadpacket in _ALLOCATIONS:
            return result
        given = {_storage(x) for x in _tensors((args, kwargs))}
        is_new = any(x.numel() and _storage(x) not in given for x in _tensors(result))
        if is_new or func._schema.is_mutable:
            kind = PRODUCT if func.overloadpacket in _PRODUCTS else OTHER
            self._add(name, name, kind, _moved(func, args, kwargs, result))
        return result

    def note(self, kernel: str, tensors: Mapping[str, Tensor], is_dependent: bool) -> None:
        """A launch of the operator that is running."""
        operator, is_state = self._operator, _STATE in tensors
        table = [_TABLE] if {_TOKENS, "total"} <= tensors.keys() else []
        left_out = (*_CACHES, *_SCRATCH, *_OF_LEVELS, *table, *([_REPLAY] if is_state else []))
        given = {name: x for name, x in tensors.items() if name not in left_out}
        moved = sum(_bytes(x) for x in given.values())
        is_of_experts = operator in _EXPERTS and _LEVELS in tensors
        if is_of_experts:
            moved -= round(_bytes(tensors[_LEVELS]) * (1 - self._share))
        moved += _bytes(tensors[_STATE]) if is_state else 0
        # as many rows of a table are read as are written
        moved += _bytes(tensors["total"]) if table else 0
        kind = ATTEND if operator in _ATTENTION else OTHER
        if _LEVELS in tensors or ("weight" in tensors and tensors["weight"].dim() > 1):
            kind = PRODUCT
        product = None
        if "x" in tensors and _OF_LEVELS[0] in tensors and not is_of_experts:
            columns = tensors["x"].shape[-1]
            product = tensors["x"].numel() // columns, _outputs(tensors), columns
        self._add(kernel, operator, kind, moved + self._pending, is_dependent, product)
        self._pending = 0

    def _launch(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        before, self._operator = self._operator, name
        if name in _EXPERTS:
            self._share = _share_of(**_named(func, args, kwargs))
        if name in _ATTENTION:
            self._pending = self._rows_read(func, args, kwargs)
        try:
            with self:  # what a kernel's Python makes with torch is a node, too
                return self._kernels[name](*args, **kwargs)
        finally:
            self._operator = before

    def _rows_read(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> int:
        """Bytes of K and V that attention reads."""
        given = _named(func, args, kwargs)
        # values that are columns of the keys are read with these
        names = ("k_cache",) if given.get("values_in_keys") else ("k_cache", "v_cache")
        caches = [given[name] for name in names]
        window = int(given.get("window", 0))
        rows = min(self._context, window or self._context) * given["cache_len"].shape[0]
        return sum(rows * c.shape[2] * c.shape[3] * c.element_size() for c in caches)

    def _add(
        self,
        name: str,
        operator: str,
        kind: str,
        num_bytes: int,
        is_dependent: bool = False,
        product: tuple[int, int, int] | None = None,
    ) -> None:
        node = Node(name, operator, kind, self.model, num_bytes, is_dependent, product)
        self.nodes.append(node)


def _outputs(tensors: Mapping[str, Tensor]) -> int:
    """Of a product by a quantized weight; those in fragments may write something else."""
    if _LEVELS in tensors:
        return tensors["out"].shape[1]
    return tensors["weight"].shape[0] * BLOCK


def _moved(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of operands and results; of what is looked up, its rows."""
    results = sum(_bytes(x) for x in _tensors(result))
    if func.overloadpacket in _LOOKUPS:
        return 2 * results
    return results + sum(_bytes(x) for x in _tensors((args, kwargs)))


def _bytes(value: Tensor) -> int:
    """Of what a view shows, once where it shows memory several times."""
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def _tensors(values: Any) -> Iterable[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _named(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names."""
    return {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}


def _share_of(
    x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, size: int = 0,
    gate_up_layout: str = "", shared_down: Tensor | None = None, **_: Any,
) -> float:  # fmt: skip
    """Share of experts that tokens choose if each chooses others; those of all lie beside them."""
    layout = QuantizedLayout.named(gate_up_layout) if gate_up_layout else None
    of_all = 0 if shared_down is None else shared_down.shape[1] // down.shape[2]
    chosen = len(ids) * (ids.shape[1] - of_all)
    return min(1, chosen / num_matrices(gate_up, (2 * size, x.shape[1]), layout))
