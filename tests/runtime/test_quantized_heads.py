"""Drafts that read the hidden states of a target whose weights are integers.

They stay in the engine's floating-point type, but for an embedding and a head that are the
target's. Every logit of theirs is compared with that of the draft beside a model of transformers,
whose weights are those that the target's integers stand for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from tests import engines, quantized_checkpoints
from tests.block_heads import BLOCK_CASES
from tests.block_heads import draw_tensors as draw_block
from tests.block_reference import BlockReference
from tests.draft_kinds import block, eagle3
from tests.draft_kinds.mtp import with_module
from tests.head_reference import Reference
from tests.heads import CASES, draw_tensors, write_head
from tests.lossless import Zoo
from tests.medusa_heads import MEDUSA_CASES, write_medusa
from tests.mtp import MtpReference
from tests.mtp import write_target as write_mtp_target
from tests.runtime.block_rig import BlockOracle
from tests.runtime.draft_cases import open_target, outputs, write_target
from tests.runtime.head_rig import BLOCK, TREE, HeadOracle, load, options, prompts_of, serve
from tests.runtime.test_quantized import reference_model
from tests.tiers import only

INT4 = {"quantize": "int4", "quantize_group": 32}
LAYOUTS = [pytest.param({"quantize": "int8"}, id="int8"), pytest.param(INT4, id="int4-g32")]
HEAD, DRAFTER, MODULE = "safeailab-narrow", "z-lab", "glm4_moe"


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> Path:
    return write_target(zoo)


def compile_head(zoo: Zoo, layout: dict[str, Any], backend: str = "eager") -> Path:
    label = f"{backend}-{CompileConfig(**layout).quantization}"
    (rig,) = eagle3.RIGS
    return rig.engine(zoo, HEAD, label, plans=(TREE,), backend=backend, **layout)


def layouts_of(path: Path) -> list[str | None]:
    """How the models of an engine hold their projections."""
    manifest = Engine.load(path).manifest
    assert manifest is not None
    return [model.quantization for model in manifest.models]


def serve_beside(path: Path, oracle: Any) -> None:
    core = EngineCore(load(path), TREE.name)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)


def oracle_of_head(model: Any) -> HeadOracle:
    embedding = model.get_input_embeddings().weight.detach()
    return HeadOracle(model, Reference(CASES[HEAD], draw_tensors(CASES[HEAD]), embedding))


@pytest.mark.parametrize("layout", only(["int4-g32"], LAYOUTS))
def test_a_head(layout: dict[str, Any], zoo: Zoo, target: Path) -> None:
    path = compile_head(zoo, layout)
    stored = {"int8": "int8", "int4": "int4-g32-zeros"}[layout["quantize"]]
    assert layouts_of(path) == [stored, None]
    oracle = oracle_of_head(reference_model(target, path))
    serve_beside(path, oracle)
    assert oracle.num_nodes > 60
    assert oracle.num_rows > 200


@pytest.mark.slow
def test_a_head_beside_a_quantized_checkpoint(tmp_path: Path, target: Path) -> None:
    form = quantized_checkpoints.packed(4, 32)
    written = quantized_checkpoints.write_checkpoint(target, tmp_path, form.config, form.writer)
    head, path = tmp_path / "head", tmp_path / "engine"
    write_head(head, CASES[HEAD])
    engines.build(written.quantized, head, path, options(plans=(TREE,)))
    assert layouts_of(path) == ["int4-g32", None]
    oracle = oracle_of_head(open_target(written.exact))
    serve_beside(path, oracle)
    assert oracle.num_nodes > 60


@pytest.mark.slow
def test_a_block_drafter(zoo: Zoo, target: Path) -> None:
    """It has the target's embedding and head, in the target's integers."""
    path = block.RIGS[0].engine(zoo, DRAFTER, "eager-int8", plans=(TREE,), quantize="int8")
    assert layouts_of(path) == ["int8", "int8"]
    ends = reference_model(target, path)
    weights = [ends.get_input_embeddings().weight, ends.get_output_embeddings().weight]
    case = BLOCK_CASES[DRAFTER]
    reference = BlockReference(case, draw_block(case), *(end.detach() for end in weights))
    oracle = BlockOracle(reference_model(target, path), reference)
    serve_beside(path, oracle)
    assert oracle.num_passes > 15


@pytest.mark.slow
def test_a_module_of_the_target(zoo: Zoo) -> None:
    """Mixtures, too: the target's experts are integers, the module's are not; its ends are."""
    from transformers import AutoModelForCausalLM

    target = zoo.once(f"mtp-{MODULE}", lambda path: write_mtp_target(MODULE, path))
    config = options(plans=(TREE,), quantize="int8")
    path = zoo.once(
        f"mtp-{MODULE}-int8",
        lambda made: engines.build(target, (), made, config, builder=with_module, key=("mtp",)),
    )
    assert layouts_of(path) == ["int8", "int8"]
    given = AutoModelForCausalLM.from_pretrained(target, dtype="float32").eval()
    rounded = reference_model(target, path)
    oracle = HeadOracle(rounded, MtpReference(given, MODULE, ends=rounded))
    serve_beside(path, oracle)
    assert oracle.num_nodes > 60


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_compiled_outputs_are_those_without_drafts(
    layout: dict[str, Any], temperature: float, zoo: Zoo
) -> None:
    engine = Engine.load(compile_head(zoo, layout, "cpu"))
    kind = {"temperature": temperature}
    found, plain = (outputs(EngineCore(engine, name), kind) for name in (TREE.name, "off"))
    assert found == plain


@pytest.mark.slow
def test_medusa_heads(zoo: Zoo, target: Path, tmp_path: Path) -> None:
    name = next(iter(MEDUSA_CASES))
    write_medusa(tmp_path / "heads", MEDUSA_CASES[name])
    build(target, tmp_path / "heads", tmp_path / "engine", options(plans=(TREE,), **INT4))
    assert layouts_of(tmp_path / "engine") == ["int4-g32-zeros", None]
    engine = Engine.load(tmp_path / "engine")
    found, plain = (outputs(EngineCore(engine, plan)) for plan in (TREE.name, "off"))
    assert found == plain
