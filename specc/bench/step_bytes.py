"""Bytes that a decode step has to read, and how fast this process can read memory at all.

Decoding a few sequences is bound by memory: the weights of a pass are read once, whatever the
number of its tokens. Bytes of a step over its time, as a share of the measured bandwidth, say how
much is left to gain by better kernels.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from specc.artifact.graph_io import graph_from_json
from specc.artifact.kv_rows import AUTO, row_bytes
from specc.artifact.manifest import Manifest
from specc.artifact.weight_layout import BLOCK
from specc.drafters.drafter import Drafter
from specc.drafters.registry import drafter_of
from specc.kernels import native
from specc.kernels.operator import Reads
from specc.kernels.ops import operator_of
from specc.runtime.backends.program_files import MappedWeights, read_json
from specc.speculation.plans import SpecPlan
from specc.system.huge_pages import huge_buffer

BUFFER_BYTES = 400_000_000
_REPEATS = 7
# what torch's operators read of their weights; specc's own say it in their table
_OF_TORCH = {
    torch.ops.aten.embedding.default: Reads(rows="weight"),
    torch.ops.aten.linear.default: Reads(whole="weight"),
}
_TARGET = "target"
# inputs of programs that read hidden states: their slabs, and which rows of them a token reads
_FEATURES, _HANDED_ON, _FEATURE_ROWS = "features", "handed_on", "feature_rows"


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step reads; activations and what it writes are not counted.

    Args:
        target_weights: read once, by verification.
        draft_weights: read once in each draft pass; of a self-draft the target's.
        embeddings: rows of tables that are only looked up.
        kv_cache: committed rows of all sequences, once in each pass, as far as it sees them.
        features: of a draft that reads hidden states, rows of the target's and those that it hands
            on to itself.
        states: of layers that keep some, once in the target's pass, and once where the accepted
            path is folded in.
    """

    target_weights: int
    draft_weights: int
    embeddings: int
    kv_cache: int
    features: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        weights = self.target_weights + self.draft_weights
        return weights + self.embeddings + self.kv_cache + self.features + self.states


