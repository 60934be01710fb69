"""Bytes of a step, counted by hand from the checkpoints, and the bandwidth measurement."""

from __future__ import annotations

import dataclasses
import operator

import pytest
import torch
from safetensors import safe_open
from torch import fx

from specc.artifact.directory import open_engine
from specc.artifact.graph_io import graph_to_json
from specc.artifact.model_entry import LayerEntry
from specc.bench.step_bytes import (
    ModelShape,
    cache_bytes,
    count_passes,
    count_step_bytes,
    mean_context,
    measure_read_bandwidth,
    model_bytes,
    step_bytes,
)
from specc.compiler.build import build
from specc.drafters.block import BIAS_TENSORS
from specc.kernels import ops
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.program_files import read_json
from specc.speculation.plans import OFF, SpecPlan
from tests.runtime import hybrid_engine
from tests.runtime.backends.cuda.confident_rig import write_drafter, write_target
from tests.runtime.conftest import one_layer_program
from tests.runtime.head_rig import CHAIN, options
from tests.runtime.hybrid_engine import DIM, hybrid_program

aten = torch.ops.aten
HIDDEN, HEAD_DIM, KV_HEADS, LAYERS = 32, 8, 2, {"target": 2, "draft": 1}
ROW = 4 * HIDDEN
ROTARY = 4 * HEAD_DIM // 2  # the inverse frequencies are a constant input


@pytest.fixture(scope="module")
def manifest(tiny_engine):
    return open_engine(tiny_engine, False, backends=("eager", "native", "inductor", "cpu"))


def checkpoint_bytes(directory) -> int:
    """All weights of a checkpoint but the embedding table."""
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        keys = [key for key in file.keys() if "embed_tokens" not in key]  # noqa: SIM118
        return sum(file.get_tensor(key).nbytes for key in keys)


def kv_bytes(model: str, context: float) -> float:
    return 2 * LAYERS[model] * KV_HEADS * HEAD_DIM * 4 * context


@pytest.mark.parametrize("plan", ["off", "chain-3", "tree-2-1"])
def test_bytes_of_a_step(tiny_engine, tiny_models, manifest, plan):
    entry = next(item for item in manifest.plans if item.name == plan)
    spec = step_bytes(tiny_engine, manifest, entry.plan, context=20.0, sequences=3.0)
    depth = entry.plan.max_depth
    assert spec.target_weights == checkpoint_bytes(tiny_models.target) + ROTARY
    assert spec.draft_weights == depth * (checkpoint_bytes(tiny_models.draft) + ROTARY)
    assert spec.kv_cache == 3 * (kv_bytes("target", 20) + depth * kv_bytes("draft", 20))
    # nodes of the target; the draft's first level feeds two tokens, its last one none
    looked_up = {"off": 1, "chain-3": 4 + 2 + 1 + 1, "tree-2-1": 5 + 2 + 2}[plan]
    assert spec.embeddings == 3 * looked_up * ROW
    assert spec.total == (
        spec.target_weights + spec.draft_weights + spec.kv_cache + spec.embeddings
    )


def test_bytes_of_a_self_draft(tiny_engine, manifest):
    """Its passes read the target's weights, and of the cache what it sees."""
    models = {
        model.name: ModelShape(
            read_json(tiny_engine / model.program_file), model.layers, model.dtype
        )
        for model in manifest.models
    }
    off = step_bytes(tiny_engine, manifest, OFF, context=20.0, sequences=3.0)
    plan = SpecPlan.from_widths((2, 1), ("self_w8_s4",))
    step = fuse_step(plan, {"target": 1}, block_size=4).to_json()
    spec = count_step_bytes(step, models, plan, context=20.0, sequences=3.0)
    assert spec.target_weights == off.target_weights
    assert spec.draft_weights == 2 * off.target_weights
    assert spec.kv_cache == 3 * (kv_bytes("target", 20) + 2 * kv_bytes("target", 12))
    assert spec.embeddings == 3 * (5 + 1 + 2) * ROW
    short = count_step_bytes(step, models, plan, context=10.0, sequences=3.0)
    assert short.kv_cache == 3 * 3 * kv_bytes("target", 10)


