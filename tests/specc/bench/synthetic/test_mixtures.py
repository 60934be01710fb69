"""Shapes with experts and with latent attention, at reduced sizes: programs, weights, bytes."""

from __future__ import annotations

import functools
import json
import math
from functools import partial
from typing import Any

import pytest

from specc.artifact.in_memory import BenchPrograms
from specc.bench import device as bench_device
from specc.bench.device import RepeatingDevice
from specc.bench.step_bytes import ModelShape, StepBytes, count_step_bytes, model_bytes
from specc.bench.synthetic.engine import make_engine
from specc.bench.synthetic.nodes import Launches, step_nodes
from specc.bench.synthetic.shapes import SHAPES, Shape
from specc.compiler.in_memory import ShapeOptions, compile_shapes
from specc.cost.graph_costs import ATTEND
from specc.errors import UnsupportedAttentionError
from specc.kernels.cuda.recorded import recorded
from specc.kernels.cuda.register import kernels
from specc.progress import PhaseTimer
from specc.speculation.plans import SpecPlan
from tests import command_line
from tests.models import VOCAB
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.specc.bench.synthetic.test_shapes import (
    check_capture,
    check_tokens,
    check_weights,
    compile_tiny,
    draw,
    generate,
)
from tests.tiers import every, only

invoke = partial(command_line.invoke, "bench")
OFF, TREE = SpecPlan("off"), SpecPlan.from_widths((2, 1))
_SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
# name → sizes in place of the published ones; what is left is how layers are made
SMALL: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _SMALL | {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 16}
    | {"num_experts_per_tok": 3},
    "deepseek-v2-lite": _SMALL | {"num_key_value_heads": 4, "n_routed_experts": 16}
    | {"num_experts_per_tok": 3, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
    | {"qk_rope_head_dim": 8, "v_head_dim": 16},
}  # fmt: skip
DRAFT = {
    key: size
    for key, size in SMALL["qwen3-30b-a3b"].items()
    if key not in ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
} | {"num_hidden_layers": 1}
NUM_EXPERTS, CHOSEN = 16, 3
# layers with experts, of two
MIXTURES = {"qwen3-30b-a3b": 2, "deepseek-v2-lite": 1}


def small(name: str) -> dict[str, Any]:
    return SHAPES[name] | SMALL.get(name, DRAFT)


@functools.cache
def compiled(name: str, backend: str = "cuda", **options: Any) -> BenchPrograms:
    """A target, and a draft that is no mixture, where a plan drafts."""
    plans = options.pop("plans", ())
    names = [name, "qwen3-0.6b"] if plans else [name]
    configs = [Shape(item, fields=small(item)).make_config() for item in names]
    wanted = {"dtype": "float32", "batch_size": 2, "context": 5, "tokens": 24} | options
    shape = ShapeOptions(plans, backend=backend, **wanted)
    return compile_shapes(names, configs, shape, PhaseTimer())


def operators(programs: BenchPrograms) -> list[str]:
    graph = programs.models[0].program["graph"]
    return [node["target"] for node in graph["nodes"] if node["op"] == "call_function"]


@pytest.mark.default("deepseek-v2-lite")
@pytest.mark.parametrize("name", SMALL)
def test_what_layers_are_made_of(name: str) -> None:
    """All that a mixture does with its experts is one operator, and caches hold latents."""
    found = operators(compiled(name))
    assert found.count("specc.experts.default") == MIXTURES[name]
    assert not [item for item in found if "grouped" in item or "sort" in item]
    (slab,) = compiled(name).models[0].entry.slabs
    if name == "deepseek-v2-lite":
        # one row for all heads, whose first columns are its value
        assert (slab.num_kv_heads, slab.head_dim, slab.value_dim) == (1, 16 + 8, 16)
        assert slab.values_in_keys
    else:
        assert (slab.num_kv_heads, slab.head_dim, slab.values_in_keys) == (2, 16, False)


