"""Engines of quantized weights: every plan has the tokens of off, and those of transformers.

The reference is the model of transformers with the float32 weights that the engine's integers stand
for, read from the engine's own file by the module's names: a scale, zero point or row of a fused
weight in the wrong place is another model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specc.artifact.backends import facts_of
from specc.artifact.directory import read_manifest
from specc.artifact.graph_io import graph_from_json
from specc.artifact.offload import least_budget, plan_offload, read_pieces
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.rounding import quantize
from specc.artifact.segments import SegmentedModel
from specc.compile_request import CompileRequest
from specc.compiler.backends.registry import compiler_backend
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.program import Weight
from specc.passes.rewrite.require_supported import RequireLayouts
from specc.refusals import refuse
from specc.runtime.backends.program_files import read_json
from specc.runtime.engine import Engine
from specc.runtime.execution.state_rows import states_of_one
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, models

PLANS = tuple(
    SpecPlan.from_widths(*plan)
    for plan in (((),), ((1, 1, 1, 1),), ((2, 2, 1),), ((1, 1), ("self_x0",)))
)
NUM_TOKENS = 40
# of float32: largest error of logits over their spread: integers of rows, and the order of sums;
# transformers' own float32 is up to 1e-5 of the spread away from its float64 on these models
TOLERANCE = 3e-5


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """(checkpoint, engine) of a tiny model with its noisy draft."""
    made: dict[Any, tuple[Path, Path]] = {}

    def make_one(name: str, quantize: str, group: int | None = None, **options: Any):
        key = (name, quantize, group, *options.items())
        if key not in made:
            root = tmp_path_factory.mktemp("quantized")
            target = models.save_tiny(name, root / "target")
            draft = models.save_tiny(name, root / "draft", 0, models.DRAFT_NOISE[name])
            config = CompileConfig(
                max_seq_len=models.MAX_SEQ_LEN, quantize=quantize, quantize_group=group,
                probe=False, **({"backend": "eager", "plans": PLANS} | options),
            )  # fmt: skip
            made[key] = target, engines.build(target, draft, root / "engine", config)
        return made[key]

    return make_one


def reference_model(checkpoint: Path, engine: Path) -> Any:
    """Plain transformers with the float32 weights that the engine's integers stand for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    held = load_file(engine / "target" / "weights.safetensors")
    program = read_json(engine / "target" / "program.json")
    looked_up = looked_up_inputs(program)
    for entry in program["inputs"]:
        if "quantized_of" not in entry:
            continue
        names, _, layout = entry["key"].rpartition(":")
        assert entry["layout"] == f"blocks-{layout}"
        value = dequantize(held[entry["key"]], entry["quantized_of"], QuantizedLayout.named(layout))
        parameters = [model.get_parameter(name) for name in names.split("+")]
        # experts of some models are columns of their parameter
        is_turned = value.shape[1:] != parameters[0].shape[1:]
        value = value.transpose(1, 2) if is_turned else value
        parts = value.split([parameter.shape[0] for parameter in parameters])
        for name, part in zip(names.split("+"), parts, strict=True):
            module, _, leaf = name.rpartition(".")
            # a head that is tied to the embedding is a weight of its own
            own = torch.nn.Parameter(part.contiguous(), requires_grad=False)
            setattr(model.get_submodule(module), leaf, own)
            if (
                entry["name"] in looked_up
                and own.shape == model.get_input_embeddings().weight.shape
            ):
                # unless both read the same integers
                model.get_input_embeddings().weight = own
    return model


def looked_up_inputs(program: dict[str, Any]) -> set[str]:
    """Names of the inputs of a stored program whose integers are looked up."""
    graph = graph_from_json(program["graph"]).graph
    calls = graph.find_nodes(op="call_function", target=torch.ops.specc.embedding_q.default)
    return {str(call.args[0].target) for call in calls}


def generate(engine: Engine, plan: str, prompts: Sequence[Sequence[int]], **options: Any):
    llm = LLM(engine, plan=plan)
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | options
    )
    outputs = llm.generate([list(prompt) for prompt in prompts], params)
    return [output.outputs[0].token_ids for output in outputs], llm.get_metrics()


