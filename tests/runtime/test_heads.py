"""Engines whose draft reads the target's hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.manifest import Manifest
from specc.bench.peers import prepare
from specc.cli.bench.engine import BenchOptions, _prepare_peers
from specc.cli.render import head_lines
from specc.compiler.build import build
from specc.compiler.in_memory import load_config
from specc.errors import ConfigError, EngineError, HeadError, SpeccError
from specc.progress import PhaseTimer
from specc.runtime.backends.offload_budget import check_offload
from specc.runtime.backends.overlap import check_overlap
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.speculation.plan_json import heads_of
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.head_reference import Reference
from tests.heads import CASES, WIDTH, draw_tensors, write_head
from tests.lossless import Zoo
from tests.runtime.draft_cases import (
    SIZES,
    compiler_of,
    open_target,
    outputs,
    serve_in_little_room,
    serve_with_pauses,
    write_target,
)
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
from tests.runtime.live_rig import ScriptedNodes

NAME = "safeailab-narrow"


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> Path:
    return write_target(zoo)


@pytest.fixture(scope="module")
def reference_of(target: Path) -> Callable[[str], tuple[Any, Reference]]:
    model = open_target(target)

    def make(name: str) -> tuple[Any, Reference]:
        embedding = model.get_input_embeddings().weight.detach()
        return model, Reference(CASES[name], draw_tensors(CASES[name]), embedding)

    return make


@pytest.fixture(scope="module")
def compiled(zoo: Zoo, target: Path) -> Callable[..., Path]:
    """An engine with a head."""
    return compiler_of(zoo, target, "head", CASES, write_head, NAME)


@pytest.mark.parametrize(
    "plan",
    [pytest.param(CHAIN, marks=pytest.mark.slow), TREE, DYNAMIC],
    ids=lambda plan: plan.name,
)
def test_logits_of_every_node(
    plan: SpecPlan, compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    """Chunks, requests that join, prefixes that are shared, acceptances and rejections."""
    core = EngineCore(load(compiled()), plan.name)
    oracle = HeadOracle(*reference_of(NAME))
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    stats = core.scheduler.stats
    assert oracle.depths == set(range(plan.max_depth))
    assert oracle.num_nodes > 90
    assert oracle.num_rows > 300
    assert stats.num_cached_tokens > 2 * BLOCK
    assert stats.mean_acceptance_length > 1.0


def test_features_of_requests_whose_trees_have_dead_nodes(
    compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    """The target has no features of nodes that it does not verify, and nobody reads any."""
    policy = ScriptedNodes(TREE)
    core = EngineCore(load(compiled()), policy=policy)
    oracle = HeadOracle(*reference_of(NAME))
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    assert any(len(set(live)) > 1 for live in policy.asked)
    assert oracle.depths == set(range(TREE.max_depth))
    assert core.scheduler.stats.mean_acceptance_length > 1.0


@pytest.mark.slow
def test_requests_that_had_to_give_way(
    compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    oracle = HeadOracle(*reference_of(NAME))
    serve_in_little_room(compiled(), oracle)
    assert oracle.num_nodes > 100


def test_a_head_that_did_not_draft_for_a_while(
    compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    oracle = HeadOracle(*reference_of(NAME))
    serve_with_pauses(compiled(), oracle)
    assert oracle.num_nodes > 20


# the default tier has them with other drafters: test_blocks.py, test_mtp.py
@pytest.mark.slow
@pytest.mark.parametrize("plan", [TREE, DYNAMIC], ids=lambda plan: plan.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_those_without_drafts(
    plan: SpecPlan, temperature: float, compiled: Callable[..., Path]
) -> None:
    engine = Engine.load(compiled())
    kind = {"temperature": temperature}
    found, plain = (outputs(EngineCore(engine, name), kind) for name in (plan.name, "off"))
    assert found == plain


@pytest.mark.slow
@pytest.mark.parametrize("plan", [TREE, DYNAMIC], ids=lambda plan: plan.name)
@pytest.mark.parametrize("block_size", [BLOCK, 0])
def test_compiled_programs(
    plan: SpecPlan, block_size: int, compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    """Rows of all tokens, and outputs; what passes compute is not seen there."""
    path = compiled(label=f"cpu-{block_size}", backend="cpu", block_size=block_size)
    core = EngineCore(load(path), plan.name)
    oracle = HeadOracle(*reference_of(NAME))
    found = serve(core, oracle, prompts_of(BLOCK), temperature=1.0)
    assert oracle.num_rows > 500
    oracle.reset()
    core = EngineCore(load(path), "off")
    plain = serve(core, oracle, prompts_of(BLOCK), temperature=1.0)
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]


MERGED = SpecPlan.from_widths((2, 1), ("draft_0", "draft_1"), "merge")
VOTED = SpecPlan.from_widths((1, 1), ("draft_0", "draft_1", "lookup-3"), "vote")
TILED = replace(TREE, name="tiled", tile=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [MERGED, pytest.param(VOTED, marks=pytest.mark.slow)],
    ids=lambda plan: plan.name,
)
def test_beside_other_drafts(
    plan: SpecPlan, zoo: Zoo, target: Path, reference_of: Callable[..., Any]
) -> None:
    """A model and a head propose together: each gets the accepted tokens of the other."""
    sizes = {**SIZES, "num_hidden_layers": 1}
    other = zoo.once("head-beside", lambda path: models.save_tiny("llama", path, 77, **sizes))
    head = zoo.once(f"head-{NAME}", lambda path: write_head(path, CASES[NAME]))
    path = zoo.once(
        "heads-beside",
        lambda made: engines.build(target, [other, head], made, options(plans=(MERGED, VOTED))),
    )
    core = EngineCore(load(path), plan.name)
    oracle = HeadOracle(*reference_of(NAME), number=1)
    oracle.watch(core)
    texts = prompts_of(BLOCK)[1:3]
    found = serve(core, oracle, texts, num_tokens=8, temperature=1.5)
    assert oracle.num_nodes > 15
    assert heads_of(core.engine.plans[plan.name]) == ("draft_1",)
    oracle.reset()
    plain = serve(EngineCore(load(path), "off"), oracle, texts, num_tokens=8, temperature=1.5)
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != NAME])
def test_heads_of_every_layout(
    name: str, compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    core = EngineCore(load(compiled(name)), TREE.name)
    oracle = HeadOracle(*reference_of(name))
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    assert oracle.num_nodes > 100


@pytest.mark.slow
def test_trees_in_tiles(compiled: Callable[..., Path], reference_of: Callable[..., Any]) -> None:
    """Levels are fed in parts where the logits of all nodes exceed the engine's limit."""
    core = EngineCore(load(compiled(label="tiles", plans=(TILED,))), TILED.name)
    oracle = HeadOracle(*reference_of(NAME))
    oracle.watch(core)
    assert core.engine.plans[TILED.name].tile == 2
    serve(core, oracle, prompts_of(BLOCK)[:3])
    assert oracle.num_nodes > 30


