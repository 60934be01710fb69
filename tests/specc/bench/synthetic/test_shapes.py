"""Shapes by name and by directory, their weights, and the programs that are made of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.in_memory import BenchPrograms
from specc.bench.device import RepeatingDevice
from specc.bench.step_bytes import ModelShape, count_step_bytes
from specc.bench.synthetic.engine import make_engine
from specc.bench.synthetic.report import _deviations
from specc.bench.synthetic.shapes import SHAPES, Shape, parse_shapes
from specc.bench.synthetic.weights import make_weights, shared_bytes
from specc.compiler.in_memory import ShapeOptions, compile_shapes
from specc.passes.frontend.hf_model import build_on_meta
from specc.progress import PhaseTimer
from specc.runtime.backends.captured.step_scores import UNFILTERED
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests.models import VOCAB, tiny_config
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.tiers import only

# parameters that the checkpoints of these models have
NUM_PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3-0.6b-248k": 694_747_136,
}
PLANS = (SpecPlan.from_widths((2, 1)), SpecPlan.from_widths((1, 1, 1)))
PROMPTS = [[5, 6, 7, 8, 9], [90, 41, 3, 4, 80]]


@functools.cache
def compile_tiny(name: str = "llama", has_draft: bool = True, **options: Any) -> BenchPrograms:
    """A pair of tiny models, or the target alone, for two prompts of 5 tokens."""
    configs = [tiny_config(name)]
    if has_draft:
        configs.append(tiny_config(name, num_hidden_layers=1))
    wanted = {"dtype": "float32", "batch_size": 2, "context": 5, "tokens": 24} | options
    plans = PLANS if has_draft else ()
    return compile_shapes(
        "TD"[: len(configs)], configs, ShapeOptions(plans, **wanted), PhaseTimer()
    )


def draw(programs: BenchPrograms, **options: Any) -> dict[str, dict[str, torch.Tensor]]:
    cpu = torch.device("cpu")
    return {m.entry.name: make_weights(m, cpu, **options) for m in programs.models}


def generate(engine: Any, plan: str, tokens: int = 24) -> tuple[list[list[int]], Any]:
    llm = LLM(engine, plan=plan)
    outputs = llm.generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    )
    return [list(output.outputs[0].token_ids) for output in outputs], llm.get_metrics()


def check_weights(model: Any, weights: dict[str, torch.Tensor]) -> int:
    """The module's parameters are the program's tensors, of so many bytes: none is there twice."""
    shared, total = shared_bytes(model.module, weights)
    assert shared == total > 0
    sizes = [item for item in model.program["inputs"] if item["kind"] == "weight"]
    assert {item["key"] for item in sizes} <= set(weights)
    own = {w.untyped_storage().data_ptr(): w.nbytes for w in weights.values()}
    assert sum(own.values()) == total + sum(c.nbytes for c in model.constants.values())
    assert not any(t.is_meta for t in [*model.module.parameters(), *model.module.buffers()])
    return sum(own.values())


def check_tokens(programs: BenchPrograms) -> None:
    """What the engine says is what the target's module computes."""
    weights, module = draw(programs), programs.models[0].module
    for tensor in module.parameters():  # else models of this size hardly look at their context
        if tensor.dim() > 1:
            tensor.data.mul_(8)
    engine = make_engine(programs, weights, RepeatingDevice(), "eager")
    for prompt, output in zip(PROMPTS, generate(engine, "off")[0], strict=True):
        tokens = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = module(tokens).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        is_tie = best[:, 0] - best[:, 1] < 1e-4
        assert bool(((logits.argmax(-1) == torch.tensor(output)) | is_tie).all())
    assert len(set(output)) > 3, "an output that says something"


def check_capture(programs: BenchPrograms, plan: str) -> None:
    """Lowered and replayed on the simulated device, and operator by operator."""
    found = []
    for device in (RepeatingDevice(), SimulatedDevice()):
        engine = make_engine(programs, draw(programs), device, "cuda")
        outputs, stats = generate(engine, plan)
        found.append((outputs, stats.num_step_passes, stats.accepted_at_depth))
    assert found[0] == found[1]
    assert isinstance(device, SimulatedDevice)
    # one graph a step, dice included, and one without filters; the last token of a request is
    # decoded plainly
    steps, kinds = engine.steps.values(), (None, UNFILTERED)
    assert len(device.tapes) == sum(step.is_captured(2, k) for step in steps for k in kinds)
    assert engine.steps[plan].is_captured(2)


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_has_the_published_sizes(name):
    """A wrong figure of a layer, a head or the vocabulary changes the number of parameters."""
    module = build_on_meta(Shape(name, fields=SHAPES[name]).make_config(), torch.bfloat16)
    assert sum(p.numel() for p in module.parameters()) == NUM_PARAMETERS[name]