class LayerCache(Protocol):
    """Geometry of an attention layer; window 0 is no limit, chunk 0 no chunks."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def cached_columns(self) -> tuple[int, ...]: ...

    @property
    def window(self) -> int: ...

    @property
    def chunk(self) -> int: ...


@dataclass(frozen=True)
class ModelShape:
    """What counting needs of a model: its `program.json`, attention layers, and how caches are."""

    program: Mapping[str, Any]
    layers: Sequence[LayerCache]
    dtype: str
    kv_cache_dtype: str = AUTO
    # of a block drafter, key → shape and type of what steps read besides its program
    copies: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelBytes:
    """What one pass of a model reads: `weights` whole, `row` for each token it looks up."""

    weights: int
    row: int


def step_bytes(
    directory: Path, manifest: Manifest, plan: SpecPlan, context: float, sequences: float
) -> StepBytes:
    """Count what a step of this plan reads.

    Args:
        context: committed rows of a sequence, on average.
        sequences: that take part in a step, on average.
    """
    entry = next(item for item in manifest.plans if item.name == plan.name)
    rows = manifest.kv_cache_dtype
    models = {}
    for model in manifest.models:
        program = read_json(directory / model.program_file)
        drafter = plan.drafter(model.name)
        reads = drafter is not None and drafter.tensors
        copies = MappedWeights(directory / model.weights_file) if reads else {}
        models[model.name] = ModelShape(program, model.attended, model.dtype, rows, copies)
    target = manifest.models[0]
    for draft in manifest.self_drafts:
        layers = [target.layers[number] for number in draft.layers]
        program = read_json(directory / draft.program_file)
        models[draft.name] = ModelShape(program, layers, target.dtype, rows)
    step = read_json(directory / entry.file)
    return count_step_bytes(step, models, plan, context, sequences)


def count_step_bytes(
    step: Mapping[str, Any],
    models: Mapping[str, ModelShape],
    plan: SpecPlan,
    context: float,
    sequences: float,
) -> StepBytes:
    """Count what a step reads, from its programs.

    Args:
        step: content of `steps/<plan>.json`.
        models: by name, `target` among them.
        context: committed rows of a sequence, on average.
        sequences: that take part in a step, on average.
    """
    passes = count_passes(step)
    drafting = count_passes({"stages": [s for s in step["stages"] if s["name"] == "draft"]})
    # those of self-drafts that are the target's own program are counted apart
    passes[_TARGET] -= drafting[_TARGET]
    num_tokens = _tokens_of(plan)
    weights: Counter[str] = Counter()
    embeddings, cache, features = 0.0, 0.0, 0.0
    for name, model in models.items():
        kind = _TARGET if name == _TARGET else "draft"
        draft = None if name == _TARGET else drafter_of(name)
        draft = draft if draft is not None and draft.facts.is_self else None
        fed = num_tokens["view" if draft else kind] * sequences
        own = model_bytes(model.program, fed / max(1, passes[name]))
        weights[kind] += passes[name] * own.weights
        if passes[name]:
            embeddings += own.row * fed
            features += _feature_bytes(model.program, plan) * sequences
        rows = _rows_seen(draft, context) if draft else context
        cache += (
            passes[name]
            * sequences
            * cache_bytes(model.layers, model.dtype, rows, model.kv_cache_dtype)
        )
    drafts = [draft for draft in plan.self_drafts if draft.name not in models]
    if drafts:
        target, drafted = models[_TARGET], drafting[_TARGET]
        fed = len(drafts) * num_tokens["view"] * sequences
        own = model_bytes(target.program, fed / max(1, drafted))
        weights["draft"] += drafted * own.weights
        embeddings += own.row * fed
        # all have the shape of the plan, and so as many passes
        for draft in drafts:
            seen = cache_bytes(
                target.layers, target.dtype, _rows_seen(draft, context), target.kv_cache_dtype
            )
            cache += drafted / len(drafts) * sequences * seen
    for drafter in plan.models:
        weights["draft"] += _tensor_bytes(step, drafter, models[drafter.name].copies)
    states = (1 + plan.speculates) * sequences * _state_bytes(models[_TARGET].program)
    parts = map(round, (embeddings, cache, features, states))
    return StepBytes(weights[_TARGET], weights["draft"], *parts)


def _tensor_bytes(step: Mapping[str, Any], drafter: Drafter, copies: Mapping[str, Tensor]) -> int:
    """What the draft stage reads of matrices of a draft: each product all.

    Rows of the table of tokens, a few hundred bytes each, are left out.
    """
    # a step that verifies whole trees does not ask how sure a drafter is
    keys = {name: key for name, key in drafter.tensors.items() if key in copies}
    keys = {name: key for name, key in keys.items() if key not in drafter.asked_tensors}
    total = 0
    # programs are called, and not looked into
    modules = {name: nn.Module() for name in count_passes(step)}
    for stage in step["stages"] if keys else ():
        graph = graph_from_json(stage["graph"], modules=modules).graph
        for node in graph.find_nodes(op="placeholder"):
            if node.target in keys:
                count = _num_products(node)
                total += count * copies[keys[node.target]].nbytes
    return total


def _state_bytes(program: Mapping[str, Any]) -> int:
    """Of the states of one sequence."""
    return sum(
        prod(item["shape"]) * getattr(torch, item["dtype"]).itemsize
        for item in program["inputs"]
        if item["kind"] == "state" and item["part"] == "state"
    )


def _feature_bytes(program: Mapping[str, Any], plan: SpecPlan) -> int:
    """What the passes of a draft read of the rows of one sequence in slabs of features.

    The tokens that it has not seen have rows of the target; of the others each reads that of the
    token before it, where a head has handed one on.
    """
    if not any(item["name"] == _FEATURE_ROWS for item in program["inputs"]):
        return 0
    width = {
        item["name"]: prod(item["shape"]) * getattr(torch, item["dtype"]).itemsize
        for item in program["inputs"]
        if item["kind"] == "cache" and item["part"] == "rows"
    }
    name = program["name"]
    drafter = plan.drafter(name)
    num_tapped = drafter.num_tapped(plan.max_depth, plan.catch_up) if drafter else plan.catch_up
    own = width.get(_HANDED_ON, 0) * (_num_fed(plan) - 1)
    return width[_FEATURES] * num_tapped + own


def _rows_seen(draft: Drafter, context: float) -> float:
    return context if draft.view is None else min(context, draft.view.num_rows)


def model_bytes(program: Mapping[str, Any], tokens: float | None = None) -> ModelBytes:
    """Bytes of the weights in a program; a tied table counts once, where its head reads it.

    A matrix that several products take counts once for each of them, as the one projection of
    several Medusa heads: it is read anew, unless caches hold all of it.

    Args:
        program: content of `program.json`.
        tokens: of a pass, on average. Of the experts of a mixture as many count as these choose if
            each of them chooses others; None counts all.
    """
    graph = graph_from_json(program["graph"]).graph
    nodes = {node.target: node for node in graph.find_nodes(op="placeholder")}
    sizes: dict[str, tuple[int, int]] = {}
    # key → products that read all of it
    whole: Counter[str] = Counter()
    # of weights that not all experts have a token for
    shares: dict[str, float] = {}
    for item in program["inputs"]:
        if item["kind"] not in ("weight", "constant"):
            continue
        itemsize = getattr(torch, item["dtype"]).itemsize
        num_bytes = itemsize * prod(item["shape"])
        # of quantized tables blocks of rows, each with a share of it
        lanes = BLOCK if "quantized_of" in item else 1
        sizes[item["key"]] = (num_bytes, itemsize * prod(item["shape"][1:]) // lanes)
        node = nodes[item["name"]]
        if not _is_lookup(node):
            whole[item["key"]] += _num_products(node)
            if tokens is not None and (chosen := _chosen_experts(node)):
                num_experts = _matrix_shape(item)[0]
                shares[item["key"]] = min(1, tokens * chosen / num_experts)
    return ModelBytes(
        round(sum(sizes[k][0] * max(1, n) * shares.get(k, 1) for k, n in whole.items())),
        sum(row for key, (_, row) in sizes.items() if key not in whole),
    )


def cache_bytes(
    layers: Sequence[LayerCache], dtype: str, context: float, kv_cache_dtype: str = AUTO
) -> float:
    """Bytes of K and V of one sequence; a sliding window cuts its layers, and so do chunks.

    Of a chunk half is read on average.
    """

    def rows(layer: LayerCache) -> float:
        if layer.chunk and context > layer.chunk:
            return layer.chunk / 2
        return min(context, layer.window or context)

    kind = (getattr(torch, dtype), kv_cache_dtype)
    return sum(
        layer.num_kv_heads * row_bytes(columns, *kind) * rows(layer)
        for layer in layers
        for columns in layer.cached_columns
    )


def count_passes(step: Mapping[str, Any]) -> Counter[str]:
    """How often a step program calls each model."""
    return Counter(
        node["target"]
        for stage in step["stages"]
        for node in stage["graph"]["nodes"]
        if node["op"] == "call_module"
    )


def mean_context(prompt_lens: Sequence[int], num_tokens: int) -> float:
    """Committed rows of a sequence on average, while it grows from its prompt to its end."""
    return sum(prompt_lens) / len(prompt_lens) + num_tokens / 2


def measure_read_bandwidth(num_bytes: int = BUFFER_BYTES) -> dict[str, Any]:
    """Read a buffer with all threads, in several ways; the fastest is what the machine can do.

    Returns:
        `gb_s` (10⁹ bytes a second), `method`, `threads`, `buffer_bytes`.
    """
    # in huge pages, as weights are: in pages of 4 KB two threads read half as fast
    buffer = huge_buffer(num_bytes).view(torch.float32).fill_(1)
    rates = {name: _rate(read, buffer) for name, read in _readers().items()}
    method = max(rates, key=lambda name: rates[name])
    return {
        "gb_s": rates[method] / 1e9,
        "method": method,
        "threads": torch.get_num_threads(),
        "buffer_bytes": buffer.nbytes,
    }


def _readers() -> dict[str, Callable[[Tensor], object]]:
    readers: dict[str, Callable[[Tensor], object]] = {"torch sum": torch.sum}
    if native.is_loaded():  # by an engine that needs it
        readers["native sum"] = native.sum_floats
    return readers


def _rate(read: Callable[[Tensor], object], buffer: Tensor) -> float:
    read(buffer)
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        read(buffer)
        seconds.append(time.perf_counter() - begin)
    return buffer.nbytes / statistics.median(seconds)


def _is_lookup(node: fx.Node) -> bool:
    """Whether only rows of a weight are read: every use of it is an embedding."""
    return bool(node.users) and all(
        (table := _reads(user).rows) is not None and _operand(user, table) is node
        for user in node.users
    )


def _num_products(weight: fx.Node) -> int:
    """Products with one matrix, each of which reads all of it."""
    return sum(_reads(user).whole is not None for user in weight.users)


def _reads(node: fx.Node) -> Reads:
    own = operator_of(node.target)
    return _OF_TORCH.get(node.target, Reads()) if own is None else own.reads


def _operand(node: fx.Node, name: str) -> Any:
    """What is given for an argument; None for nothing."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)).get(name)