def test_every_plan_by_load(
    compiled: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    """Where the policy chooses by load, plans change from step to step."""
    core = EngineCore(load(compiled()), policy="goodput")
    oracle = HeadOracle(*reference_of(NAME))
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK)[2:4], num_tokens=12)
    assert oracle.num_nodes > 10


def test_what_the_engine_says(compiled: Callable[..., Path], target: Path) -> None:
    path = compiled()
    manifest = Engine.load(path).manifest
    assert manifest is not None
    one, head = manifest.models
    assert one.taps is not None
    assert (one.taps.boundaries, one.taps.width) == ((2, 4, 5), 3 * WIDTH)
    assert head.head is not None
    assert (head.head.kind, head.head.layout) == ("eagle3", "SafeAILab")
    assert (head.head.width, head.head.trained_length) == (24, 64)
    assert head.head.shared == ()
    rows = manifest.limits.cache_rows()
    # K and V of 2 heads of 6, and what a token hands on
    assert manifest.memory_plan["draft_0"].cache == rows * 4 * (2 * 2 * 6 + 24)
    slabs = Engine.load(path).cache.slabs["draft_0"]
    assert sum(slab.nbytes for slab in slabs) == manifest.memory_plan["draft_0"].cache
    assert [entry.heads for entry in manifest.plans] == [("draft_0",)] * 3 + [()]


