"""Engines whose draft fills a block in one pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from specc.artifact.manifest import Manifest
from specc.cli.render import head_lines
from specc.compiler.build import build
from specc.compiler.in_memory import load_config
from specc.drafters.block import BIAS_TENSORS, JOINT_TENSORS, RNN
from specc.errors import ConfigError, EngineError, RequestError, SpeccError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.execution import shared_runner
from specc.runtime.execution.shared_runner import cut_unlikely
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.block_heads import BLOCK_CASES, MASK, draw_tensors, write_block
from tests.block_reference import BlockReference
from tests.heads import CASES, VOCAB, WIDTH, write_head
from tests.lossless import Zoo
from tests.runtime.block_rig import BlockOracle
from tests.runtime.draft_cases import (
    SIZES,
    compiler_of,
    open_target,
    outputs,
    serve_in_little_room,
    serve_with_pauses,
    write_target,
)
from tests.runtime.head_rig import BLOCK, CHAIN, DYNAMIC, TREE, load, options, prompts_of, serve
from tests.runtime.live_rig import SLOW, ByAcceptance
from tests.tiers import every, only

NAME = "z-lab"


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> Path:
    return write_target(zoo)


@pytest.fixture(scope="module")
def oracle_of(target: Path) -> Callable[..., BlockOracle]:
    model = open_target(target)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())

    def make(name: str = NAME, number: int = 0) -> BlockOracle:
        weights = (end.weight.detach() for end in ends)
        case = BLOCK_CASES[name]
        return BlockOracle(model, BlockReference(case, draw_tensors(case), *weights), number)

    return make


@pytest.fixture(scope="module")
def compiled(zoo: Zoo, target: Path) -> Callable[..., Path]:
    """An engine with a block drafter."""
    return compiler_of(zoo, target, "block", BLOCK_CASES, write_block, NAME)


@pytest.mark.parametrize(
    "plan",
    every(3, [CHAIN, TREE, DYNAMIC], 1),
    ids=lambda plan: plan.name,
)
def test_logits_of_every_depth(
    plan: SpecPlan, compiled: Callable[..., Path], oracle_of: Callable[..., BlockOracle]
) -> None:
    """Chunks, requests that join, prefixes that are shared, acceptances and rejections."""
    core, oracle = EngineCore(load(compiled()), plan.name), oracle_of()
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    stats = core.scheduler.stats
    assert oracle.num_passes > 15
    assert oracle.num_rows > 300
    assert stats.num_cached_tokens > 2 * BLOCK
    assert stats.mean_acceptance_length > 1.0


def test_requests_that_had_to_give_way(
    compiled: Callable[..., Path], oracle_of: Callable[..., BlockOracle]
) -> None:
    oracle = oracle_of()
    serve_in_little_room(compiled(), oracle)
    assert oracle.num_passes > 30


def test_a_drafter_that_did_not_draft_for_a_while(
    compiled: Callable[..., Path], oracle_of: Callable[..., BlockOracle]
) -> None:
    oracle = oracle_of()
    serve_with_pauses(compiled(), oracle)
    assert oracle.num_passes > 5


# nodes of DeepSpec's: test_what_drafters_say_of_their_tokens; of Speculators' in captured steps:
# backends/cuda/test_block_rows.py; what a gate adds: tests/passes/step/test_block_bias.py
@pytest.mark.parametrize(
    "name",
    only(["dspark-rnn"], ["dspark-deepspec", "dspark-speculators", "dspark-gated", "dspark-rnn"]),
)
@pytest.mark.parametrize(
    "plan", [pytest.param(CHAIN, marks=pytest.mark.slow), TREE], ids=lambda plan: plan.name
)
def test_logits_of_every_node(
    plan: SpecPlan,
    name: str,
    compiled: Callable[..., Path],
    oracle_of: Callable[..., BlockOracle],
) -> None:
    """Of DSpark: the row of the depth, and what the token before adds."""
    core, oracle = EngineCore(load(compiled(name)), plan.name), oracle_of(name)
    oracle.watch(core)
    oracle.check_trees(core, plan)
    for rule in ("coupled", "mss"):
        serve(core, oracle, prompts_of(BLOCK), num_tokens=6, temperature=1.5, rule=rule)
        oracle.reset()
    assert oracle.num_passes > 10
    assert oracle.num_nodes > 10 * (plan.num_nodes - len(plan.tree.leaves))


@pytest.mark.parametrize("backend", ["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def test_trees_that_end_where_the_drafter_is_unsure(
    backend: str, compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many nodes as each request's own draws say, in one batch; outputs are those of off."""
    label = backend if backend == "eager" else f"{backend}-{BLOCK}"
    engine = load(compiled("dspark-deepspec", label, backend=backend, block_size=BLOCK))
    sizes: list[tuple[int, ...]] = []

    def noted(*given: Any) -> Any:
        group = cut_unlikely(*given)
        sizes.append(group.live)
        return group

    monkeypatch.setattr(shared_runner, "cut_unlikely", noted)
    kinds = ({"temperature": 0.0}, {"temperature": 1.0, "rule": "delta"}, {"temperature": 1.0})
    core = EngineCore(engine, TREE.name, confidence_threshold=0.52)
    found = outputs(core, *kinds)
    assert found == outputs(EngineCore(engine, "off"), *kinds)
    assert {1, 1 + 2, TREE.num_nodes} <= {live for own in sizes for live in own}
    assert any(len(set(own)) > 1 for own in sizes)
    # what counts as drafted is what was verified
    assert 0 < core.scheduler.stats.num_draft_tokens <= sum(sum(own) - len(own) for own in sizes)


