"""Engines of quantized weights for CUDA, without a GPU: a simulated device, kernels interpreted.

The reference is transformers with the float32 weights that the engine's integers stand for, and the
engine's own plan off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.config import CompileConfig
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.program_files import read_json
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.conftest import save_tiny_llama
from tests.runtime.test_quantized import TOLERANCE, error_of_logits, reference_model

PLANS = tuple(SpecPlan.from_widths(*plan) for plan in (((),), ((1, 1, 1),), ((2, 1),)))
MAX_SEQ_LEN = 64


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(checkpoint, engine) of a tiny model with its noisy draft."""
    made: dict[Any, tuple[Path, Path]] = {}

    def make_one(
        quantize: str,
        group: int | None = None,
        plans: Any = PLANS,
        sizes: Any = None,
        **options: Any,
    ):
        key = (quantize, group, plans, *(sizes or {}), *options.items())
        if key not in made:
            root = tmp_path_factory.mktemp("quantized")
            target, draft = root / "target", root / "draft"
            for seed, model in ((1, target), (2, draft)):
                save_tiny_llama(model, seed, **(sizes or {}))
            config = CompileConfig(
                max_seq_len=MAX_SEQ_LEN, max_batch_size=2, quantize=quantize,
                quantize_group=group, backend="cuda", probe=False, plans=plans, **options,
            )  # fmt: skip
            made[key] = target, engines.build(target, draft, root / "engine", config)
        return made[key]

    return make_one


def generate(engine: Engine, plan: str, prompts: Any, count: int = 8) -> Any:
    llm = LLM(engine, plan=plan)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([list(prompt) for prompt in prompts], params)
    return [output.outputs[0].token_ids for output in outputs], llm.get_metrics()


# in float32: the interpreter's bfloat16 is patched for tests of kernels alone
@pytest.mark.parametrize(
    ("quantize", "group"),
    [
        ("int4", 32),
        ("int8", None),
        ("int8", 32),
        ("fp8", None),
    ],
)
@pytest.mark.slow  # minutes: kernels are interpreted, element by element
def test_the_kernels_say_what_transformers_says(
    make, tmp_path, device, triton_kernels, quantize, group
) -> None:
    """Logits of prompts, and tokens of a tree, which are those of off; no launch races."""
    from tests.kernels.cuda.races import watched

    checkpoint, path = make(quantize, group)
    engine = Engine.load(path, capture=CaptureLimits(sizes=(2,), max_seconds=-1))
    model = reference_model(checkpoint, path)
    with watched(quantize) as launches:
        # by the kernel's tile, and by the decoded weight
        for num_tokens in (3, 20):
            assert error_of_logits(engine, model, "float32", num_tokens)[0] < TOLERANCE
        prompts = [prompt[:5] for prompt in models.prompts()[1:3]]
        plain, _ = generate(engine, "off", prompts, 3)
        assert generate(engine, "tree-2-1", prompts, 3)[0] == plain
    names = {launch.name for launch in launches}
    assert {"linear_q_kernel", "linear_q_decode_kernel"} <= names
    assert {(launch.name, name) for launch in launches for name in launch.folded} == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "draft", "dtype"),
    # a draft that differs from the target by its integers
    [("int4", "self_int8", "float32"), ("int8", "self_int4", "bfloat16")],
)
def test_replayed_steps_say_the_same(make, device, quantize, draft, dtype) -> None:
    """Every plan, its graphs captured, with the oracles of the operators."""
    plans = (*PLANS, SpecPlan.from_widths((1, 1), (draft,)))
    _, path = make(quantize, None, plans, dtype=dtype)
    engine, prompts = Engine.load(path), models.prompts()[:3]
    plain, _ = generate(engine, "off", prompts, 16)
    assert len(set(plain[0])) > 3
    captured = len(device.tapes)
    for plan in plans[1:]:
        found, stats = generate(engine, plan.name, prompts, 16)
        assert found == plain, plan.name
        assert stats.num_spec_steps > 0
    # the last one drafts with the target's own weights, so what it accepts is more than by chance
    assert stats.mean_acceptance_length > 2
    assert len(device.tapes) == captured


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
def test_weights_in_fragments_are_the_same_weights(make, device, quantize) -> None:
    """An engine of them has the integers of one whose weights lie in blocks, and is as exact: sums
    and norms that are parts of products are rounded less often.
    """
    found = []
    for fragments in (False, True):
        sizes = {"hidden_size": 256, "intermediate_size": 416}
        checkpoint, path = make(
            quantize, None, PLANS[:2], sizes, dtype="bfloat16", weight_fragments=fragments
        )
        held, weights = load_file(path / "target" / "weights.safetensors"), {}
        entries = read_json(path / "target" / "program.json")["inputs"]
        for entry in (entry for entry in entries if "quantized_of" in entry):
            names, _, name = entry["key"].rpartition(":")
            layout, shape = QuantizedLayout.named(name), entry["quantized_of"]
            # of down, 416 columns are no whole tiles of 4 bits
            assert layout.is_fragments == (fragments and layout.has_fragments(shape[1]))
            weights[names] = dequantize(held[entry["key"]], shape, layout)
        engine, prompts = Engine.load(path), models.prompts()[:2]
        tokens = [generate(engine, plan.name, prompts, 12)[0] for plan in PLANS[:2]]
        assert tokens[0] == tokens[1]
        error, bound = error_of_logits(engine, reference_model(checkpoint, path), "bfloat16")
        assert bound is not None
        assert error < bound
        found.append(weights)
    weights, others = found
    assert weights.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


def test_a_row_of_fragments_has_its_bits_by_their_own_operator(make, device) -> None:
    """With --batch-invariant, beside a draft that has the same weights in its own program."""
    plans = (*PLANS[:2], SpecPlan.from_widths((1, 1), ("self_x1",)))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 2}
    options = {"dtype": "bfloat16", "weight_fragments": True}
    found = []
    for is_invariant in (False, True):
        _, path = make("int4", None, plans, sizes, **options, batch_invariant=is_invariant)
        text = (path / "target" / "program.json").read_text()
        assert ("specc.invariant_linear_q" in text) == is_invariant
        assert "specc.linear_q" not in text or not is_invariant
        # which lies there once
        held = load_file(path / "target" / "weights.safetensors")
        names = [key.partition(":")[0] for key in held]
        assert len(names) == len(set(names))
        engine, prompts = Engine.load(path), models.prompts()[:2]
        found += [generate(engine, plan.name, prompts, 12)[0] for plan in plans]
    assert all(tokens == found[0] for tokens in found)
