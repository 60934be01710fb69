"""Random quantized weights: what blocks hold, and what programs compute with them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.artifact.in_memory import BenchModel, BenchPrograms
from specc.artifact.quantized_layout import QuantizedLayout, dequantize, unpack
from specc.artifact.weight_layout import BLOCK
from specc.bench.device import RepeatingDevice
from specc.bench.step_bytes import model_bytes
from specc.bench.synthetic.engine import make_engine
from specc.bench.synthetic.quantized import draw_blocks
from specc.bench.synthetic.report import weight_bytes
from specc.bench.synthetic.weights import make_weights, shared_bytes
from specc.compiler.in_memory import ShapeOptions, compile_shapes
from specc.errors import ConfigError
from specc.progress import PhaseTimer
from tests.models import VOCAB, tiny_config
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.specc.bench.synthetic.test_shapes import PROMPTS, compile_tiny, draw, generate
from tests.tiers import every

LAYOUTS = ["int8", "int8-g32", "int4-g32", "int4-g64", "int4-g128", "int4-g32-zeros", "fp8"]
FRAGMENTS = ["int4-g64-fragments", "int4-g32-zeros-fragments", "int8-fragments", "fp8-fragments"]
FRAGMENTS += ["int4-g64-fragments-48"]
# what --quantize gives by default
ASKED = ["int8", "int4-g64", "fp8"]
# outputs that end within a block; columns of a short last group, whose last unit is short, too
SHAPES = [(96, 512), (70, 211)]


def drawn(shape: tuple[int, int], layout: QuantizedLayout, spread: Tensor | None = None) -> Tensor:
    """Blocks of a weight whose outputs have these standard deviations, or 1."""
    outputs = shape[0]
    spread = torch.ones(outputs) if spread is None else spread
    out = torch.full(layout.stored_shape(shape), 77, dtype=torch.uint8)
    torch.manual_seed(3)
    draw_blocks(out, shape[1], layout, torch.nn.functional.pad(spread, (0, -outputs % BLOCK)))
    return out


@pytest.mark.parametrize(
    ("name", "shape"),
    [*itertools.product(LAYOUTS, SHAPES), *((name, SHAPES[0]) for name in FRAGMENTS)],
    ids=str,
)
def test_drawn_values_have_the_spread_that_is_asked_for(name: str, shape: tuple[int, int]) -> None:
    """Of every output its own; the mean is zero, which a product of many columns would show."""
    layout = QuantizedLayout.named(name)
    number = torch.arange(shape[0])
    spread = torch.where((number + number // 16) % 2 == 0, 0.02, 3.0)
    values = dequantize(drawn(shape, layout, spread), shape, layout)
    assert bool(values.isfinite().all())
    scaled = values / spread[:, None]
    rms = scaled.square().mean(1).sqrt()
    # squares of e4m3 vary a lot: four standard errors of an output are .4
    assert bool(((rms > 0.6) & (rms < 1.4)).all())
    assert float(scaled.square().mean().sqrt()) == pytest.approx(1, rel=0.05)
    # four standard errors
    assert abs(float(scaled.mean())) < 4 / math.sqrt(scaled.numel())
    # nothing that outputs have in common
    assert abs(float(scaled.mean(0).std()) * math.sqrt(shape[0]) - 1) < 0.15


@pytest.mark.parametrize("name", LAYOUTS)
def test_levels_are_uniform_over_those_that_rounding_gives(name: str) -> None:
    layout = QuantizedLayout.named(name)
    shape = (128, 4096)
    levels, scales, zeros = unpack(drawn(shape, layout), shape, layout)
    counts = torch.bincount(levels.flatten().long(), minlength=256)
    known = {"int8": range(1, 256), "int4": range(16)}.get(
        layout.kind, [*range(127), *range(128, 255)]
    )
    assert set(counts.nonzero().flatten().tolist()) == set(known)
    share = counts[list(known)] * len(known) / levels.numel()
    # of 2,064 of each level or more, by chance 2.2 % more or less
    assert float((share - 1).abs().max()) < 0.12
    assert set(zeros.unique().tolist()) == {layout.middle}
    assert len(scales.abs().unique()) == 1
    assert {1.0, -1.0} >= set(scales.sign().unique().tolist())
    # those of int4 alone, whose levels are not even around zero
    negative = float((scales < 0).float().mean())
    assert negative == pytest.approx(0.5, abs=0.1) if layout.kind == "int4" else negative == 0


@pytest.mark.parametrize("name", ["int8", "int4-g64"])
def test_what_blocks_have_beyond_the_last_output_is_zero(name: str) -> None:
    layout, (outputs, columns) = QuantizedLayout.named(name), SHAPES[1]
    whole = (-(-outputs // BLOCK) * BLOCK, columns)
    values = dequantize(drawn((outputs, columns), layout), whole, layout)
    assert not bool(values[outputs:].any())
    assert bool(values[:outputs].any(1).all())


def test_large_weights_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is another one, and none is left out."""
    monkeypatch.setattr("specc.bench.synthetic.quantized._CHUNK_BYTES", 20_000)
    layout, shape = QuantizedLayout.named("fp8"), (128, 512)
    levels = unpack(drawn(shape, layout), shape, layout)[0]
    assert not bool((levels[:32] == levels[32:64]).all())
    assert all(len(part.unique()) > 240 for part in levels.split(32))


