"""Engines whose draft is the MTP module of their target."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specc.cli.render import head_lines
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.errors import HeadError, SpeccError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, quantized_checkpoints
from tests.lossless import Zoo
from tests.mtp import FORMS, LAYERS, WIDTH, MtpReference, change_tensors, write_target
from tests.runtime.head_rig import (
    BLOCK,
    CHAIN,
    DYNAMIC,
    TREE,
    HeadOracle,
    load,
    options,
    prompts_of,
    serve,
)

# one of each form
FIRST = ("glm4_moe", "qwen3_next")


def cases(names: Sequence[str], *others: Sequence[Any]) -> list[Any]:
    """All of them; in the default tier those of these names, and of others the first."""
    found = []
    for name, *more in itertools.product(FORMS, *others):
        is_first = name in names and all(x == xs[0] for x, xs in zip(more, others, strict=True))
        label = "-".join(str(getattr(x, "name", x)) for x in (name, *more))
        marks = () if is_first else pytest.mark.slow
        found.append(pytest.param(name, *more, marks=marks, id=label))
    return found


def with_module(target: Path, _: Sequence[Path], path: Path, config: CompileConfig) -> object:
    """Compile a target with the module in its own checkpoint."""
    return build(target, "mtp", path, config)


@pytest.fixture(scope="module")
def compiled(zoo: Zoo) -> Callable[..., Path]:
    def make(name: str, label: str = "eager", **changes: Any) -> Path:
        target = zoo.once(f"mtp-{name}", lambda path: write_target(name, path))
        return zoo.once(
            f"mtp-{name}-{label}",
            lambda path: engines.build(
                target, (), path, options(**changes), builder=with_module, key=("mtp",)
            ),
        )

    return make


@pytest.fixture(scope="module")
def oracle_of(zoo: Zoo) -> Callable[[str], HeadOracle]:
    from transformers import AutoModelForCausalLM

    def make(name: str) -> HeadOracle:
        path = zoo.once(f"mtp-{name}", lambda made: write_target(name, made))
        target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return HeadOracle(target, MtpReference(target, name))

    return make


@pytest.mark.parametrize(("name", "plan"), cases(FIRST, (TREE, CHAIN, DYNAMIC)))
def test_logits_of_every_node(
    name: str, plan: SpecPlan, compiled: Callable[..., Path], oracle_of: Callable[..., Any]
) -> None:
    """Chunks, requests that join, prefixes that are shared, acceptances and rejections."""
    core = EngineCore(load(compiled(name)), plan.name)
    oracle = oracle_of(name)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    stats = core.scheduler.stats
    assert oracle.depths == set(range(plan.max_depth))
    assert oracle.num_nodes > 60
    assert oracle.num_rows > 300
    assert stats.num_cached_tokens > 2 * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(FIRST[1:]))
def test_requests_that_had_to_give_way(
    name: str, compiled: Callable[..., Path], oracle_of: Callable[..., Any]
) -> None:
    core = EngineCore(load(compiled(name), kv_cache_tokens=76), TREE.name)
    oracle = oracle_of(name)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=20, every=1)
    assert core.scheduler.stats.num_preemptions > 1
    assert oracle.num_nodes > 100


@pytest.mark.parametrize(("name", "batch", "temperature"), cases(FIRST[:1], (3, 1), (0.0, 1.0)))
def test_outputs_are_those_without_drafts(
    name: str, batch: int, temperature: float, compiled: Callable[..., Path]
) -> None:
    engine = Engine.load(compiled(name))
    found = {}
    for plan in ("off", CHAIN.name, TREE.name, DYNAMIC.name):
        core = EngineCore(engine, plan)
        requests = [
            core.requests.make(
                prompt, SamplingParams(max_tokens=12, temperature=temperature, seed=i)
            )
            for i, prompt in enumerate(prompts_of(BLOCK, seed=9)[:batch])
        ]
        for request in requests:
            core.scheduler.add(request)
        while core.scheduler.has_work:
            core.advance()
        found[plan] = [request.output_token_ids for request in requests]
    assert all(outputs == found["off"] for outputs in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_compiled_programs(
    name: str, compiled: Callable[..., Path], oracle_of: Callable[..., Any]
) -> None:
    path = compiled(name, "cpu", backend="cpu", plans=(TREE,))
    core, oracle = EngineCore(load(path), TREE.name), oracle_of(name)
    found = serve(core, oracle, prompts_of(BLOCK), temperature=1.0)
    assert oracle.num_rows > 500
    oracle.reset()
    plain = serve(EngineCore(load(path), "off"), oracle, prompts_of(BLOCK), temperature=1.0)
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]


@pytest.mark.slow
def test_targets_with_quantized_weights(zoo: Zoo, tmp_path: Path) -> None:
    """The module is quantized as its target is; the reference has what the weights stand for."""
    from transformers import AutoModelForCausalLM

    form = quantized_checkpoints.float8_blocks(32)
    source = zoo.once("mtp-glm4_moe", lambda path: write_target("glm4_moe", path))
    written = quantized_checkpoints.write_checkpoint(source, tmp_path, form.config, form.writer)
    assert any(f"layers.{LAYERS}." in name for name in written.weights)
    given = options(plans=(TREE,), weight_only=True)
    build(written.quantized, "mtp", tmp_path / "engine", given)
    core = EngineCore(load(tmp_path / "engine"), TREE.name)
    exact = AutoModelForCausalLM.from_pretrained(written.exact, dtype=torch.float32).eval()
    oracle = HeadOracle(exact, MtpReference(exact, "glm4_moe"))
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    assert oracle.num_nodes > 60
    manifest = core.engine.manifest
    assert manifest is not None
    assert manifest.models[1].quantization == manifest.models[0].quantization != ""


def test_what_the_engine_says(compiled: Callable[..., Path]) -> None:
    manifest = Engine.load(compiled("glm4_moe")).manifest
    assert manifest is not None
    target, draft = manifest.models
    assert target.taps is not None
    assert draft.head is not None
    assert (target.taps.boundaries, target.taps.is_last_normed) == ((LAYERS,), True)
    assert (draft.head.kind, draft.head.layout, draft.head.width) == ("mtp", "DeepSeek", WIDTH)
    assert (len(draft.layers), target.unread_tensors) == (1, ())
    assert [entry.heads for entry in manifest.plans] == [("draft_0",)] * 3 + [()]
    (line,) = head_lines(manifest)
    assert "(mtp, files of DeepSeek)" in line
    assert f"boundaries {LAYERS}, the last after the final norm" in line
    assert "embed_tokens.weight and lm_head.weight" in line


def test_targets_without_a_module(zoo: Zoo, tmp_path: Path) -> None:
    target = write_target("glm4_moe", tmp_path / "target")
    change_tensors(target, lambda own: {k: v for k, v in own.items() if "layers.2." not in k})
    with pytest.raises(HeadError, match="draft 0: --draft mtp, and no MTP module"):
        build(target, "mtp", tmp_path / "e", options(plans=()))
    with pytest.raises(HeadError, match="a target that is a module"):
        build(nn.Linear(2, 2), "mtp", tmp_path / "e", options(plans=()))
    assert not (tmp_path / "e").exists()


def test_what_modules_do_not_go_with(zoo: Zoo, tmp_path: Path) -> None:
    target = zoo.once("mtp-glm4_moe", lambda path: write_target("glm4_moe", path))
    with pytest.raises(SpeccError, match="--draft-kv window=16,sink=2, and the MTP module mtp"):
        build(target, "mtp", tmp_path / "e", options(plans=(), draft_kv=("window=16,sink=2",)))