def test_attention_that_the_backend_lacks_is_refused() -> None:
    """As `specc compile` refuses it: no step is measured that computes something else."""
    with pytest.raises(UnsupportedAttentionError) as caught:
        compile_tiny("gpt_oss", has_draft=False, backend="onnx")
    assert "sinks" in caught.value.found


@pytest.mark.parametrize("name", SMALL)
def test_the_cache_is_as_large_as_the_plan_says(name: str) -> None:
    programs = compiled(name)
    engine = make_engine(programs, draw(programs), RepeatingDevice(), "cuda")
    slabs = engine.cache.slabs["target"]
    assert sum(slab.nbytes for slab in slabs) == programs.models[0].memory.cache


@pytest.mark.parametrize(
    ("name", "columns"), [("qwen3-30b-a3b", 2 * 2 * 16), ("deepseek-v2-lite", 24)]
)
def test_rows_of_the_cache_are_read_once(name: str, columns: int) -> None:
    """Of latents as well, whose values are columns of the keys."""

    def read(context: int) -> int:
        nodes = step_nodes(compiled(name), OFF, context, Launches(recorded, kernels()))
        return next(node.num_bytes for node in nodes if node.kind == ATTEND)

    # two sequences, float32
    assert read(20) - read(10) == 10 * 2 * columns * 4


@pytest.mark.parametrize("name", SMALL)
def test_weights_are_there_once(name: str) -> None:
    programs = compiled(name)
    weights = draw(programs)["target"]
    assert programs.models[0].memory.weights == check_weights(programs.models[0], weights)
    # drawn, and not what memory happened to hold
    for key, weight in weights.items():
        if weight.dim() > 1 and "constant" not in key:
            assert float(weight.std()) == pytest.approx(0.02, rel=0.1), key


@pytest.mark.parametrize("name", SMALL)
def test_the_module_computes_what_the_programs_do(name: str) -> None:
    check_tokens(compiled(name))


@pytest.mark.slow
@pytest.mark.parametrize("layout", every(3, ["int8", "int4-g64", "fp8"], first=1))
@pytest.mark.parametrize("name", only(("deepseek-v2-lite",), SMALL))
def test_experts_stay_in_floats(name: str, layout: str) -> None:
    """As `specc compile --quantize` leaves them for this backend; all else is in integers."""
    programs = compiled(name, quantization=layout, dtype="bfloat16")
    found = operators(programs)
    assert found.count("specc.experts.default") == MIXTURES[name]
    plain = [
        item["key"]
        for item in programs.models[0].program["inputs"]
        if item["kind"] == "weight" and "layout" not in item and len(item["shape"]) > 1
    ]
    # routers have fewer outputs than a block
    kept = ("embed_tokens", "experts.gate_up_proj", "experts.down_proj", "mlp.gate.", "kv_b_proj")
    assert all(any(part in key for part in kept) for key in plain), plain
    assert "specc.linear_q.default" in found
    engine = make_engine(programs, draw(programs), RepeatingDevice(), "cuda")
    outputs, _ = generate(engine, "off")
    assert all(0 <= token < VOCAB for output in outputs for token in output)


def bytes_of(programs: BenchPrograms, plan: SpecPlan, sequences: int) -> StepBytes:
    models = {
        m.entry.name: ModelShape(m.program, m.entry.layers, m.entry.dtype) for m in programs.models
    }
    return count_step_bytes(programs.steps[plan.name], models, plan, 20, sequences)


@pytest.mark.default("deepseek-v2-lite-cuda")
@pytest.mark.parametrize("backend", every(3, ["cuda", "eager", "cpu"]))
@pytest.mark.parametrize("name", SMALL)
def test_a_pass_reads_the_experts_that_its_tokens_choose(name: str, backend: str) -> None:
    """Each token others, at most all; of 16 a token has 3."""
    programs = compiled(name, backend, plans=(TREE,))
    inputs = programs.models[0].program["inputs"]
    experts = sum(math.prod(i["shape"]) * 4 for i in inputs if ".experts." in i.get("key", ""))
    whole = model_bytes(programs.models[0].program).weights
    assert experts > 0.2 * whole
    for plan, sequences, share in (
        (OFF, 1, CHOSEN / NUM_EXPERTS),
        (OFF, 2, 2 * CHOSEN / NUM_EXPERTS),
        # of a tree with a root, 2 and 2 nodes
        (TREE, 1, 5 * CHOSEN / NUM_EXPERTS),
        (TREE, 2, 1),
    ):
        read = bytes_of(programs, plan, sequences).target_weights
        assert read == pytest.approx(whole - experts * (1 - share), abs=1)