def target_of(layout: str | None, name: str = "llama", **options: Any) -> BenchPrograms:
    more = {"backend": "cuda"} | options
    return compile_tiny(name, has_draft=False, quantization=layout, **more)


def logits_of(programs: BenchPrograms) -> Tensor:
    engine = make_engine(programs, draw(programs), RepeatingDevice(), "eager")
    generator = torch.Generator().manual_seed(2)
    count = 20
    with torch.inference_mode():
        return engine.target(
            torch.randint(0, VOCAB, (count,), generator=generator),
            torch.arange(count),
            torch.tensor([0, count], dtype=torch.int32),
            torch.arange(count, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            None,
            torch.arange(2, dtype=torch.int32)[None],
            torch.arange(count),
        )


@pytest.mark.parametrize("layout", ASKED)
def test_weights_are_in_fragments_where_that_is_asked_for(layout: str) -> None:
    """With logits of the spread that blocks give."""
    config = tiny_config("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    logits = []
    for in_fragments in (False, True):
        options = ShapeOptions(
            (), "bfloat16", 2, 5, 24, "cuda", quantization=layout, weight_fragments=in_fragments
        )
        programs = compile_shapes("T", [config], options, PhaseTimer())
        stored = [item for item in programs.models[0].program["inputs"] if "quantized_of" in item]
        assert {"fragments" in item["layout"] for item in stored} == {in_fragments}
        logits.append(logits_of(programs).float())
    assert bool(logits[1].isfinite().all())
    assert float(logits[1].std() / logits[0].std()) == pytest.approx(1, abs=0.25)


@pytest.mark.default("int8-bfloat16")
@pytest.mark.parametrize("dtype", every(2, ["float32", "bfloat16"], first=1))
@pytest.mark.parametrize("layout", ASKED)
def test_logits_have_the_spread_of_those_of_floats(layout: str, dtype: str) -> None:
    """Within an eighth; they are finite in every dtype."""
    found = logits_of(target_of(layout, dtype=dtype)).float()
    floats = logits_of(target_of(None, dtype=dtype)).float()
    assert bool(found.isfinite().all())
    assert float(found.std() / floats.std()) == pytest.approx(1, abs=0.125)
    assert float(found.mean(0).std() / floats.mean(0).std()) == pytest.approx(1, abs=0.5)


def float_names(model: BenchModel) -> set[str]:
    inputs = [item for item in model.program["inputs"] if item["kind"] == "weight"]
    return {n for item in inputs if "layout" not in item for n in item["key"].split("+")}


# a table that is also the head; a mixture, whose experts backend eager multiplies by integers; and
# matrices [inputs, outputs]
@pytest.mark.default("llama-cuda-int4-g64")
@pytest.mark.parametrize("layout", every(3, ASKED, first=1))
@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "cuda"), ("gemma3-tied", "cuda"), ("qwen3_moe", "eager"), ("gpt2", "cuda")],
)
def test_weights_have_the_spread_that_transformers_gives(
    name: str, backend: str, layout: str
) -> None:
    """Also a module gets what stays in floats, and nothing else."""
    programs = target_of(layout, name, backend=backend)
    (model,) = programs.models
    weights = draw(programs)["target"]
    plain = target_of(None, name, backend=backend)
    draw(plain)
    quantized = [item for item in model.program["inputs"] if "quantized_of" in item]
    assert quantized
    for item in quantized:
        own = QuantizedLayout.named(item["layout"].removeprefix("blocks-"))
        values = dequantize(weights[item["key"]], item["quantized_of"], own)
        outputs = 0
        dim = -2
        for parameter in item["key"].rsplit(":", 1)[0].split("+"):
            floats = plain.models[0].module.get_parameter(parameter)
            rows = floats.shape[-1] if item.get("is_turned") else floats.shape[-2]
            part = values.narrow(dim, outputs, rows)
            outputs += rows
            assert float(part.std()) == pytest.approx(float(floats.std()), rel=0.1), parameter
        assert outputs == item["quantized_of"][dim]
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    floats_read = {id(parameters[name]) for name in float_names(model)}
    assert not any(parameters[name].is_meta for name in float_names(model))
    unread = [
        parameters[name]
        for item in quantized
        for name in item["key"].rsplit(":", 1)[0].split("+")
        if id(parameters[name]) not in floats_read
    ]
    assert unread
    assert all(parameter.is_meta for parameter in unread)
    shapes = {n: p.shape for n, p in plain.models[0].module.named_parameters()}
    assert {n: p.shape for n, p in model.module.named_parameters()} == shapes
    # what the module has lies in the program's memory, but for what no program reads
    shared, _ = shared_bytes(model.module, weights)
    assert shared == sum(
        weights[item["key"]].nbytes
        for item in {i["key"]: i for i in model.program["inputs"] if i["kind"] == "weight"}.values()
        if "layout" not in item
    )


