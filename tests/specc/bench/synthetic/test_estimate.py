"""Nodes of captured steps, counted on tensors without data, and what is estimated from them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from specc.artifact.in_memory import BenchPrograms
from specc.bench.step_bytes import model_bytes
from specc.bench.synthetic import nodes as node_counting
from specc.bench.synthetic.estimate import make_estimate
from specc.bench.synthetic.live_values import LiveValues
from specc.bench.synthetic.nodes import Launches, Node, nodes_per_layer, step_nodes
from specc.cli.main import app
from specc.compiler.in_memory import ShapeOptions, compile_shapes
from specc.cost.graph_costs import ATTEND, OTHER, PRODUCT, GraphCosts
from specc.kernels.cuda import accept_walk
from specc.kernels.cuda.act_and_mul import act_and_mul
from specc.kernels.cuda.few_rows import Product
from specc.kernels.cuda.recorded import Machine, recorded
from specc.kernels.cuda.register import kernels
from specc.progress import PhaseTimer
from specc.runtime.backends.cuda.step_rows import step_rows
from specc.speculation.plans import SpecPlan
from tests.models import tiny_config
from tests.tiers import every

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1, 1)), SpecPlan.from_widths((3, 2, 1))
OFF = SpecPlan.from_widths(())
CONTEXT = 128
# from after one attention to the end of the next, which merges its splits itself
LLAMA_LAYER = [
    "_skinny_linear_kernel", "_add_norm_kernel", "_skinny_linear_kernel",
    "_add_norm_rope_write_kernel", "attend_kernel",
]  # fmt: skip
# where the library's products were measured to be faster, or rows are many
LIBRARY_LAYER = [
    "linear", "_rms_norm_kernel", "linear", "_act_and_mul_kernel", "linear",
    "_rms_norm_kernel", "linear", "_rope_write_kernel", "attend_kernel",
]  # fmt: skip


@functools.cache
def compiled(
    backend: str = "cuda", batch_size: int = 1, quantization: str | None = None
) -> BenchPrograms:
    configs = [tiny_config("llama", num_hidden_layers=3), tiny_config("llama", num_hidden_layers=2)]
    has_draft = backend == "cuda"
    if not has_draft:
        del configs[1:]
    options = ShapeOptions(
        (CHAIN, TREE) if has_draft else (),
        dtype="bfloat16",
        batch_size=batch_size,
        context=CONTEXT,
        tokens=24,
        backend=backend,
        quantization=quantization,
    )
    return compile_shapes("TD"[: len(configs)], configs, options, PhaseTimer())


def count(plan: SpecPlan = CHAIN, is_filtered: bool = False, **options: Any) -> list[Node]:
    launches = Launches(recorded, kernels())
    return step_nodes(compiled(**options), plan, CONTEXT, launches, is_filtered=is_filtered)


def of_model(nodes: list[Node], model: str) -> list[Node]:
    return [node for node in nodes if node.model == model]


@pytest.mark.default("chain-1", "tree-16")
@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("plan", [OFF, CHAIN, TREE], ids=["off", "chain", "tree"])
def test_rows_that_steps_have_are_measured(
    plan: SpecPlan, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody measures is the library's, however slow: no product of a step may have others."""
    found: dict[str, set[int]] = {"target": set(), "draft_0": set()}
    running: list[str] = []
    forward, make = node_counting._CountedModel.forward, Product.of.__func__  # type: ignore[attr-defined]

    def run(model: Any, *inputs: Any) -> torch.Tensor:
        running.append(model._name)
        return forward(model, *inputs)

    def of(cls: type, operator: str, num_rows: int, weight: torch.Tensor) -> Product:
        product = make(cls, operator, num_rows, weight)
        found[running[-1]].add(product.rows)
        return product

    monkeypatch.setattr(node_counting._CountedModel, "forward", run)
    monkeypatch.setattr(Product, "of", classmethod(of))
    count(plan, batch_size=batch_size)
    for model, draft in (("target", None), ("draft_0", "draft_0")):
        measured = step_rows([plan], draft, batch_size)
        assert found[model] <= set(measured), model
        # the most, of the whole batch
        assert max(found[model], default=0) == max(measured, default=0)
    assert bool(found["draft_0"]) == plan.speculates