def test_what_drafters_say_of_their_tokens(
    compiled: Callable[..., Path], oracle_of: Callable[..., BlockOracle]
) -> None:
    """Of every node, beside a drafter by formulas; and which requests may go by it."""
    core = EngineCore(load(compiled("dspark-deepspec")), TREE.name)
    oracle = oracle_of("dspark-deepspec")
    oracle.sees_confidence = True
    oracle.check_trees(core, TREE)
    serve(core, oracle, prompts_of(BLOCK)[:2], num_tokens=4, temperature=1.5)
    assert oracle.num_confident > 8
    cutting = EngineCore(core.engine, TREE.name, confidence_threshold=0.5)
    for rule in ("mss", "swor"):
        options = SamplingParams(temperature=1.0, rule=rule)
        with pytest.raises(RequestError, match=f"rule='{rule}', and --confidence-threshold"):
            cutting.requests.make([1, 2], options)
        cutting.requests.make([1, 2], SamplingParams(temperature=0.0, rule=rule))


def test_a_drafter_and_a_policy_that_both_leave_nodes_out(compiled: Callable[..., Path]) -> None:
    """The smaller number counts; what the drafter left out is no refusal."""
    engine = load(compiled("dspark-deepspec"))
    core = EngineCore(engine, policy="goodput", adapts_verification=True, confidence_threshold=0.52)
    plans = {name: plan for name, plan in engine.plans.items() if plan.is_static}
    policy = ByAcceptance(plans, SLOW, {"draft_0": [[0.9]]})
    core.scheduler.use(policy)
    kinds = ({"temperature": 0.0}, {"temperature": 1.0, "rule": "delta"}, {"temperature": 1.0})
    assert outputs(core, *kinds) == outputs(EngineCore(engine, "off"), *kinds)
    pairs = [pair for x in policy.groups for pair in zip(x.live, x.allowed, strict=True)]
    whole = {group.plan.num_nodes for group in policy.groups}
    assert {live < most for live, most in pairs} == {True, False}
    # the policy has left some out, too
    assert not {most for _, most in pairs} <= whole
    # nearly nothing is accepted of random drafts
    assert policy._acceptance.rates(CHAIN)[0] < 0.9
    assert 0.3 < policy._ends.going_on(CHAIN)[0] < 1.0


OF_KINDS = [
    NAME,
    "dspark-deepspec",
    "dspark-speculators",
    pytest.param("dspark-gated", marks=pytest.mark.slow),
    "dspark-rnn",
]


# rows and logits of the other kinds: where test_logits_of_every_node says
@pytest.mark.parametrize("name", only([NAME, "dspark-rnn"], OF_KINDS))
@pytest.mark.parametrize("plan", every(3, [CHAIN, TREE, DYNAMIC], 1), ids=lambda plan: plan.name)
def test_outputs_are_those_without_drafts(
    plan: SpecPlan, name: str, compiled: Callable[..., Path]
) -> None:
    engine = Engine.load(compiled(name))
    found, plain = (outputs(EngineCore(engine, name)) for name in (plan.name, "off"))
    assert found == plain


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("speculators-mixed", "dspark-gated")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in BLOCK_CASES
        if name != NAME
    ],
)
def test_drafters_of_every_layout(
    name: str, compiled: Callable[..., Path], oracle_of: Callable[..., BlockOracle]
) -> None:
    core, oracle = EngineCore(load(compiled(name, plans=(TREE,))), TREE.name), oracle_of(name)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK)[1:4], num_tokens=6, temperature=1.5)
    assert oracle.num_passes > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "speculators-mixed", "dspark-speculators", "dspark-rnn"])
