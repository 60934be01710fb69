"""Heads by name: their sizes, what they read and draft, and what their steps cost."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.in_memory import BenchPrograms, HeadShape
from specc.artifact.weights import MemoryReader
from specc.bench.device import RepeatingDevice
from specc.bench.step_bytes import ModelShape, StepBytes, count_passes, count_step_bytes
from specc.bench.synthetic.drafters import HEADS, _block_ids, make_head
from specc.bench.synthetic.engine import make_engine
from specc.bench.synthetic.estimate import make_estimate
from specc.bench.synthetic.shapes import SHAPES, Shape
from specc.bench.synthetic.weights import make_weights, shared_bytes
from specc.compiler.in_memory import ShapeOptions, compile_shapes
from specc.drafters.block import OF_TOKEN
from specc.errors import ConfigError
from specc.passes.drafters.head_spec import TargetFacts
from specc.passes.drafters.recognise import fit_head
from specc.passes.drafters.tap_ids import default_ids
from specc.progress import PhaseTimer
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.plans import SpecPlan
from tests.models import VOCAB, tiny_config
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.specc.bench.synthetic.test_shapes import PROMPTS, generate
from tests.tiers import only

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((3, 2))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 3, 2))
CPU = torch.device("cpu")
# head → the kind of target that tests have for it: DSpark is published for Qwen3 alone, and what
# is compiled for one test here serves the others
TARGETS = {name: "qwen3" if name in ("dflash", "dspark") else "llama" for name in HEADS}
PUBLISHED = [
    pytest.param(name, label, id=f"{name}-{label}")
    for name in HEADS
    for label, fields in SHAPES.items()
    if fields["model_type"] in ("qwen3", "llama" if name != "dspark" else "qwen3")
]
# of the published ones: millions of parameters that are their own
SIZES = {("eagle3", "llama-3.1-8b"): 424.7, ("dflash", "qwen3-8b"): 1048.6}


def compile_tiny(
    head: str, target: str = "", plans: tuple[SpecPlan, ...] = (CHAIN, TREE), **options: Any
) -> BenchPrograms:
    """A target and its head, for two prompts of 5 tokens."""
    return _compile_once(head, target or TARGETS[head], plans, **options)


@functools.cache
def _compile_once(
    head: str, target: str, plans: tuple[SpecPlan, ...], **options: Any
) -> BenchPrograms:
    # the others read hidden states of several layers, which have to be different ones
    config = tiny_config(target, num_hidden_layers=1 if head == "medusa" else 8)
    wanted = {"dtype": "float32", "batch_size": 2, "context": 5, "tokens": 24} | options
    made = make_head(head, "T", config)
    return compile_shapes(["T"], [config], ShapeOptions(plans, **wanted), PhaseTimer(), made)


def draw(programs: BenchPrograms) -> dict[str, dict[str, torch.Tensor]]:
    """Weights of all models, those of matrices so large that tokens depend on their context."""
    weights = {m.entry.name: make_weights(m, CPU, i) for i, m in enumerate(programs.models)}
    for model in programs.models:
        for tensor in model.module.parameters():
            if tensor.dim() > 1:
                tensor.data.mul_(8)
    return weights


def fit(name: str, label: str) -> tuple[HeadShape, Any]:
    """A head of a published shape, and what the compiler takes it for."""
    config = Shape(label, fields=SHAPES[label]).make_config()
    made = make_head(name, label, config)
    reader = MemoryReader(made.tensors, name)
    spec = fit_head(
        reader, dict(made.config), Path(name), Path(name), TargetFacts.of_config(label, config)
    )
    return made, spec


@pytest.mark.parametrize(("name", "label"), PUBLISHED)
def test_the_compiler_knows_the_head_of_each_shape(name, label):
    made, spec = fit(name, label)
    assert spec.kind == name
    assert spec.width == SHAPES[label]["hidden_size"]
    if (name, label) in SIZES:
        own = [tensor for tensor in made.tensors.values() if tensor.is_floating_point()]
        assert sum(tensor.numel() for tensor in own) / 1e6 == pytest.approx(
            SIZES[name, label], abs=0.1
        )


def test_what_the_published_heads_read_and_propose():
    _, eagle = fit("eagle3", "llama-3.1-8b")
    assert (eagle.layout, eagle.boundaries) == ("SafeAILab", (2, 16, 29))
    assert eagle.draft_vocab_size == len(eagle.target_ids) == 32000
    assert int(eagle.target_ids[-1]) > 128000 - 100
    assert eagle.shared == ("embed_tokens.weight",)
    assert not eagle.has_qk_norm
    _, dflash = fit("dflash", "qwen3-8b")
    assert (dflash.layout, dflash.boundaries) == ("z-lab", (2, 10, 18, 26, 34))
    assert (dflash.block.size, dflash.block.num_proposed) == (16, 15)
    assert dflash.block.mask_token_id == 151669
    assert dflash.shared == ("embed_tokens.weight", "lm_head.weight")
    assert dflash.windows == (0,) * 5
    _, dflash = fit("dflash", "llama-3.1-8b")
    assert (dflash.block.size, dflash.boundaries) == (10, (2, 9, 16, 23, 30))
    _, dspark = fit("dspark", "qwen3-8b")
    assert (dspark.layout, dspark.boundaries) == ("DeepSpec", (2, 10, 18, 26, 34))
    assert (dspark.block.size, dspark.block.num_proposed, dspark.rank) == (7, 7, 256)
    assert (dspark.block.bias_kind, dspark.block.confidence) == ("vanilla", OF_TOKEN)
    assert dspark.shared == ()
    _, medusa = fit("medusa", "llama-3.1-8b")
    assert (medusa.block.size, medusa.num_layers, medusa.num_rows) == (3, 1, 128256)
    assert (medusa.boundaries, medusa.is_last_normed) == ((32,), True)
    assert not medusa.has_one_projection


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_targets_that_have_no_such_head(name):
    other = "llama" if name == "dspark" else "gpt2"
    for config, words in (
        (tiny_config(other), f"a model of type {other}"),
        (tiny_config("qwen3", num_hidden_layers=1), "a target of 1 layers"),
        (tiny_config("qwen3", num_hidden_layers=3), "a target of 3 layers"),
        (tiny_config("qwen3", num_hidden_layers=6), "a target of 6 layers"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            make_head(name, "T", config)
        assert caught.value.needed
        assert caught.value.do


@pytest.mark.parametrize(("name", "least"), [("eagle3", 7), ("dflash", 8), ("dspark", 8)])
def test_the_least_target_reads_different_layers(name, least):
    """Layers as the compiler chooses them where files name none, or as configurations name them."""
    with pytest.raises(ConfigError, match=f"a target of {least} layers or more has"):
        make_head(name, "T", tiny_config("qwen3", num_hidden_layers=least - 1))
    config = tiny_config("qwen3", num_hidden_layers=least)
    made = make_head(name, "T", config)
    ids = default_ids(least) if name == "eagle3" else _block_ids(least)
    assert len(set(ids)) == len(ids)
    assert 0 <= min(ids) <= max(ids) < least
    # and of one layer fewer they are not
    fewer = default_ids(least - 1) if name == "eagle3" else _block_ids(least - 1)
    assert len(set(fewer)) < len(fewer)
    assert made.tensors


# in the default tier a head that drafts level by level and one of blocks, a tree and a chain, a
# target of each kind
CAPTURED = only(
    ("eagle3-llama-tree-3-2", "dflash-qwen3-chain-3"),
    [
        pytest.param(head, target, plan, id=f"{head}-{target}-{plan.name}")
        for head in HEADS
        for target in ("llama", "qwen3")
        for plan in (CHAIN, TREE, DYNAMIC)
        if target == TARGETS[head] or head != "dspark"
    ],
)


@pytest.mark.default("dflash-qwen3-chain-3")
@pytest.mark.parametrize(("head", "target", "plan"), CAPTURED)
def test_a_device_that_captures_says_the_same(head, target, plan):
    """Lowered for CUDA and replayed: tokens of off, in as many steps, one graph a step."""
    found = []
    plans = (DYNAMIC,) if plan is DYNAMIC else (CHAIN, TREE)
    programs = compile_tiny(head, target, plans, backend="cuda")
    for device in (RepeatingDevice(), SimulatedDevice()):
        engine = make_engine(programs, draw(programs), device, "cuda")
        outputs, stats = generate(engine, plan.name)
        found.append((outputs, stats.num_step_passes))
        assert outputs == generate(engine, "off")[0]
    assert found[0] == found[1]
    assert engine.steps[plan.name].is_captured(2)


@pytest.mark.slow
@pytest.mark.parametrize("head", only(["medusa"], HEADS))
def test_a_head_of_a_quantized_target_stays_as_it_is(head):
    programs = compile_tiny(head, backend="cuda", quantization="int8")
    target, draft = (
        [item for item in model.program["inputs"] if "quantized_of" in item]
        for model in programs.models
    )
    assert target
    # a head that is the target's is the target's integers
    assert {item["key"] for item in draft} <= {"lm_head.weight:int8"}
    engine = make_engine(programs, draw(programs), SimulatedDevice(), "cuda")
    outputs, stats = generate(engine, TREE.name)
    assert outputs == generate(engine, "off")[0]
    assert stats.num_step_passes > 0
    plain, own = (
        make_estimate(compile_tiny(head, backend="cuda", **kind), 5, {})["plans"][CHAIN.name]
        for kind in ({}, {"quantization": "int8"})
    )
    assert draft or own["models"]["draft"] == plain["models"]["draft"]
    assert own["bytes"] < plain["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("target", only(("llama",), ["llama", "qwen3"]))
def test_an_eagle_head_proposes_what_its_module_finds(target):
    """Hidden states, weights and the map of ids, from prompt to proposal, against the modules."""
    programs = compile_tiny("eagle3", target, backend="cuda")
    engine = make_engine(programs, draw(programs), RepeatingDevice(), "cuda")
    proposed = []

    def look(values: Any) -> None:
        proposed.append(values["tokens"].clone())

    engine.steps[CHAIN.name].before_accept = look
    outputs, _ = generate(engine, CHAIN.name)
    model, head = (model.module for model in programs.models)
    assert head.spec.draft_vocab_size < VOCAB
    for prompt, output, own in zip(PROMPTS, outputs, proposed[0].tolist(), strict=True):
        tokens = torch.tensor([[*prompt, output[0]]])
        assert own[0] == output[0]
        with torch.inference_mode():
            states = model(tokens[:, :-1], output_hidden_states=True).hidden_states
            features = torch.cat([states[place] for place in head.spec.boundaries], -1)
            count = len(prompt)
            rows = (torch.arange(count)[None], features, torch.zeros(1, count, head.spec.width))
            _, logits = head(tokens[:, 1:], *rows, torch.ones(1, count, 1, dtype=torch.bool))
        best = logits[0, -1].topk(2).values
        assert best[0] - best[1] > 1e-3, "a proposal that is no tie"
        assert own[1] == int(logits[0, -1].argmax())


@pytest.mark.default("eagle3", "medusa")
@pytest.mark.parametrize("head", HEADS)
def test_weights_are_there_once_and_say_something(head):
    """A module's parameters are the tensors of its program; norms are 1, matrices are drawn."""
    programs = compile_tiny(head, backend="cuda")
    model = programs.models[1]
    weights = make_weights(model, CPU)
    shared, total = shared_bytes(model.module, weights)
    assert shared == total > 0
    for name, parameter in model.module.named_parameters():
        if parameter.dim() > 1:
            assert float(parameter.std()) == pytest.approx(0.02, rel=0.3), name
        else:
            assert bool((parameter == (0 if name.endswith("bias") else 1)).all()), name
    for key, like in model.copies.items():
        # a bias of one number has no deviation
        assert like.numel() == 1 or float(weights[key].std()) == pytest.approx(0.02, rel=0.3), key
    again = make_weights(model, CPU)
    assert all(torch.equal(weights[key], again[key]) for key in weights)