@pytest.mark.parametrize(("tile", "layer"), [(0, LLAMA_LAYER), (None, LIBRARY_LAYER)])
def test_nodes_of_a_llama_layer(tile: int | None, layer: list[str]) -> None:
    launches = Launches(functools.partial(recorded, tile=tile), kernels())
    nodes = step_nodes(compiled(), CHAIN, CONTEXT, launches)
    names = [node.name for node in of_model(nodes, "target")]
    ends = [i for i, name in enumerate(names) if name == "attend_kernel"]
    layers = [names[end + 1 : following + 1] for end, following in itertools.pairwise(ends)]
    assert layers == [layer] * 2
    assert nodes_per_layer(nodes, "target") == [len(layer)] * 2


@pytest.mark.parametrize("is_filtered", [False, True], ids=["unfiltered", "filtered"])
def test_nodes_of_a_step_besides_layers(is_filtered: bool) -> None:
    """By name; a layer that grows, or one of these, is a node more in every pass."""
    layer = collections.Counter(LLAMA_LAYER)
    # the first layer starts with tokens, by the kernel that the others start with
    ends = {"embedding": 1, "_add_norm_kernel": 1}
    filters: collections.Counter[str] = collections.Counter()
    if is_filtered:
        filters.update(row_filters_kernel=4)
    commit = ("commit_rows_kernel", "record_tokens_kernel", "next_tokens_kernel")
    walk = ("tree_context_kernel", "node_best_kernel", "accept_walk_kernel")
    off = filters + collections.Counter((*walk, *commit, "leave_step_kernel", "tree_rows_kernel"))

    def passes(number: int, layers: int) -> collections.Counter[str]:
        found = collections.Counter({name: layers * count for name, count in layer.items()})
        found.update(ends)
        return collections.Counter({name: number * count for name, count in found.items()})

    found = collections.Counter(node.name for node in count(OFF, is_filtered))
    assert found == off + passes(1, 3)
    level = filters + collections.Counter(("draft_parts_kernel", "draft_merge_kernel"))
    level["tree_rows_kernel"] += 1
    chain = off + passes(1, 3) + passes(4, 2) + filters
    for _ in range(4):
        chain += level
    # rows of the draft, and tokens of the levels side by side
    chain.update({"commit_rows_kernel": 1, "cat": 1})
    if is_filtered:
        # logits of the levels likewise; passes of walks that try proposals
        chain.update({"cat": 1, "accept_walk_kernel": accept_walk.CHAIN_ROUNDS})
    assert collections.Counter(node.name for node in count(CHAIN, is_filtered)) == chain


def test_every_pass_of_the_draft_counts_and_layers_end_with_their_pass() -> None:
    nodes = count()
    assert nodes_per_layer(nodes, "draft_0") == [len(LLAMA_LAYER)] * 4
    assert nodes_per_layer(count(TREE), "draft_0") == [len(LLAMA_LAYER)] * 3
    assert nodes_per_layer(count(OFF), "draft_0") == []
    attends = [node.name for node in nodes if node.model == "draft_0"].count("attend_kernel")
    assert attends == 2 * 4


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("num_sms", [1, 132])
def test_attention_is_one_node_whatever_its_splits(batch_size: int, num_sms: int) -> None:
    launches = Launches(functools.partial(recorded, machine=Machine(90, num_sms)), kernels())
    nodes = step_nodes(compiled(batch_size=batch_size), OFF, CONTEXT, launches)
    assert nodes_per_layer(nodes, "target") == [5] * 2


def test_unfused_graphs_have_more_nodes() -> None:
    """The count follows the graph, not a formula."""
    fused, plain = count(OFF), count(OFF, backend="eager")
    assert min(nodes_per_layer(plain, "target")) > len(LLAMA_LAYER) + 5
    assert len(plain) > len(fused)