def check_plans(
    path: Path,
    plans: Sequence[SpecPlan] = PLANS,
    num_prompts: int = 5,
    max_tokens: int = NUM_TOKENS,
) -> None:
    """All plans, batched and alone, greedy and drawn, give what off gives alone."""
    engine, prompts = Engine.load(path), models.prompts()[-num_prompts:]
    size = {"max_tokens": max_tokens}
    plain = [generate(engine, "off", [prompt], **size)[0][0] for prompt in prompts]
    assert len(set(plain[0])) > 3
    for plan in plans:
        found, stats = generate(engine, plan.name, prompts, **size)
        assert found == plain, plan.name
        # a draft without some layers may be right about none of a few tokens
        is_sure = plan.widths and (max_tokens == NUM_TOKENS or not plan.self_drafts)
        assert stats.mean_acceptance_length > 1 or not is_sure, plan.name
    drawn = {"temperature": 0.8, "seed": 3, **size}
    first, _ = generate(engine, "off", prompts[:2], **drawn)
    assert generate(engine, "chain-4", prompts[:2], **drawn)[0] == first


def check_logits(path: Path | Engine, model: Any, dtype: str, tolerance: float = TOLERANCE) -> None:
    """One pass over a prompt, each row with the logits of transformers."""
    error, bound = error_of_logits(path, model, dtype)
    bound = tolerance if bound is None else bound
    assert error < bound, (error, bound)


def error_of_logits(
    path: Path | Engine, model: Any, dtype: str, num_tokens: int | None = None
) -> tuple[float, float | None]:
    """Largest error of one pass over a prompt, over the spread; of bfloat16 also what to allow."""
    engine = path if isinstance(path, Engine) else Engine.load(path)
    tokens = torch.tensor(models.prompts()[-1][:num_tokens])
    count = len(tokens)
    with torch.inference_mode():
        want = model(tokens[None]).logits[0]
        found = engine.target(
            tokens,
            torch.arange(count),
            torch.tensor([0, count], dtype=torch.int32),
            torch.arange(count, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            None,
            torch.arange(count // 16 + 1, dtype=torch.int32)[None],  # blocks of the engine's cache
            torch.arange(count),
            *states_of_one(engine.cache.states, count),
        )
    bound = None
    if dtype == "bfloat16":
        # everything between the projections is in bfloat16: what that costs transformers itself
        with torch.inference_mode():
            rounded = copy.deepcopy(model).bfloat16()(tokens[None]).logits[0].float()
        bound = 2 * float((rounded - want).abs().max() / want.std())
    return float((found.float() - want).abs().max() / want.std()), bound


# the default tier runs experts and integers of checkpoints: test_quantized_mixtures.py
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantize", "group", "dtype"),
    [
        ("llama", "int4", 32, "float32"),
        ("llama", "int8", None, "bfloat16"),
        ("llama", "int8", 32, "float32"),
        # a minute: the oracle of fp8 goes column by column
        ("llama", "fp8", None, "float32"),
        # biases
        ("phi", "int4", None, "float32"),
        ("phi3", "int4", 128, "bfloat16"),
        ("gemma3", "int8", None, "float32"),
    ],
)
def test_plans_and_logits(make, name, quantize, group, dtype) -> None:
    checkpoint, engine = make(name, quantize, group, dtype=dtype)
    check_logits(engine, reference_model(checkpoint, engine), dtype)
    check_plans(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "group", "dtype"),
    [
        ("int4", 32, "float32"),
        ("int4", None, "bfloat16"),
        pytest.param("int8", None, "float32", marks=pytest.mark.slow),
    ],
)
def test_compiled_engines(make, quantize, group, dtype) -> None:
    """The C++ operator in compiled programs; and its weights are those of an eager engine."""
    checkpoint, engine = make("llama", quantize, group, dtype=dtype, backend="cpu")
    check_logits(engine, reference_model(checkpoint, engine), dtype)
    check_plans(engine)
    _, eager = make("llama", quantize, group, dtype=dtype)
    one, other = (load_file(path / "target" / "weights.safetensors") for path in (engine, eager))
    quantized = [key for key in one if ":int" in key]
    assert len(quantized) == 10
    assert all(torch.equal(one[key], other[key]) for key in quantized)