def test_every_shape_has_a_known_size():
    assert set(SHAPES) == set(NUM_PARAMETERS)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama-3.1-8b", {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}),
        ("llama-3.2-1b", {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}),
        ("llama-3.2-3b", {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}),
        ("qwen3-0.6b", {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}),
        ("qwen3-8b", {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6}),
        ("llama-3.1-70b", {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5}),
        ("qwen3-30b-a3b", {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}),
        ("qwen3-30b-a3b", {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}),
        (
            "deepseek-v2-lite",
            {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "num_experts_per_tok": 6}
            | {"n_routed_experts": 64, "n_group": 1, "topk_method": "greedy"}
            | {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "q_lora_rank": None},
        ),
    ],
)
def test_what_parameters_do_not_tell(name, fields):
    config = Shape(name, fields=SHAPES[name]).make_config()
    assert {key: getattr(config, key) for key in fields} == fields


def test_rotary_scaling_of_llama():
    factors = {n: Shape(n, fields=SHAPES[n]).make_config().rope_parameters for n in SHAPES}
    assert factors["llama-3.1-8b"]["factor"] == 8.0
    assert factors["llama-3.2-1b"]["factor"] == 32.0
    assert factors["llama-3.2-1b"]["rope_type"] == "llama3"
    assert factors["qwen3-8b"] == {"rope_type": "default", "rope_theta": 1e6}


def save_config(directory: Path, name: str = "llama", **changes: Any) -> Path:
    tiny_config(name, architectures=["LlamaForCausalLM"], **changes).save_pretrained(directory)
    return directory


def test_names_and_directories(tmp_path, monkeypatch):
    save_config(tmp_path / "a" / "b")
    save_config(tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    assert _labels("llama-3.1-8b") == ["llama-3.1-8b"]
    assert _labels("llama-3.1-8b/llama-3.2-1b") == ["llama-3.1-8b", "llama-3.2-1b"]
    assert _labels("a/b") == ["a/b"]
    assert _labels("a/b,c") == ["a/b", "c"]
    assert _labels("llama-3.1-8b/a/b") == ["llama-3.1-8b", "a/b"]
    assert _labels(f"{tmp_path}/c,llama-3.2-1b") == [f"{tmp_path}/c", "llama-3.2-1b"]


def _labels(text: str) -> list[str]:
    return [shape.label for shape in parse_shapes(text) if shape is not None]


# separate projections, and tied weights
@pytest.mark.parametrize(
    "name",
    only(("llama", "gpt2"), ["llama", "gemma3-tied", "qwen3_moe", "qwen3", "mistral", "gpt2"]),
)
def test_weights_are_there_once(name):
    programs = compile_tiny(name, has_draft=False)
    for model, weights in zip(programs.models, draw(programs).values(), strict=True):
        check_weights(model, weights)


@pytest.mark.default("llama-eager")
@pytest.mark.parametrize(
    ("name", "backend"),
    only(
        ("llama", "qwen3"),
        [
            ("llama", "eager"),
            ("gemma3", "eager"),
            ("gpt2", "cuda"),
            ("qwen3", "cuda"),
            ("llama-llama3", "cuda"),
        ],
    ),
)
def test_the_module_computes_what_the_programs_do(name, backend):
    """Rotary frequencies, norms, views into concatenated weights: one wrong and tokens differ."""
    check_tokens(compile_tiny(name, has_draft=False, backend=backend))


@pytest.mark.slow
def test_values_are_finite_and_repeat():
    """In bfloat16, over all rows of a long prompt."""
    programs = compile_tiny(dtype="bfloat16")
    first = {k: v.clone() for k, v in draw(programs, seed=3)["target"].items()}
    with torch.inference_mode():
        logits = programs.models[0].module(torch.randint(0, VOCAB, (1, 200))).logits
    assert bool(logits.isfinite().all())
    assert logits.std() > 1e-3
    again, other = draw(programs, seed=3)["target"], draw(programs, seed=4)["target"]
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_drawing_leaves_the_random_state_alone():
    programs = compile_tiny()
    torch.manual_seed(9)
    want = torch.rand(3)
    torch.manual_seed(9)
    draw(programs)
    assert torch.equal(torch.rand(3), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("off", marks=pytest.mark.slow),
        pytest.param("chain-3", marks=pytest.mark.slow),
        "tree-2-1",
    ],
)
def test_a_device_that_captures_says_the_same(plan):
    """With and without dice."""
    for acceptance in (None, (0.6, 0.3)):
        check_capture(compile_tiny(backend="cuda", acceptance=acceptance), plan)