def _matrix_shape(item: Mapping[str, Any]) -> Sequence[int]:
    """[N, K], or of experts [E, N, K], of a weight that may be stored in blocks."""
    kinds = ("quantized_of", "blocks_of", "shape")
    found: Sequence[int] = next(item[kind] for kind in kinds if kind in item)
    return found


def _chosen_experts(weight: fx.Node) -> int:
    """How many experts each token chooses of those whose matrices these are; 0: it does not.

    That is what the router, or the last `topk` before the product, says.
    """
    users = list(weight.users)
    if len(users) == 1 and users[0].target is torch.ops.aten.transpose.int:
        users = list(users[0].users)
    reads = _reads(users[0]) if len(users) == 1 else Reads()
    if (chosen := reads.experts) is None:
        return 0
    if any(_operand(users[0], name) is weight for name in reads.shared):
        return 0
    found: list[Any] = [_operand(users[0], chosen)]
    seen: set[fx.Node] = set()
    while found:
        node = found.pop(0)
        if node.target is torch.ops.aten.topk.default:
            return int(node.args[1])
        if node.target is torch.ops.specc.route.default:
            return int(_operand(node, "top_k"))
        found += [item for item in node.all_input_nodes if item not in seen]
        seen |= set(found)
    return 0


def _tokens_of(plan: SpecPlan) -> dict[str, int]:
    """Tokens that a sequence feeds to the models of each kind in one step."""
    if not plan.speculates:
        return {_TARGET: 1, "draft": 0, "view": 0}
    fed = _num_fed(plan)
    # a draft's first level feeds what it can lack besides the root; leaves are never fed
    levels = (plan.catch_up, fed - 1)
    draft = sum(plan.models[0].passes(plan.max_depth, levels)) if plan.models else 0
    return {_TARGET: plan.num_nodes, "draft": draft, "view": fed}


def _num_fed(plan: SpecPlan) -> int:
    """Nodes of a tree that a draft reads level by level, the root included."""
    if plan.dynamic is not None:
        return plan.dynamic.num_fed
    return plan.shape.num_nodes - len(plan.shape.leaves)