def test_bytes_of_products_are_those_of_the_weights() -> None:
    nodes = of_model(count(), "target")
    products = sum(node.num_bytes for node in nodes if node.kind == PRODUCT)
    weights = model_bytes(compiled().models[0].program).weights
    assert weights * 0.95 < products < weights * 1.3
    # of the embedding rows of tokens alone: the first layer reads no residual
    found = {node.operator: node.num_bytes for node in nodes}
    assert found["embed_norm_rope_write"] < found["add_norm_rope_write"]
    # rows of all committed tokens, K and V
    attention = next(node for node in nodes if node.kind == ATTEND)
    config = tiny_config("llama")
    row = 2 * config.num_key_value_heads * config.head_dim * 2
    assert CONTEXT * row <= attention.num_bytes < 1.5 * CONTEXT * row


def test_kernels_and_allocations_within_an_operator() -> None:
    """What an operator launches counts; views, and memory that it asks for, do not."""
    mode = compiled()
    nodes = step_nodes(mode, OFF, CONTEXT, Launches(recorded, kernels()))
    names = {node.name for node in nodes}
    assert not names & {"new_empty", "empty", "view", "reshape", "expand", "slice", "unsqueeze"}
    without = {name: kernel for name, kernel in kernels().items() if name != "add_norm_gate_up"}
    plain = step_nodes(mode, OFF, CONTEXT, Launches(recorded, without))
    assert [node.name for node in plain].count("add_norm_gate_up") == 3


def test_launches_are_noted_while_recorded_only() -> None:
    x = torch.empty(2, 8, device="meta")
    names: list[str] = []
    note = lambda name, tensors, early: names.append(name)  # noqa: E731
    with recorded(note):
        act_and_mul(x, "silu")
    assert names == ["_act_and_mul_kernel"]
    with pytest.raises(ZeroDivisionError), recorded(note):
        raise ZeroDivisionError
    here = torch.ones(1, 8)
    assert torch.isfinite(act_and_mul(here, "relu")).all()
    assert names == ["_act_and_mul_kernel"]


@pytest.mark.slow
def test_an_estimate_is_the_sum_of_its_nodes() -> None:
    costs = GraphCosts(
        bytes_per_s=2e9,
        copy_share=0.5,
        gap_s=1e-3,
        ramp_s={PRODUCT: 1e-3, ATTEND: 2e-3, OTHER: 3e-3},
        stream_share={PRODUCT: 1.0, ATTEND: 0.5, OTHER: 1.0},
    )
    assert costs.node_ms(PRODUCT, 10**6) == pytest.approx(1 + 1 + 1)
    assert costs.node_ms(ATTEND, 10**6) == pytest.approx(1 + 2 + 2)
    assert costs.floor_ms(3 * 10**6) == pytest.approx(3)
    report = make_estimate(compiled(), CONTEXT, {}, costs)
    for name, plan in report["plans"].items():
        nodes = count(next(p for p in compiled().plans if p.name == name))
        assert plan["nodes"] == len(nodes) == sum(plan["kernels"].values())
        total = sum(costs.node_ms(node.kind, node.num_bytes) for node in nodes)
        assert plan["estimate_ms"] == pytest.approx(total)
        parts = [*plan["models"].values(), plan["between"]]
        assert sum(part["estimate_ms"] for part in parts) == pytest.approx(total)
        assert plan["ratio"] == pytest.approx(plan["estimate_ms"] / plan["floor_ms"])
    slower = make_estimate(compiled(), CONTEXT, {}, dataclasses.replace(costs, gap_s=2e-3))
    for name, plan in report["plans"].items():
        added = slower["plans"][name]["estimate_ms"] - plan["estimate_ms"]
        assert added == pytest.approx(plan["nodes"])