@pytest.mark.slow
def test_segments_say_the_same(make) -> None:
    """Cut at layers, with the integers of each layer next to each other in the file."""
    _, engine = make("llama", "int4", 32, segments=True)
    _, whole = make("llama", "int4", 32)
    assert read_manifest(engine).segments is not None
    check_plans(engine)
    prompts = models.prompts()[:3]
    for plan in ("off", "tree-2-2-1"):
        assert (
            generate(Engine.load(engine), plan, prompts)[0]
            == (generate(Engine.load(whole), plan, prompts)[0])
        )
    one, other = (load_file(path / "target" / "weights.safetensors") for path in (engine, whole))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "group"),
    [("int4", 32), pytest.param("int8", None, marks=pytest.mark.slow)],
)
def test_offloaded_integers_give_the_same_tokens(make, quantize, group) -> None:
    """Some layers and none in memory; a pass reads integers, a fraction of the model's bytes."""
    # a target that drafts, too, is not offloaded
    plans = tuple(plan for plan in PLANS if not plan.self_drafts)
    _, engine = make("llama", quantize, group, segments=True, backend="cpu", plans=plans)
    prompts = models.prompts()[:3]
    kept = Engine.load(engine)
    model = SegmentedModel.read(engine / "target" / "segments.json")
    pieces, rest = read_pieces(model, engine / "target" / "weights.safetensors")
    assert any(":int" in key for piece in pieces for key in piece.keys)
    for budget in (least_budget(pieces), sum(piece.span for piece in pieces) - 1):
        plan = plan_offload(pieces, rest, budget)
        offloaded = Engine.load(engine, offload_weights=budget)
        assert offloaded.target.offload == plan
        assert plan.streamed
        for name in ("off", "tree-2-2-1"):
            wanted, _ = generate(kept, name, prompts)
            assert generate(offloaded, name, prompts)[0] == wanted


def test_integers_are_rounded_from_the_checkpoint(make) -> None:
    """Once: the engine's own type is not between them. Fused rows are in the order of the names."""
    checkpoint, engine = make("llama", "int8", None, dtype="bfloat16")
    whole, held = (
        load_file(checkpoint / "model.safetensors"),
        load_file(engine / "target" / "weights.safetensors"),
    )
    q, k, v = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
    table = "model.embed_tokens.weight"
    for names in (("model.layers.0.mlp.down_proj.weight",), (q, k, v), (table,)):
        want = quantize(torch.cat([whole[name] for name in names]), QuantizedLayout(8))
        assert torch.equal(held["+".join(names) + ":int8"], want)
    assert not held.keys() & {"lm_head.weight", table}


def test_bytes_are_told(make) -> None:
    """The manifest's plan of memory is the file's tensors; inspect says the layout."""
    from specc.cli.render import weight_lines

    _, engine = make("llama", "int4", 32, dtype="float32")
    manifest = read_manifest(engine)
    assert manifest.models[0].quantization == "int4-g32-zeros"
    held = load_file(engine / "target" / "weights.safetensors")
    assert manifest.memory_plan["target"].weights == sum(item.nbytes for item in held.values())
    (line, _) = weight_lines(manifest)
    told = "weights of projections in int4-g32-zeros, the embedding in int8, the rest in float32: "
    assert line.startswith(f"target has {told}")