@pytest.mark.parametrize("plan", [CHAIN, TREE, DYNAMIC], ids=lambda plan: plan.name)
@pytest.mark.parametrize("block_size", [BLOCK, 0])
def test_compiled_programs(
    name: str,
    plan: SpecPlan,
    block_size: int,
    compiled: Callable[..., Path],
    oracle_of: Callable[..., BlockOracle],
) -> None:
    """Rows of all tokens, and outputs; what passes compute is not seen there."""
    path = compiled(name, f"cpu-{block_size}", backend="cpu", block_size=block_size)
    core, oracle = EngineCore(load(path), plan.name), oracle_of(name)
    found = serve(core, oracle, prompts_of(BLOCK), temperature=1.0)
    assert oracle.num_rows > 500
    oracle.reset()
    plain = serve(EngineCore(load(path), "off"), oracle, prompts_of(BLOCK), temperature=1.0)
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]


MERGED = SpecPlan.from_widths((2, 1), ("draft_0", "draft_1"), "merge")
VOTED = SpecPlan.from_widths((1, 1), ("draft_0", "draft_1", "lookup-3"), "vote")


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "dspark-deepspec"])
@pytest.mark.parametrize("plan", [MERGED, VOTED], ids=lambda plan: plan.name)
def test_beside_other_drafts(
    plan: SpecPlan, name: str, zoo: Zoo, target: Path, oracle_of: Callable[..., BlockOracle]
) -> None:
    """A model and a block drafter propose together: each gets the accepted tokens of the other."""
    sizes = {**SIZES, "num_hidden_layers": 1}
    other = zoo.once("head-beside", lambda path: models.save_tiny("llama", path, 77, **sizes))
    drafter = zoo.once(f"block-{name}", lambda path: write_block(path, BLOCK_CASES[name]))
    path = zoo.once(
        f"blocks-beside-{name}",
        lambda made: engines.build(target, [other, drafter], made, options(plans=(MERGED, VOTED))),
    )
    core, oracle = EngineCore(load(path), plan.name), oracle_of(name, 1)
    oracle.watch(core)
    texts = prompts_of(BLOCK)[1:3]
    found = serve(core, oracle, texts, num_tokens=8, temperature=1.5)
    assert oracle.num_passes > 4
    oracle.reset()
    plain = serve(EngineCore(load(path), "off"), oracle, texts, num_tokens=8, temperature=1.5)
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]
    if plan is MERGED and name != NAME:
        # of DSpark also what is drawn with replacement
        oracle.reset()
        serve(core, oracle, texts, num_tokens=8, temperature=1.5, rule="mss")


def test_drawn_children(
    compiled: Callable[..., Path], oracle_of: Callable[..., BlockOracle]
) -> None:
    """Rules that verify with what children were drawn from: the same rows, of other trees."""
    core, oracle = EngineCore(load(compiled()), TREE.name), oracle_of()
    oracle.watch(core)
    for rule in ("mss", "swor"):
        serve(core, oracle, prompts_of(BLOCK)[1:3], num_tokens=6, temperature=1.0, rule=rule)
        oracle.reset()
    assert oracle.num_passes > 6


def test_what_the_engine_says(compiled: Callable[..., Path]) -> None:
    manifest = Engine.load(compiled()).manifest
    assert manifest is not None
    one, drafter = manifest.models
    assert one.taps is not None
    assert (one.taps.boundaries, one.taps.width) == ((2, 5), 2 * WIDTH)
    assert drafter.head is not None
    assert (drafter.head.kind, drafter.head.layout, drafter.head.width) == ("dflash", "z-lab", 0)
    assert drafter.head.shared == ("embed_tokens.weight", "lm_head.weight")
    # K and V of 2 layers, 2 heads of 8, and nothing else
    rows = manifest.limits.cache_rows()
    assert manifest.memory_plan["draft_0"].cache == rows * 4 * (2 * 2 * 2 * 8)
    slabs = Engine.load(compiled()).cache.slabs["draft_0"]
    assert sum(slab.nbytes for slab in slabs) == manifest.memory_plan["draft_0"].cache
    assert [entry.heads for entry in manifest.plans] == [()] * 4
    assert [len(entry.blocks) for entry in manifest.plans] == [1, 1, 1, 0]
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    told = "\n".join(head_lines(manifest))
    assert "draft_0 is a block drafter (dflash, files of z-lab): it reads the target at" in told
    assert "blocks of 5 rows, of which each sees the others in both directions" in told
    assert f"4 tokens a pass; mask token {MASK}" in told