def test_passes_of_a_step(tiny_engine, manifest):
    passes = {p.name: count_passes(read_json(tiny_engine / p.file)) for p in manifest.plans}
    assert passes["off"] == {"target": 1}
    assert passes["chain-3"] == {"target": 1, "draft_0": 3}
    assert passes["tree-2-1"] == {"target": 1, "draft_0": 2}


def program(is_tied: bool) -> dict:
    """A table [10, 4] that is looked up, and a head [10, 4] that may be the same weight."""
    graph = fx.Graph()
    table, head, tokens = (graph.placeholder(name) for name in ("table", "head", "tokens"))
    x = graph.call_function(aten.embedding.default, (table, tokens))
    graph.output(graph.call_function(aten.linear.default, (x, head)))
    inputs = [
        {"name": "table", "kind": "weight", "key": "e", "dtype": "float32", "shape": [10, 4]},
        {"name": "head", "kind": "weight", "key": "e" if is_tied else "h", "dtype": "float32"}
        | {"shape": [10, 4]},
        {"name": "tokens", "kind": "input"},
    ]
    return {"inputs": inputs, "graph": graph_to_json(graph)}


def test_a_tied_head_is_read_once_and_whole():
    assert dataclasses.astuple(model_bytes(program(is_tied=True))) == (160, 0)
    assert dataclasses.astuple(model_bytes(program(is_tied=False))) == (160, 16)


def test_a_matrix_is_read_for_each_product():
    """As the one projection of Medusa heads is; what is no product reads it once."""
    graph = fx.Graph()
    x, weight, norm = (graph.placeholder(name) for name in ("x", "weight", "norm"))
    found = [graph.call_function(aten.linear.default, (x, weight)) for _ in range(3)]
    found += [graph.call_function(aten.mul.Tensor, (x, norm)) for _ in range(2)]
    graph.output(graph.call_function(aten.cat.default, (found, -1)))
    inputs = [
        {"name": "x", "kind": "input"},
        {"name": "weight", "kind": "weight", "key": "w", "dtype": "float32", "shape": [10, 4]},
        {"name": "norm", "kind": "weight", "key": "n", "dtype": "float32", "shape": [4]},
    ]
    found_bytes = model_bytes({"inputs": inputs, "graph": graph_to_json(graph)})
    assert dataclasses.astuple(found_bytes) == (3 * 160 + 16, 0)


def mixture(groups: int, experts: int) -> dict:
    """Of 8 experts, those in so many groups of 2, so many are chosen, for rows [N, 4]."""
    graph = fx.Graph()
    x, stack = graph.placeholder("x"), graph.placeholder("stack")
    chosen = x
    for count in (groups, experts):
        top = graph.call_function(aten.topk.default, (chosen, count))
        chosen = graph.call_function(operator.getitem, (top, 1))
    ids = graph.call_function(aten.reshape.default, (chosen, [-1, experts]))
    out = graph.call_function(ops.experts, (x, ids, chosen, stack, stack, "silu"))
    graph.output(out)
    inputs = [
        {"name": "x", "kind": "input"},
        {"name": "stack", "kind": "weight", "key": "w", "dtype": "float32", "shape": [8, 4, 4]},
    ]
    return {"inputs": inputs, "graph": graph_to_json(graph)}


def routed_mixture(experts: int, *, has_shared: bool = False) -> dict:
    """Likewise, chosen by one operator of 2 groups; beside them one that all tokens take."""
    graph = fx.Graph()
    x, router, stack = (graph.placeholder(name) for name in ("x", "router", "stack"))
    shapes = {"router": [8, 4], "stack": [8, 4, 4]}
    more: tuple = ()
    if has_shared:
        shapes |= {"gate_up": [8, 4], "down": [4, 4]}
        beside = (graph.placeholder(name) for name in ("gate_up", "down"))
        more = (None, None, 0, "", "", *beside)
    how = ("softmax", experts, False, 0.0, 1.0, 4, 2, 1, int(has_shared))
    found = graph.call_function(ops.route, (x, router, None, None, *how))
    ids, weights = (graph.call_function(operator.getitem, (found, i)) for i in range(2))
    operands = (x, ids, weights, stack, stack, "silu", *more)
    graph.output(graph.call_function(ops.experts, operands))
    inputs: list[dict] = [{"name": "x", "kind": "input"}]
    inputs += [
        {"name": name, "kind": "weight", "key": name, "dtype": "float32", "shape": shape}
        for name, shape in shapes.items()
    ]
    return {"inputs": inputs, "graph": graph_to_json(graph)}