def test_integers_of_experts_are_as_many() -> None:
    """Backend eager multiplies by them."""
    programs = compiled("qwen3-30b-a3b", "eager", quantization="int8")
    inputs = programs.models[0].program["inputs"]
    experts = sum(math.prod(i["shape"]) for i in inputs if ".experts." in i.get("key", ""))
    assert "specc.grouped_mm_q.default" in operators(programs)
    whole = model_bytes(programs.models[0].program).weights
    read = bytes_of(programs, OFF, 1).target_weights
    assert read == pytest.approx(whole - experts * (1 - CHOSEN / NUM_EXPERTS), abs=1)


@pytest.mark.parametrize(
    ("name", "quantization", "item", "shared"),
    [
        ("qwen3-30b-a3b", None, 4, 0),
        ("qwen3-30b-a3b", "int8", 1, 0),
        # in the same launches two that all tokens take
        ("deepseek-v2-lite", None, 4, 2),
    ],
)
def test_nodes_move_the_experts_that_are_chosen(
    name: str, quantization: str | None, item: int, shared: int
) -> None:
    programs = compiled(name, batch_size=1, quantization=quantization)
    nodes = step_nodes(programs, OFF, 20, Launches(recorded, kernels()), is_filtered=False)
    inner, outer = _SMALL["moe_intermediate_size"], _SMALL["hidden_size"]
    for kernel, rows in (("experts_gate_up_kernel", 2 * inner), ("experts_down_kernel", inner)):
        found = [node.num_bytes for node in nodes if node.name == kernel]
        matrix = item * rows * outer
        assert len(found) == MIXTURES[name]
        # rows and results besides, and scales
        read = (CHOSEN + shared) * matrix
        assert all(read <= size < 1.3 * read for size in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_device_that_captures_says_the_same(name: str) -> None:
    check_capture(compiled(name, plans=(TREE,), acceptance=(0.6, 0.3)), "tree-2-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shapes", "more"),
    [
        (
            "qwen3-30b-a3b/qwen3-0.6b",
            ("--tree", "2,1", "--against", "transformers", "--dtype", "float32"),
        ),
        pytest.param("deepseek-v2-lite", (), marks=pytest.mark.slow),
        pytest.param("deepseek-v2-lite", ("--quantize", "int8"), marks=pytest.mark.slow),
        pytest.param(
            "deepseek-v2-lite",
            ("--draft", "self:window=16,sink=2", "--synthetic-acceptance", ".8"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3-30b-a3b/qwen3-0.6b",
            ("--num-speculative-tokens", 2, "--quantize", "int4", "--synthetic-acceptance", ".8"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: "-".join(map(str, value)).strip("-") if isinstance(value, tuple) else value,
)
def test_the_command(shapes: str, more: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """From names to the report, every step captured on the simulated device."""
    for name in ("qwen3-30b-a3b", "deepseek-v2-lite", "qwen3-0.6b"):
        monkeypatch.setitem(SHAPES, name, small(name))
    monkeypatch.setitem(bench_device.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(bench_device, "open_device", lambda: (SimulatedDevice(), "cuda"))
    quick = ("--context", 30, "--tokens", 13, "--rounds", 1, "--warmup", 0)
    result = invoke("--synthetic", shapes, *quick, *more, "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [model["source"] for model in report["engine"]["models"]] == shapes.split("/")
    for run in report["runs"]:
        assert run["num_output_tokens"] == 13
        assert run["step"] is None or run["step"]["is_captured"]
        assert run["identical"] in (True, None), run["differences"]
    assert not [note for note in report["notes"] if "not measured" in note]