def test_kinds_that_a_backend_lacks_are_refused() -> None:
    """By the option before anything is read, and of a checkpoint when its graph is there."""
    facts = facts_of("onnx")
    with pytest.raises(ConfigError) as caught:
        refuse(CompileRequest(CompileConfig(quantize="fp8"), (), facts, facts.options))
    assert caught.value.found == "--quantize fp8 with backend onnx"
    assert caught.value.needed.startswith(
        "--quantize int8 or int4, or a backend that reads fp8: cpu"
    )
    for kind in ("int8", "int4"):
        refuse(CompileRequest(CompileConfig(quantize=kind), (), facts, facts.options))
    weight = Weight(("w",), torch.float32, (64, 64), quantized=QuantizedLayout.named("mxfp4"))
    program = SimpleNamespace(name="target", weights={"w": weight})
    RequireLayouts(compiler_backend("cuda").facts).run(program)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="target: w in mxfp4, and backend onnx"):
        RequireLayouts(facts).run(program)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "columns", "found", "needed"),
    [
        ("int8", 100, "", ""),
        ("int8-g32", 96, "", ""),
        ("int4-g64", 128, "", ""),
        ("fp8", 100, "", ""),
        ("int4-g64-zeros", 128, "w in int4 with zero points of its own", "without zero points"),
        ("int8-zeros", 100, "w in int8 with zero points of its own", "without zero points"),
        ("int4-g64", 96, "w in int4 with 96 columns in groups of 64", "groups that divide"),
        ("fp8-g128", 64, "w in fp8 with 64 columns in groups of 128", "groups that divide"),
        ("mxfp4", 64, "w in mxfp4", "weights in int8 or int4 or fp8"),
    ],
)
def test_forms_that_tensorrt_lacks_are_refused(
    layout: str, columns: int, found: str, needed: str
) -> None:
    """Each by its name, of a graph; others take them all."""
    quantized = QuantizedLayout.named(layout)
    weight = Weight(("w",), torch.float32, (64, columns), quantized=quantized)
    program = SimpleNamespace(name="target", weights={"w": weight})
    for name in ("cpu", "cuda", "eager"):
        RequireLayouts(facts_of(name)).run(program)  # type: ignore[arg-type]
    if not found:
        RequireLayouts(facts_of("tensorrt")).run(program)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError) as caught:
        RequireLayouts(facts_of("tensorrt")).run(program)  # type: ignore[arg-type]
    assert caught.value.found.startswith(f"target: {found}")
    assert caught.value.found.endswith(", and backend tensorrt")
    assert needed in caught.value.needed
    # those that take the form of another kind are not named
    assert ("onnx" in caught.value.needed) == (quantized.kind in facts_of("onnx").quantized)
    assert caught.value.do == "compile with --backend cpu"


@pytest.mark.parametrize(
    ("quantize", "group", "layout"),
    [
        ("int8", None, "int8"),
        ("int8", 128, "int8-g128"),
        ("int4", None, "int4-g64"),
        ("int4", 32, "int4-g32"),
        ("fp8", None, "fp8"),
        (None, None, None),
    ],
)
def test_names_of_layouts(quantize: str | None, group: int | None, layout: str | None) -> None:
    config = CompileConfig(quantize=quantize, quantize_group=group)
    assert config.quantization == layout
    assert layout is None or QuantizedLayout.named(layout).name == layout


ROUNDED = SpecPlan.from_widths((1, 1), ("self_int8",))


@pytest.mark.parametrize(
    ("options", "plans", "keeps_integers", "is_refused"),
    [
        ({"quantize": "int4", "tensor_parallel_size": 2}, (), False, True),
        ({"tensor_parallel_size": 2}, (ROUNDED,), False, True),
        ({"tensor_parallel_size": 2}, (), True, True),
        ({"tensor_parallel_size": 2}, PLANS, False, False),
        ({"quantize": "int4"}, (ROUNDED,), True, False),
    ],
)
def test_parts_of_integers_are_for_some_backends(
    options, plans, keeps_integers, is_refused
) -> None:
    schemes = {"draft_0": "packed"} if keeps_integers else {}
    # onnx runs no self-draft
    names = ("cuda", "cpu") if any(plan.self_drafts for plan in plans) else ("cuda", "cpu", "onnx")
    for name in names:
        facts = facts_of(name)
        asked = CompileRequest(
            CompileConfig(**options), plans, facts, facts.options, schemes=schemes
        )
        if is_refused and name != "cpu":
            with pytest.raises(ConfigError, match=f"for 2 ranks with backend {name}"):
                refuse(asked)
        else:
            refuse(asked)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"quantize": "int5"}, "--quantize int5"),
        ({"quantize": "fp8", "quantize_group": 32}, "--quantize-group 32 and --quantize fp8"),
        ({"quantize_group": 64}, "--quantize-group 64"),
        ({"quantize": "int4", "quantize_group": 48}, "--quantize-group 48"),
        ({"quantize": "int8", "quantize_group": 48}, "--quantize-group 48"),
    ],
)
def test_options_that_are_refused(options, found) -> None:
    with pytest.raises(ConfigError) as caught:
        CompileConfig(**options)
    assert caught.value.found.startswith(found)