def test_what_steps_read_of_a_drafter_besides_its_program(tmp_path):
    """Of an engine's files: for each level all of the matrix that makes logits depend on tokens."""
    write_target(tmp_path / "target")
    write_drafter(tmp_path / "drafter", "dspark-deepspec")
    engine = tmp_path / "engine"
    build(tmp_path / "target", [tmp_path / "drafter"], engine, options(plans=(CHAIN,)))
    manifest = open_engine(engine, False, backends=("eager",))
    plan = next(entry.plan for entry in manifest.plans if entry.plan.speculates)
    found = step_bytes(engine, manifest, plan, 10.0, 2.0)
    file = engine / next(m.weights_file for m in manifest.models if m.name == "draft_0")
    with safe_open(file, framework="pt") as weights:
        matrix = weights.get_tensor(BIAS_TENSORS["bias_out"])
    program = read_json(engine / next(m.program_file for m in manifest.models[1:]))
    own = model_bytes(program).weights
    assert matrix.nbytes > 0
    assert found.draft_weights == own + CHAIN.max_depth * matrix.nbytes


def test_experts_that_are_chosen_last_are_read():
    """Not the groups from which they are chosen; without a number of tokens all are."""
    stack = 8 * 4 * 4 * 4
    for tokens, share in ((1, 2 / 8), (2.5, 5 / 8), (4, 1), (9, 1), (None, 1)):
        assert model_bytes(mixture(3, 2), tokens).weights == stack * share
        routed = model_bytes(routed_mixture(2), tokens).weights
        assert routed == stack * share + 8 * 4 * 4
        # what all tokens take is read whole
        shared = model_bytes(routed_mixture(2, has_shared=True), tokens).weights
        assert shared == routed + (8 * 4 + 4 * 4) * 4
        assert model_bytes(program(is_tied=False), tokens).weights == 160


def test_a_window_limits_what_is_read(manifest):
    model = manifest.models[0]
    assert cache_bytes(model.layers, "float32", 50.0) == kv_bytes("target", 50)
    assert cache_bytes(model.layers, "bfloat16", 50.0) == kv_bytes("target", 50) / 2
    first, second = model.layers
    layers = (dataclasses.replace(first, window=16), second)
    model = dataclasses.replace(model, layers=layers)
    assert cache_bytes(model.layers, "float32", 50.0) == (kv_bytes("target", 16 + 50)) / 2
    assert cache_bytes(model.layers, "float32", 8.0) == kv_bytes("target", 8)


def test_mean_context():
    """A prompt of 4 that grows by 2: the average of two prompts is taken."""
    assert mean_context([4, 8], 2) == 7


def test_bandwidth_is_measured():
    found = measure_read_bandwidth(4_000_000)
    assert found["gb_s"] > 0
    assert found["method"] in ("torch sum", "native sum")
    assert found["threads"] == torch.get_num_threads()
    assert found["buffer_bytes"] == 4_000_000


@pytest.mark.parametrize(("plan", "times"), [(OFF, 1), (SpecPlan.from_widths((2, 1)), 2)], ids=str)
def test_states_are_read_by_the_pass_and_by_the_fold(plan, times) -> None:
    """Of each of three sequences: a convolution's last inputs, and a matrix for each head."""
    layer = LayerEntry("layer", 1, 1, DIM, window=0, slab=0, index=0)
    program = ModelShape(hybrid_program(), [layer], "float32")
    draft = ModelShape(one_layer_program("draft_0"), [layer], "float32")
    models = {"target": program} | ({"draft_0": draft} if plan.speculates else {})
    step = fuse_step(plan, dict.fromkeys(models, 1), block_size=4, states=hybrid_engine.SLABS)
    found = count_step_bytes(step.to_json(), models, plan, context=20, sequences=3)
    assert found.states == times * 3 * 4 * (3 * DIM + 2 * 4 * 4)
    assert found.total > found.states