@pytest.mark.parametrize(
    ("head", "backend"),
    only(
        ("eagle3-cuda", "dflash-cuda", "dspark-cuda", "medusa-eager"),
        [
            pytest.param(head, backend, id=f"{head}-{backend}")
            for head in HEADS
            for backend in ("cuda", "eager")
        ],
    ),
)
def test_memory_has_the_rows_of_hidden_states(head, backend):
    programs = compile_tiny(head, backend=backend)
    weights = draw(programs)
    engine = make_engine(programs, weights, RepeatingDevice(), backend)
    for model in programs.models:
        own = weights[model.entry.name].values()
        assert sum(weight.nbytes for weight in own) == model.memory.weights
        slabs = engine.cache.slabs[model.entry.name]
        assert sum(slab.nbytes for slab in slabs) == model.memory.cache
    kept = engine.cache.slabs["target"][-1]
    assert kept.shape[-1] == 64 * {"eagle3": 3, "dflash": 5, "dspark": 5, "medusa": 1}[head]


def published_bytes(name: str, label: str, plan: SpecPlan, context: int) -> StepBytes:
    """Of a target that has lost most of its layers, which no figure of the draft depends on."""
    config = Shape(label, fields=SHAPES[label] | {"num_hidden_layers": 8}).make_config()
    options = ShapeOptions((plan,), "bfloat16", 2, context, 128, backend="cuda")
    made = make_head(name, label, config)
    programs = compile_shapes([label], [config], options, PhaseTimer(), made)
    models = {
        m.entry.name: ModelShape(m.program, m.entry.layers, "bfloat16", copies=m.copies)
        for m in programs.models
    }
    step, plan = programs.steps[plan.name], programs.plans[0]
    assert count_passes(step)["draft_0"] == (plan.max_depth if name == "eagle3" else 1)
    return count_step_bytes(step, models, plan, context, 2)