@functools.cache
def compiled_with_heads() -> BenchPrograms:
    """Of the sizes that attention has dependent launches for."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1}
    configs = [tiny_config("llama", num_hidden_layers=n, head_dim=64, **sizes) for n in (2, 1)]
    options = ShapeOptions((CHAIN,), "bfloat16", 1, CONTEXT, 24, "cuda")
    return compile_shapes("TD", configs, options, PhaseTimer())


def test_gaps_that_dependent_launches_may_close() -> None:
    """Those between two of them alone: other kernels do not let the next one start."""
    costs = GraphCosts(gap_s=1e-3)
    report = make_estimate(compiled_with_heads(), CONTEXT, {}, costs)
    # all nodes of a layer, and the head of a pass: from the embedding's on, each after another;
    # then from the walk on what ends a step, with rows of each model to commit
    for name, per_pass, ends in (("off", [2], 5), ("chain-4", [2, *4 * [1]], 6)):
        plan = report["plans"][name]
        found = plan["dependent"]
        assert found["nodes"] == sum(5 * layers + 1 for layers in per_pass) + ends
        gaps = sum(5 * layers for layers in per_pass) + ends - 1
        assert found["gaps"] == gaps
        assert found["least_ms"] == pytest.approx(plan["estimate_ms"] - gaps)
        assert found["least_ratio"] == pytest.approx(found["least_ms"] / plan["floor_ms"])
    # attention with heads of another size is none: what is left of layers are gaps after three
    # products
    layers = len(compiled().models[0].entry.layers)
    found = make_estimate(compiled(), CONTEXT, {})["plans"]["off"]["dependent"]
    assert found["gaps"] == 3 * layers + 4


@pytest.mark.slow
def test_the_report_names_what_is_asked_of_it() -> None:
    report = make_estimate(compiled(), CONTEXT, {"batch_size": 1})
    assert report["target"]["nodes_per_layer"] == report["draft"]["nodes_per_layer"] == 5
    assert set(report["plans"]) == {"chain-4", "tree-3-2-1", "off"}
    chain = report["plans"]["chain-4"]
    assert (chain["models"]["draft"]["passes"], chain["models"]["target"]["passes"]) == (4, 1)
    assert "draft" not in report["plans"]["off"]["models"]
    assert all(item["source"] for item in report["assumptions"])


@pytest.mark.slow
def test_sampling_is_a_part_of_what_lies_between_passes() -> None:
    report = make_estimate(compiled(), CONTEXT, {})
    found = {name: plan["sampling"] for name, plan in report["plans"].items()}
    for name, plan in report["plans"].items():
        assert 0 < found[name]["nodes"] < plan["between"]["nodes"]
        assert 0 < found[name]["estimate_ms"] < plan["between"]["estimate_ms"]
    # context, best of each node and the walk; two for each level of a draft
    assert found["off"]["nodes"] == 3
    assert found["chain-4"]["nodes"] == 3 + 4 * 2
    assert found["tree-3-2-1"]["nodes"] == 3 + 3 * 2
    # four of filters more for each, and for the proposals' logits; passes that programs share
    filtered = {name: plan["filtered"] for name, plan in report["plans"].items()}
    more = {"off": 4, "chain-4": 4 + 4 * 4 + 4 + 2, "tree-3-2-1": 4 + 3 * 4 + 4 + 4}
    for name, plan in report["plans"].items():
        own = filtered[name]
        assert own["sampling"]["nodes"] - plan["sampling"]["nodes"] == more[name]
        # logits of levels are put side by side before they are filtered
        assert own["nodes"] - plan["nodes"] == more[name] + (name != "off")
        added = own["sampling"]["estimate_ms"] - plan["sampling"]["estimate_ms"]
        assert 0 < added <= (own["estimate_ms"] - plan["estimate_ms"]) * (1 + 1e-9)
        assert own["ratio"] == pytest.approx(own["estimate_ms"] / plan["floor_ms"])
    # a pass over the logits at least for the facts of its rows, pivots, the list and the best
    row = compiled().models[0].entry.vocab_size * 2
    assert filtered["off"]["sampling"]["bytes"] >= found["off"]["bytes"] + 4 * row
    assert found["off"]["bytes"] >= row


def test_values_that_are_alive_at_once() -> None:
    """By hand: views keep what they show, what nobody has any more goes, inputs do not count."""
    live = LiveValues()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            live.note([x for x in args if isinstance(x, torch.Tensor)], [result])
            return result

    given = torch.empty(4096, device="meta")
    with Noting():
        part = given[:1000]
        a = part + 1  # 4000 bytes in blocks of 512: 4096
        assert live.most == 4096
        row = a[:10]
        del a
        row.add_(1)
        b = part * 2
        assert live.most == 2 * 4096
        del row
        c = b[:1] * b[:1]
        assert live.most == 2 * 4096
        d = part * 3
        assert live.most == 2 * 4096 + 512
        del b, c, d
        part + part
    assert live.most == 2 * 4096 + 512


@pytest.mark.slow
def test_the_second_graph_fits_into_the_memory_of_the_first() -> None:
    """Its values take no more, so that in a pool with those of the first it needs nothing."""
    for batch_size in (1, 16):
        report = make_estimate(compiled(batch_size=batch_size), CONTEXT, {})
        for name, plan in report["plans"].items():
            assert 0 < plan["values_bytes"] <= plan["filtered"]["values_bytes"], name
    # with filters, logits of all levels side by side, and float32 copies of their rows
    plans = report["plans"]
    row = compiled().models[0].entry.vocab_size * 2
    more = plans["chain-4"]["filtered"]["values_bytes"] - plans["chain-4"]["values_bytes"]
    assert more > 16 * 4 * row


@pytest.mark.slow
@pytest.mark.parametrize("layout", every(3, ["int8", "int4-g64", "fp8"], first=1))
def test_quantized_weights_count_the_bytes_that_they_have(layout: str) -> None:
    """Levels, scales and zero points once, in the nodes of products and in the floor."""
    programs = compiled(quantization=layout)
    launches = Launches(recorded, kernels())
    nodes = of_model(step_nodes(programs, OFF, CONTEXT, launches, is_filtered=False), "target")
    products = [node for node in nodes if node.name == "linear_q_kernel"]
    assert {node.kind for node in products} == {PRODUCT}
    stored = [
        math.prod(item["shape"])
        for item in programs.models[0].program["inputs"]
        if "quantized_of" in item
    ]
    assert len(products) == len(stored) == 4 * 3 + 1
    assert not {node.operator for node in nodes} & {"linear", "skinny_linear"}
    assert not [node for node in nodes if "decode" in node.name]
    # rows and results besides
    assert sum(stored) < sum(node.num_bytes for node in products) < 1.3 * sum(stored)
    plain, own = (
        make_estimate(item, CONTEXT, {})["plans"]["off"]["bytes"] for item in (compiled(), programs)
    )
    shapes = [i["quantized_of"] for i in programs.models[0].program["inputs"] if "layout" in i]
    assert plain - own == 2 * sum(math.prod(shape) for shape in shapes) - sum(stored)
    counted = collections.Counter(node.product for node in products)
    assert counted == collections.Counter((1, *shape) for shape in shapes)


def test_the_command(tmp_path) -> None:
    config = tiny_config("llama", architectures=["LlamaForCausalLM"], num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    out = tmp_path / "out.json"
    options = ["--synthetic", str(tmp_path), "--context", "64", "--estimate", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert {"nodes", "floor_ms", "estimate_ms"} <= set(report["plans"]["off"])
    assert report["settings"] == {
        "synthetic": str(tmp_path),
        "draft": None,
        "context": 64,
        "batch_size": 1,
        "dtype": "bfloat16",
        "quantize": None,
        "draft_quantize": None,
        "weight_fragments": False,
    }
    for text in ("nothing was measured", "assumed; to be measured", "off"):
        assert text in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (["--against", "transformers"], "--against with --estimate"),
        (["--synthetic-acceptance", ".5"], "--synthetic-acceptance .5 with --estimate"),
    ],
)
def test_what_only_measurements_have_is_refused(more: list[str], found: str) -> None:
    shapes = ["--synthetic", "llama-3.1-8b/llama-3.2-1b", "--estimate"]
    result = CliRunner().invoke(app, ["bench", *shapes, *more])
    assert result.exit_code != 0
    assert found in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (["--estimate", "--quantize", "int5"], "--quantize int5"),
        (["--estimate", "--quantize-group", "32"], "--quantize-group 32"),
    ],
)
def test_layouts_that_are_refused(more: list[str], found: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--synthetic", "llama-3.2-1b", *more])
    assert result.exit_code != 0
    assert found in " ".join(result.output.split())


def test_an_engine_is_not_estimated(tmp_path) -> None:
    result = CliRunner().invoke(app, ["bench", str(tmp_path), "--estimate"])
    assert result.exit_code != 0
    assert "--estimate with an engine" in " ".join(result.output.split())