def test_the_same_seed_draws_the_same_integers() -> None:
    programs = target_of("int4-g64")
    first = {key: value.clone() for key, value in draw(programs, seed=3)["target"].items()}
    again, other = draw(programs, seed=3)["target"], draw(programs, seed=4)["target"]
    assert all(torch.equal(first[key], again[key]) for key in first)
    levels = [key for key in first if ":" in key]
    assert levels
    assert not any(torch.equal(first[key], other[key]) for key in levels)


def test_a_draft_is_rounded_beside_a_target_in_floats() -> None:
    """And the other way round; a pass of it reads so much less."""
    own = {"backend": "cuda", "dtype": "bfloat16"}
    programs = compile_tiny(**own, draft_quantization="int4-g64")
    assert [model.entry.quantization for model in programs.models] == [None, "int4-g64"]
    floats = compile_tiny(**own)
    read, plain = (
        [model_bytes(model.program).weights for model in x.models] for x in (programs, floats)
    )
    assert read[0] == plain[0]
    assert read[1] < 0.7 * plain[1]
    reverse = compile_tiny(**own, quantization="int8", draft_quantization="off")
    assert [model.entry.quantization for model in reverse.models] == ["int8", None]
    with pytest.raises(ConfigError, match="1 times --draft-quantize, and 0 draft models"):
        compile_tiny(**own, has_draft=False, draft_quantization="int4-g64")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ASKED)
def test_memory_and_floors_count_the_bytes_that_are_read(layout: str) -> None:
    """Of target and draft: the plan, and what a pass reads, are the bytes of the tensors."""
    programs = compile_tiny(backend="cuda", quantization=layout)
    for model in programs.models:
        assert model.entry.quantization == layout
        weights = make_weights(model, torch.device("cpu"))
        assert sum(weight.nbytes for weight in weights.values()) == model.memory.weights
        looked_up = weights["model.embed_tokens.weight"].nbytes
        tables = sum(
            weights[item["key"]].nbytes
            for item in model.program["inputs"]
            if item["kind"] == "constant"
        )
        read = model_bytes(model.program).weights
        assert read <= model.memory.weights - looked_up <= read + tables
        found = weight_bytes(model.program)
        head = QuantizedLayout.named("int8" if layout != "int8" else layout).name
        assert set(found) == {"float32", layout, head}
        by_layout = {
            name: sum(w.nbytes for key, w in weights.items() if key.endswith(f":{name}"))
            for name in found
        }
        assert {n: size for n, size in found.items() if n != "float32"} == {
            n: size for n, size in by_layout.items() if n != "float32"
        }
        assert found["float32"] + sum(by_layout.values()) == model.memory.weights - sum(
            c.nbytes for c in model.constants.values()
        )


def test_weights_that_two_inputs_read_count_once() -> None:
    def item(name: str, key: str, dtype: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "kind": "weight", "key": key, "dtype": dtype, "shape": [3, 4], **more}

    inputs = [
        item("a", "w", "bfloat16"),
        item("b", "w", "bfloat16"),
        item("c", "v:int8", "uint8", layout="blocks-int8", quantized_of=[2, 2]),
        item("d", "frequencies", "float32") | {"kind": "constant"},
        {"name": "tokens", "kind": "input"},
    ]
    assert weight_bytes({"inputs": inputs}) == {"bfloat16": 24, "int8": 12}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ASKED)
def test_captured_steps_say_the_same(layout: str) -> None:
    """Target and draft in integers, on the simulated device and operator by operator."""
    found = []
    for device in (RepeatingDevice(), SimulatedDevice()):
        programs = compile_tiny(backend="cuda", quantization=layout, acceptance=(0.6, 0.3))
        engine = make_engine(programs, draw(programs), device, "cuda")
        outputs, stats = generate(engine, "tree-2-1")
        found.append((outputs, stats.num_step_passes, stats.accepted_at_depth))
    assert found[0] == found[1]
    assert isinstance(device, SimulatedDevice)
    assert engine.steps["tree-2-1"].is_captured(2)
    assert len(PROMPTS) == len(outputs)
