"""Drafts that are rounded, beside a target that is not: `--draft-quantize`.

What such a draft model is to compute, a target of the same checkpoint that is compiled with
`--quantize` says: the same logits, bit for bit. A head whose weights are levels of its format
already is compared with what it computes from these. No draft changes an output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specc.artifact.directory import read_manifest
from specc.cli.render import weight_lines
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.speculation.plans import MERGE, SpecPlan
from tests import engines, models
from tests.draft_kinds.rig import all_rigs
from tests.drafts import DRAFTS
from tests.head_reference import Reference
from tests.heads import CASES, draw_tensors, write_head
from tests.lossless import Zoo
from tests.runtime.draft_cases import open_target, outputs, write_target
from tests.runtime.head_rig import TREE, HeadOracle, load, options, prompts_of, serve
from tests.runtime.test_rounded_drafts import logits
from tests.tiers import only

NAME, HEAD = "qwen3", "safeailab-narrow"
PAIR = ("draft_0", "draft_1")
PLANS = (SpecPlan.from_widths((2, 1), PAIR, MERGE), SpecPlan.from_widths((1, 1, 1)))


def compile_pair(zoo: Zoo, path: Path, num_drafts: int = 2, **changes: Any) -> Path:
    config = CompileConfig(
        plans=PLANS[-num_drafts:],
        max_batch_size=4,
        max_seq_len=models.MAX_SEQ_LEN,
        probe=False,
        **{"backend": "eager"} | changes,
    )
    drafts = [zoo.checkpoint(NAME, draft=draft) for draft in DRAFTS]
    return engines.build(zoo.checkpoint(NAME), drafts[:num_drafts], path, config)


def layouts_of(path: Path) -> list[str | None]:
    return [model.quantization for model in read_manifest(path).models]


@pytest.mark.parametrize("kind", only(["int4"], ["int4", "int8", "fp8", "q4_k_m"]))
def test_a_draft_is_the_model_that_is_compiled_with_quantize(
    zoo: Zoo, tmp_path: Path, kind: str
) -> None:
    beside = compile_pair(zoo, tmp_path / "pair", draft_quantize=(kind, "off"))
    layout = {"int4": "int4-g64-zeros"}.get(kind, kind)
    assert layouts_of(beside) == [None, layout, None]
    config = CompileConfig(
        plans=(SpecPlan.from_widths(()),),
        max_batch_size=4,
        max_seq_len=models.MAX_SEQ_LEN,
        quantize=kind,
        backend="eager",
        probe=False,
    )
    alone = engines.build(zoo.checkpoint(NAME, draft=DRAFTS[0]), [], tmp_path / "alone", config)
    engine = Engine.load(beside)
    rounded, plain = engine.drafts
    assert torch.equal(logits(rounded), logits(Engine.load(alone).target))
    # the target and the other draft have the checkpoint's
    floats = Engine.load(compile_pair(zoo, tmp_path / "floats"))
    assert torch.equal(logits(engine.target), logits(floats.target))
    assert torch.equal(logits(plain), logits(floats.drafts[1]))
    assert not torch.equal(logits(rounded), logits(floats.drafts[0]))
    lines = weight_lines(read_manifest(beside))
    assert any(line.startswith(f"draft_0 has weights of projections in {layout}") for line in lines)


def test_a_draft_stays_in_floats_beside_a_rounded_target(zoo: Zoo, tmp_path: Path) -> None:
    path = compile_pair(zoo, tmp_path / "e", quantize="int8", draft_quantize="off")
    assert layouts_of(path) == ["int8", None, None]
    followed = compile_pair(zoo, tmp_path / "all", quantize="int8")
    assert layouts_of(followed) == ["int8"] * 3
    floats = Engine.load(compile_pair(zoo, tmp_path / "floats"))
    assert torch.equal(logits(Engine.load(path).drafts[0]), logits(floats.drafts[0]))


@pytest.mark.parametrize("backend", ["eager", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", [plan.name for plan in PLANS])
def test_outputs_are_those_of_off(zoo: Zoo, tmp_path: Path, plan: str, backend: str) -> None:
    path = compile_pair(
        zoo, tmp_path / "e", draft_quantize=("int4", "int8"), quantize_group=32, backend=backend
    )
    assert layouts_of(path) == [None, "int4-g32-zeros", "int8-g32"]
    engine = Engine.load(path)
    core = EngineCore(engine, plan)
    assert outputs(core) == outputs(EngineCore(engine, "off"))
    assert core.scheduler.stats.num_accepted_tokens > 0


def in_levels(tensor: Tensor) -> Tensor:
    """What int8 rounds it to, in which int8 loses nothing."""
    if tensor.ndim != 2 or not tensor.is_floating_point():
        return tensor
    scale = tensor.abs().amax(1, keepdim=True) / 127
    return torch.round(tensor / scale) * scale


def test_a_head_s_logits_are_those_of_its_rounded_weights(zoo: Zoo, tmp_path: Path) -> None:
    case, target = CASES[HEAD], write_target(zoo)
    write_head(tmp_path / "head", case)
    tensors = {name: in_levels(tensor) for name, tensor in draw_tensors(case).items()}
    save_file(tensors, str(tmp_path / "head" / "model.safetensors"))
    config = options(plans=(TREE,), draft_quantize=("int8",))
    path = engines.build(target, tmp_path / "head", tmp_path / "engine", config)
    assert layouts_of(path) == [None, "int8"]
    # rows that are looked up are few bytes, and often the target's
    assert read_manifest(path).models[1].embedding is None
    model = open_target(target)
    embedding = model.get_input_embeddings().weight.detach()
    oracle = HeadOracle(model, Reference(case, tensors, embedding))
    core = EngineCore(load(path), TREE.name)
    oracle.watch(core)
    serve(core, oracle, prompts_of(4), num_tokens=8, temperature=1.5)
    assert oracle.num_nodes > 60


RIGS = {str(rig): rig for rig in all_rigs() if rig.is_first}


@pytest.mark.parametrize("name", only(["eagle3-safeailab-narrow", "medusa-vllm"], RIGS))
def test_drafts_of_every_kind(name: str, zoo: Zoo) -> None:
    rig = RIGS[name]
    path = rig.engine(zoo, label="int4", draft_quantize=("int4",), quantize_group=32)
    assert layouts_of(path) == [None, "int4-g32-zeros"]
    manifest, plain = read_manifest(path), read_manifest(rig.engine(zoo))
    sizes = [x.memory_plan["draft_0"].weights for x in (manifest, plain)]
    assert manifest.memory_plan["target"] == plain.memory_plan["target"]
    assert sizes[0] != sizes[1]
    engine = Engine.load(path)
    assert outputs(EngineCore(engine, TREE.name)) == outputs(EngineCore(engine, "off"))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"draft_quantize": "int5"}, "--draft-quantize int5"),
        ({"draft_quantize": "q4_k_m", "backend": "cuda"}, "--draft-quantize q4_k_m with backend"),
        ({"draft_quantize": "fp8", "backend": "onnx"}, "--draft-quantize fp8 with backend onnx"),
        (
            {"draft_quantize": "fp8", "quantize_group": 32},
            "--quantize-group 32 and --draft-quantize fp8",
        ),
        ({"draft_quantize": ("int8", "int4", "off")}, "3 times --draft-quantize, and 2 draft"),
    ],
)
def test_what_drafts_are_not_rounded_to(
    zoo: Zoo, tmp_path: Path, given: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match=found) as raised:
        compile_pair(zoo, tmp_path / "e", **given)
    assert raised.value.do


def test_plans_without_a_draft_model_have_nothing_to_round(zoo: Zoo, tmp_path: Path) -> None:
    """Lookups have no weights, and a self-draft has those that its name says."""
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1, 1), ("lookup-3",)),),
        max_seq_len=models.MAX_SEQ_LEN,
        draft_quantize=("int4",),
        backend="eager",
        probe=False,
    )
    with pytest.raises(ConfigError, match="1 times --draft-quantize, and 0 draft models") as raised:
        engines.build(zoo.checkpoint(NAME), [], tmp_path / "e", config)
    assert "leave out --draft-quantize" in raised.value.do


def test_groups_may_be_the_drafts_alone() -> None:
    config = CompileConfig(quantize="fp8", draft_quantize=("int4",), quantize_group=128)
    assert config.quantization == "fp8"
    assert config.rounded_drafts(2) == ["int4", "int4"]


@pytest.mark.parametrize("num_cut", [1, 2])
def test_ranks_of_a_backend_that_cuts_no_integers(num_cut: int) -> None:
    """A draft that rank 0 has alone is not cut."""
    from specc.artifact.backends import facts_of
    from specc.compile_request import CompileRequest
    from specc.refusals import refuse

    config = CompileConfig(
        draft_quantize=("int4",), tensor_parallel_size=2, draft_tensor_parallel_size=num_cut
    )
    request = CompileRequest(config, (), facts_of("cuda"), facts_of("cuda").options, 1)
    if num_cut == 1:
        refuse(request)
        return
    with pytest.raises(ConfigError, match="quantized weights for 2 ranks"):
        refuse(request)