def test_bytes_of_an_eagle_head():
    """Four passes of the published head of Llama 3.1 8B, by hand."""
    chain = published_bytes("eagle3", "llama-3.1-8b", SpecPlan.from_widths((1,) * 4), 1024)
    attention = 8192 * (4096 + 2 * 1024) + 4096 * 4096
    # with the norms of tokens, of features, after attention, and the last
    layer = attention + 3 * 4096 * 14336 + 4 * 4096
    rows = 32000 * 4096
    # the column of each id is a table of int64
    columns = 8 * 128256
    assert chain.draft_weights == 4 * (2 * (layer + 3 * 4096 * 4096 + rows) + columns)
    # five tokens that it has not seen read the target's rows, three the one before them
    assert chain.features == 2 * 2 * (5 * 3 * 4096 + 3 * 4096)
    # eight layers of the target, and one in each pass of the head
    assert chain.kv_cache == 2 * (8 + 4) * 2 * 2 * 8 * 128 * 1024
    assert (
        chain.total
        == sum((chain.target_weights, chain.draft_weights, chain.embeddings, chain.kv_cache))
        + chain.features
    )


def test_bytes_of_a_block_drafter():
    """One pass of the published drafter of Qwen3 8B, by hand."""
    chain = published_bytes("dflash", "qwen3-8b", SpecPlan.from_widths((1,) * 15), 1024)
    layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    own = 5 * layer + 5 * 4096 * 4096 + 2 * 4096
    # the vocabulary head of the target
    assert chain.draft_weights == 2 * (own + 151936 * 4096)
    # all that a step can have accepted
    assert chain.features == 2 * 2 * 16 * 5 * 4096
    assert chain.kv_cache == 2 * (8 + 5) * 2 * 2 * 8 * 128 * 1024