@pytest.mark.slow
def test_dice_decide_what_an_engine_accepts():
    """All accepted, none accepted, and the second child of the root alone."""
    expected = {(1.0, 0.0): [1.0, 1.0], (0.0, 0.0): [0.0, 0.0], (0.0, 1.0): [1.0, 0.0]}
    for acceptance, rates in expected.items():
        programs = compile_tiny(acceptance=acceptance, tokens=25)
        engine = make_engine(programs, draw(programs), RepeatingDevice(), "eager")
        _, stats = generate(engine, "tree-2-1", 25)
        # the last step is cut at the length limit
        assert stats.accepted_per_depth == pytest.approx(rates, abs=0.13)
    off = compile_tiny(acceptance=(0.5,)).steps["off"]
    assert [stage["name"] for stage in off["stages"]] == ["verify", "accept_commit"]


@pytest.mark.parametrize(
    ("drawn", "queued", "words"),
    [(2.05, 1.98, ()), (1.9, 2.0, ("1.90", "-5.0%", "+0.0%")), (2.0, 2.2, ("2.20", "+10.0%"))],
)
def test_dice_that_miss_the_expected_length_are_told(drawn, queued, words):
    dice = {"expected_acceptance_length": 2.02, "drawn_acceptance_length": drawn}
    if words:
        dice["expected_acceptance_length"] = 2.0
    runs = [
        {"name": "off", "plan": "off", "synthetic_acceptance": None, "step": {}},
        {
            "name": "speculative",
            "plan": "chain-3",
            "synthetic_acceptance": dice,
            "step": {"acceptance_length": queued},
        },
    ]
    notes = _deviations(runs)
    assert len(notes) == bool(words)
    for word in words and ("speculative (chain-3)", "2.00 is expected", *words):
        assert word in notes[0]


@pytest.mark.slow
def test_bytes_of_a_published_pair():
    """Two layers of 8B, one of 1B: weights but for unused rows of a table, K and V, by hand."""
    labels = ["llama-3.1-8b", "llama-3.2-1b"]
    configs = [
        Shape(name, fields=SHAPES[name] | {"num_hidden_layers": layers}).make_config()
        for name, layers in zip(labels, (2, 1), strict=True)
    ]
    options = ShapeOptions(PLANS[1:], "bfloat16", 1, 1024, 128, backend="cuda")
    programs = compile_shapes(labels, configs, options, PhaseTimer())
    models = {
        m.entry.name: ModelShape(m.program, m.entry.layers, "bfloat16") for m in programs.models
    }

    def count(plan: SpecPlan) -> Any:
        return count_step_bytes(programs.steps[plan.name], models, plan, 1024, 1)

    off, chain = count(SpecPlan("off")), count(PLANS[1])
    layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
    assert off.target_weights == 2 * (2 * layer + 4096 + 128256 * 4096)
    assert off.kv_cache == 2 * 2 * 2 * 8 * 128 * 1024
    # rows of the embedding, and cosines and sines of a position
    assert off.embeddings == 2 * 4096 + 2 * (2 * 128)
    assert off.draft_weights == 0
    # tied: the table is the head, and read whole in each of three passes
    layer = 2048 * (2048 + 2 * 512 + 2048) + 3 * 2048 * 8192 + 2 * 2048
    assert chain.draft_weights == 3 * 2 * (layer + 2048 + 128256 * 2048)
    assert chain.kv_cache == off.kv_cache + 3 * 2 * 2 * 8 * 64 * 1024