def test_what_steps_read_is_counted(compiled: Callable[..., Path]) -> None:
    """Of DSpark: weights that no program has, and which of their rows are which ids."""
    path = compiled("dspark-rnn")
    manifest = Engine.load(path).manifest
    assert manifest is not None
    stored = load_file(path / manifest.weights_file(manifest.models[1], None))
    assert {*BIAS_TENSORS.values(), *JOINT_TENSORS[RNN].values()} < stored.keys()
    assert manifest.memory_plan["draft_0"].weights == sum(x.nbytes for x in stored.values())
    assert manifest.models[1].vocab_size == VOCAB
    told = "\n".join(head_lines(manifest))
    assert "logits depend on all tokens of the block before" in told


def test_manifests_that_are_refused(compiled: Callable[..., Path]) -> None:
    def changed(change: Callable[[Any], object], found: str) -> None:
        data = json.loads((compiled() / "manifest.json").read_text())
        change(data)
        with pytest.raises(EngineError, match=found):
            Manifest.from_json(data)

    changed(lambda x: x["plans"][0].pop("blocks"), r"plan chain-3 has blocks of \(none\)")
    changed(lambda x: x["plans"][0]["blocks"][0].update(size=0), r"blocks\[0\].size is 0")
    changed(lambda x: x["plans"][0].update(heads=["draft_0"]), "plan chain-3 has heads draft_0")
    changed(lambda x: x["models"][0].pop("taps"), "no taps of the target")
    changed(lambda x: x["models"][1]["head"].update(kind="eagle3"), "rows of 0 columns")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"plans": (SpecPlan.from_widths((1,) * 5),)}, "chain-5 of depth 5, and draft_0, which"),
        ({"backend": "onnx", "block_size": 0}, "a block drafter .draft_0., and the backend onnx"),
        ({"segments": True}, "--segments"),
        ({"draft_kv": ("window=16,sink=2",)}, "--draft-kv window=16,sink=2, and the block drafter"),
        ({"draft_dtype": ("bfloat16",)}, "in bfloat16, which reads hidden states of float32"),
    ],
)
def test_what_block_drafters_do_not_go_with(
    zoo: Zoo, target: Path, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    drafter = zoo.once(f"block-{NAME}", lambda path: write_block(path, BLOCK_CASES[NAME]))
    with pytest.raises(SpeccError, match=found) as raised:
        build(target, drafter, tmp_path / "e", options(**{"plans": (), **changes}))
    assert raised.value.do
    assert not (tmp_path / "e").exists()


def test_a_head_that_reads_other_places(zoo: Zoo, target: Path, tmp_path: Path) -> None:
    drafter = zoo.once(f"block-{NAME}", lambda path: write_block(path, BLOCK_CASES[NAME]))
    head = zoo.once("head-safeailab", lambda path: write_head(path, CASES["safeailab"]))
    with pytest.raises(ConfigError, match=r"boundaries 2, 5, .* 2, 4, 5"):
        build(target, [drafter, head], tmp_path / "e", options(plans=()))
    with pytest.raises(ConfigError, match="--synthetic and the draft head"):
        load_config(drafter)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "dspark-deepspec", "dspark-rnn"])
def test_trees_in_tiles(
    name: str, compiled: Callable[..., Path], oracle_of: Callable[..., BlockOracle]
) -> None:
    """The target passes over parts of the tree; the drafter over its block as ever."""
    tiled = replace(TREE, name="tiled", tile=1 if name != NAME else 4)
    core = EngineCore(load(compiled(name, "tiles", plans=(tiled,))), tiled.name)
    oracle = oracle_of(name)
    oracle.watch(core)
    assert core.engine.plans[tiled.name].tile == tiled.tile
    found = serve(core, oracle, prompts_of(BLOCK)[:3])
    assert oracle.num_passes > 8
    oracle.reset()
    plain = serve(EngineCore(core.engine, "off"), oracle, prompts_of(BLOCK)[:3])
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]