def test_manifests_that_are_refused(compiled: Callable[..., Path]) -> None:
    def changed(change: Callable[[Any], object], found: str) -> None:
        data = json.loads((compiled() / "manifest.json").read_text())
        change(data)
        with pytest.raises(EngineError, match=found):
            Manifest.from_json(data)

    changed(lambda x: x["plans"][0].pop("heads"), r"plan chain-3 has heads \(none\)")
    changed(lambda x: x["models"][0].pop("taps"), "no taps of the target")
    changed(lambda x: x["models"][1]["head"].update(width=0), "rows of 0 columns")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"backend": "onnx", "block_size": 0}, "the backend onnx"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"segments": True}, "--segments"),
        ({"draft_kv": ("window=16,sink=2",)}, "--draft-kv window=16,sink=2, and the head"),
        ({"draft_dtype": ("bfloat16",)}, "in bfloat16, which reads hidden states of float32"),
    ],
)
def test_what_heads_do_not_go_with(
    zoo: Zoo, target: Path, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    head = zoo.once(f"head-{NAME}", lambda path: write_head(path, CASES[NAME]))
    with pytest.raises(SpeccError, match=found):
        build(target, head, tmp_path / "e", options(plans=(), **changes))
    assert not (tmp_path / "e").exists()


def test_a_head_of_another_target(zoo: Zoo, tmp_path: Path) -> None:
    head = zoo.once(f"head-{NAME}", lambda path: write_head(path, CASES[NAME]))
    sizes = {**SIZES, "hidden_size": 2 * WIDTH}
    other = zoo.once("head-other", lambda path: models.save_tiny("llama", path, **sizes))
    with pytest.raises(HeadError, match="draft 0: "):
        build(other, head, tmp_path / "e", options(plans=()))


def test_two_heads_that_read_other_places(zoo: Zoo, target: Path, tmp_path: Path) -> None:
    heads = [
        zoo.once(f"head-{name}", lambda path, name=name: write_head(path, CASES[name]))
        for name in (NAME, "nvidia")
    ]
    with pytest.raises(ConfigError, match=r"boundaries 2, 4, 5, .* 3, 1, 6, 7"):
        build(target, heads, tmp_path / "e", options(plans=()))


def test_what_has_no_place_for_heads(
    zoo: Zoo, compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, manifest = compiled(), Engine.load(compiled()).manifest
    assert manifest is not None
    with pytest.raises(ConfigError, match="--overlap of an engine whose draft reads"):
        check_overlap(manifest, "cuda")
    with pytest.raises(ConfigError, match="--offload-weights of an engine whose draft reads"):
        check_offload(manifest, "cuda", 1 << 20)
    head = zoo.once(f"head-{NAME}", lambda made: write_head(made, CASES[NAME]))
    with pytest.raises(ConfigError, match="--synthetic and the draft head"):
        load_config(head)
    asked: list[Any] = []
    monkeypatch.setattr(prepare, "prepare_peers", lambda names, pair, *rest: asked.append(pair))
    options_ = BenchOptions(against=("transformers",))
    _prepare_peers(Engine.load(path), options_, [CHAIN.name], [], PhaseTimer())
    assert asked[0].draft is None
    assert asked[0].no_draft == f"it has no draft like {head}, a head"
    lines = head_lines(manifest)
    assert "reads the target at boundaries 2, 4, 5, and was trained for 64 positions" in lines[0]
    assert "config.json names no layers" in lines[1]