def test_bytes_of_a_drafter_whose_logits_depend_on_tokens():
    """DSpark for Qwen3 8B: for each of seven levels all of a matrix of rank 256."""
    chain = published_bytes("dspark", "qwen3-8b", SpecPlan.from_widths((1,) * 7), 1024)
    layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    own = 5 * layer + 5 * 4096 * 4096 + 2 * 4096
    assert chain.draft_weights == 2 * (own + 151936 * 4096 + 7 * 151936 * 256)
    assert chain.features == 2 * 2 * 8 * 5 * 4096


@pytest.mark.slow
def test_bytes_of_medusa_heads():
    """Three heads of Llama 3.1 8B, each of which has a matrix for all ids."""
    chain = published_bytes("medusa", "llama-3.1-8b", SpecPlan.from_widths((1,) * 3), 1024)
    assert chain.draft_weights == 3 * 2 * (4096 * 4096 + 4096 + 128256 * 4096)
    assert chain.features == 2 * 2 * 4096
    # heads have no rows of their own
    assert chain.kv_cache == 2 * 8 * 2 * 2 * 8 * 128 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "passes"), [("eagle3", 3), ("dflash", 1), ("dspark", 1), ("medusa", 1)]
)
def test_an_estimate_has_the_passes_of_a_head(head, passes):
    pytest.importorskip("triton")
    programs = compile_tiny(head, backend="cuda")
    report = make_estimate(programs, 5, {})
    models = report["plans"][CHAIN.name]["models"]
    assert models["draft"]["passes"] == passes
    kernels = report["plans"][CHAIN.name]["kernels"]
    # of a pass of EAGLE-3, hidden states of the target and its own
    assert kernels["_take_rows_kernel"] == passes * (2 if head == "eagle3" else 1)
    assert report["draft"]["source"] == head
