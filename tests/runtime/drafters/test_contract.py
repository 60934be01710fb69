"""What holds of engines with any draft that is no ordinary model, kind by kind.

Random drafts propose what nobody accepts but by chance, and what they propose changes no output. So
an oracle looks at every pass, node and row. `tests/draft_kinds` says what is a kind's.
"""

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
from specc.drafters.facts import Cache, Passes
from specc.drafters.registry import ALL, facts_of
from specc.errors import ConfigError, EngineError, SpeccError
from specc.progress import PhaseTimer
from specc.runtime.backends.offload_budget import check_offload
from specc.runtime.backends.overlap import check_overlap
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.speculation.plans import MERGE, VOTE, SpecPlan
from tests import engines, models
from tests.draft_kinds.rig import DraftRig, all_rigs
from tests.heads import CASES, write_head
from tests.lossless import Zoo
from tests.runtime.draft_cases import (
    SIZES,
    outputs,
    serve_in_little_room,
    serve_with_pauses,
    write_target,
)
from tests.runtime.head_rig import (
    BLOCK,
    BUDGET,
    CHAIN,
    DYNAMIC,
    TREE,
    load,
    options,
    prompts_of,
    serve,
)

RIGS = tuple(all_rigs())
PLANS = (CHAIN, TREE, DYNAMIC)
WIDE = SpecPlan.from_widths((3, 2, 1))
# they read what the head of SafeAILab reads, have a target of their own, or no places
NO_OTHERS = ("eagle3", "peagle", "mtp", "pard", "gemma4_assistant")
MERGED = SpecPlan.from_widths((2, 1), ("draft_0", "draft_1"), MERGE)
VOTED = SpecPlan.from_widths((1, 1), ("draft_0", "draft_1", "lookup-3"), VOTE)


def has_rows(rig: DraftRig) -> bool:
    """Whether a cache of its own has rows."""
    return facts_of(rig.kind).cache is Cache.OWN


def rigs(*default: str, cases: Callable[[DraftRig], bool] = lambda rig: True) -> Any:
    """Parametrize with all kinds; those that are not named are slow."""
    return pytest.mark.parametrize(
        "rig",
        [
            pytest.param(
                rig,
                marks=() if rig.kind in default and rig.is_first else pytest.mark.slow,
                id=str(rig),
            )
            for rig in RIGS
            if cases(rig)
        ],
    )


def reads_hidden(rig: DraftRig) -> bool:
    """Of the target."""
    return facts_of(rig.kind).reads_hidden


EVERY = rigs(*(rig.kind for rig in RIGS))
FIRST = rigs(*(rig.kind for rig in RIGS), cases=lambda rig: rig.is_first and reads_hidden(rig))


def test_every_kind_has_a_rig() -> None:
    # the target itself drafts through an adapter: `tests/runtime/test_uno.py`
    models = [x for x in ALL if x.has_program]
    kinds = {x.kind for x in models if x.reads_hidden or x.passes is Passes.ONE}
    assert {rig.kind for rig in RIGS} == kinds


def in_turn() -> list[Any]:
    """Every kind with a tree, which has all that chains have; some with one that is data."""
    found = []
    for rig in RIGS:
        for plan in PLANS:
            is_default = plan is TREE or (plan is DYNAMIC and rig.kind in ("eagle3", "hydra"))
            marks = () if is_default else pytest.mark.slow
            found.append(pytest.param(rig, plan, marks=marks, id=f"{rig}-{plan.name}"))
    return found


@pytest.mark.default(
    "dflash-z-lab-tree-2-2-1",
    "dspark-dspark-rnn-tree-2-2-1",
    "dflash2-dflash2-tree-2-2-1",
    "lilicorr-lilicorr-tree-2-2-1",
    "domino-domino-tree-2-2-1",
    "xpress-xpress-tree-2-2-1",
    "eagle3-safeailab-narrow-tree-2-2-1",
    "eagle3-safeailab-narrow-dynamic-6-3-3",
    "medusa-vllm-tree-2-2-1",
    "mtp-glm4_moe-tree-2-2-1",
    "mtp-qwen3_next-tree-2-2-1",
    "hydra_prefix-prefix-tree-2-2-1",
    "hydra-mlp-tree-2-2-1",
    "pard-qwen3-padded-tree-2-2-1",
    "peagle-vllm-peagle-tree-2-2-1",
    "gemma4_assistant-plain-tree-2-2-1",
)
@pytest.mark.parametrize(("rig", "plan"), in_turn())
def test_logits_and_rows(rig: DraftRig, plan: SpecPlan, zoo: Zoo) -> None:
    """Chunks, requests that join, prefixes that are shared, acceptances and rejections."""
    core, oracle = EngineCore(load(rig.engine(zoo)), plan.name), rig.oracle(zoo)
    oracle.watch(core)
    params: dict[str, Any] = {}
    if plan.is_static and hasattr(oracle, "check_trees"):
        # what children were drawn from is there for rules that verify with it
        oracle.check_trees(core, plan)
        params = {"rule": "mss"}
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5, **params)
    stats = core.scheduler.stats
    assert rig.num_looked(oracle) > 15
    assert not params or oracle.num_nodes > 50
    assert oracle.num_rows > (300 if has_rows(rig) else 15)
    assert not hasattr(oracle, "depths") or oracle.depths == set(range(plan.max_depth))
    assert stats.num_cached_tokens > 2 * BLOCK
    assert stats.mean_acceptance_length > 1.0


@pytest.mark.slow
@rigs(cases=lambda rig: rig.kind in ("dspark", "dflash2", "lilicorr", "domino", "xpress", "hydra"))
def test_children_of_a_wide_tree(rig: DraftRig, zoo: Zoo) -> None:
    """Of every node, where they depend on the path to it."""
    path = rig.engine(zoo, label="wide", plans=(WIDE,))
    core, oracle = EngineCore(load(path), WIDE.name), rig.oracle(zoo)
    oracle.watch(core)
    oracle.check_trees(core, WIDE)
    for rule in ("mss", "swor"):
        serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5, rule=rule)
        oracle.reset()
    assert oracle.num_nodes > 200
    engine = Engine.load(path)
    assert outputs(EngineCore(engine, WIDE.name)) == outputs(EngineCore(engine, "off"))


@pytest.mark.default("dflash-z-lab", "pard-qwen3-padded")
@rigs("hydra_prefix", "dflash", "pard")
def test_requests_that_had_to_give_way(rig: DraftRig, zoo: Zoo) -> None:
    oracle = rig.oracle(zoo)
    serve_in_little_room(rig.engine(zoo), oracle)
    assert rig.num_looked(oracle) > 30


@pytest.mark.default("eagle3-safeailab-narrow", "pard-qwen3-padded")
@rigs("eagle3", "dflash", "hydra_prefix", "hydra", "medusa", "pard")
def test_drafts_that_did_not_draft_for_a_while(rig: DraftRig, zoo: Zoo) -> None:
    """They read what they have missed, where they read any of it."""
    oracle = rig.oracle(zoo)
    serve_with_pauses(rig.engine(zoo), oracle)
    assert rig.num_looked(oracle) > 5
    is_level_by_level = facts_of(rig.kind).hands_on
    assert has_rows(rig) or is_level_by_level or rig.num_looked(oracle) == 8


def cases_of_all() -> list[Any]:
    default = ("vllm-one", "speculators-mixed", "dspark-gated", "once")
    return [
        pytest.param(
            rig, case, marks=() if case in default else pytest.mark.slow, id=f"{rig.kind}-{case}"
        )
        for rig in {rig.prefix: rig for rig in reversed(RIGS)}.values()
        for case in rig.cases
        if case not in {x.case for x in RIGS}
    ]


@pytest.mark.default("medusa-vllm-one")
@pytest.mark.parametrize(("rig", "case"), cases_of_all())
def test_every_layout(rig: DraftRig, case: str, zoo: Zoo) -> None:
    """Files of all trainers, and what their switches mean."""
    core = EngineCore(load(rig.engine(zoo, case, plans=(TREE,))), TREE.name)
    oracle = rig.oracle(zoo, case)
    oracle.watch(core)
    params: dict[str, Any] = {}
    if hasattr(oracle, "check_trees"):
        oracle.check_trees(core, TREE)
        params = {"rule": "mss"}
    serve(core, oracle, prompts_of(BLOCK)[1:4], num_tokens=6, temperature=1.5, **params)
    assert rig.num_looked(oracle) > 5


@pytest.mark.default("medusa-vllm-dynamic-6-3-3")
@pytest.mark.parametrize(
    ("rig", "plan"),
    [
        pytest.param(
            rig, plan,
            marks=() if (rig.kind, plan) in {
                ("dspark", TREE), ("mtp", TREE), ("hydra", TREE), ("medusa", DYNAMIC),
                ("hydra_prefix", CHAIN), ("pard", TREE), ("peagle", TREE),
            } and rig.is_first else pytest.mark.slow,
            id=f"{rig}-{plan.name}",
        )
        for rig in RIGS
        for plan in PLANS
    ],
)  # fmt: skip
def test_outputs_are_those_without_drafts(rig: DraftRig, plan: SpecPlan, zoo: Zoo) -> None:
    """Of greedy, drawn and filtered requests beside each other."""
    engine = Engine.load(rig.engine(zoo))
    assert outputs(EngineCore(engine, plan.name)) == outputs(EngineCore(engine, "off"))


@pytest.mark.default("hydra_prefix-prefix-4", "pard-qwen3-padded-4")
@pytest.mark.parametrize("block_size", [BLOCK, 0])
@rigs("hydra_prefix", "hydra", "pard")
def test_compiled_programs(rig: DraftRig, block_size: int, zoo: Zoo) -> None:
    """Rows of all tokens, and outputs; what passes compute is not seen there."""
    path = rig.engine(zoo, label=f"cpu-{block_size}", backend="cpu", block_size=block_size)
    engine, oracle = load(path), rig.oracle(zoo)
    plain = outputs(EngineCore(engine, "off"))
    for plan in PLANS:
        core = EngineCore(engine, plan.name)
        serve(core, oracle, prompts_of(BLOCK)[:4], temperature=1.0)
        oracle.reset()
        assert outputs(EngineCore(engine, plan.name)) == plain
    assert oracle.num_rows > (500 if has_rows(rig) else 15)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [MERGED, VOTED], ids=lambda plan: plan.name)
@rigs("hydra_prefix", cases=lambda rig: rig.kind != "mtp")
def test_beside_other_drafts(rig: DraftRig, plan: SpecPlan, zoo: Zoo) -> None:
    """A model and a draft propose together: each gets the accepted tokens of the other."""
    sizes = {**SIZES, "num_hidden_layers": 1}
    other = zoo.once("head-beside", lambda path: models.save_tiny("llama", path, 77, **sizes))
    drafts = [other, rig.draft(zoo, rig.case)]
    path = zoo.once(
        f"{rig.prefix}-{rig.case}-beside",
        lambda made: engines.build(
            rig.target(zoo, rig.case), drafts, made, options(plans=(MERGED, VOTED))
        ),
    )
    core, oracle = EngineCore(load(path), plan.name), rig.oracle(zoo, number=1)
    oracle.watch(core)
    texts = prompts_of(BLOCK)[1:3]
    found = serve(core, oracle, texts, num_tokens=8, temperature=1.5)
    assert rig.num_looked(oracle) > 4
    oracle.reset()
    plain = serve(EngineCore(load(path), "off"), oracle, texts, num_tokens=8, temperature=1.5)
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]
    if plan is MERGED and facts_of(rig.kind).kind in ("dspark", "hydra", "hydra_prefix"):
        # also what is drawn with replacement
        oracle.reset()
        serve(core, oracle, texts, num_tokens=8, temperature=1.5, rule="mss")


@rigs("eagle3")
def test_levels_that_are_shared_out(rig: DraftRig, zoo: Zoo) -> None:
    """Every pass of a draft reads what its nodes' parents left, and outputs are the target's."""
    path = rig.engine(zoo, label="budget", plans=(BUDGET,))
    core, oracle = EngineCore(load(path), BUDGET.name), rig.oracle(zoo)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK)[:4], num_tokens=8, temperature=1.5, rule="mss")
    assert rig.num_looked(oracle) > 8
    engine = Engine.load(path)
    assert outputs(EngineCore(engine, BUDGET.name)) == outputs(EngineCore(engine, "off"))


@pytest.mark.slow
@rigs("hydra")
def test_trees_in_tiles(rig: DraftRig, zoo: Zoo) -> None:
    """The target passes over parts of a tree, and drafts that are asked level by level, too."""
    tiled = replace(TREE, name="tiled", tile=1 if rig.kind in ("dspark", "hydra") else 2)
    core = EngineCore(load(rig.engine(zoo, label="tiles", plans=(tiled,))), tiled.name)
    oracle = rig.oracle(zoo)
    oracle.watch(core)
    assert core.engine.plans[tiled.name].tile == tiled.tile
    found = serve(core, oracle, prompts_of(BLOCK)[:3])
    assert rig.num_looked(oracle) > 8
    oracle.reset()
    plain = serve(EngineCore(core.engine, "off"), oracle, prompts_of(BLOCK)[:3])
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in plain]


@pytest.mark.default("medusa-vllm", "mtp-glm4_moe")
@FIRST
def test_what_the_engine_says(rig: DraftRig, zoo: Zoo) -> None:
    engine, said = Engine.load(rig.engine(zoo)), rig.said
    manifest = engine.manifest
    assert manifest is not None
    target, draft = manifest.models
    assert target.taps is not None
    assert draft.head is not None
    assert target.taps.boundaries == said.boundaries
    assert target.taps.is_last_normed == said.is_last_normed
    assert (draft.head.kind, draft.head.layout) == (rig.kind, said.layout)
    assert (draft.head.width, draft.head.shared) == (said.width, said.shared)
    assert draft.vocab_size == target.vocab_size
    assert target.unread_tensors == ()
    rows = manifest.limits.cache_rows()
    cache = manifest.memory_plan["draft_0"].cache
    if said.cache_columns is not None:
        assert cache == rows * 4 * said.cache_columns
    slabs = engine.cache.slabs["draft_0"]
    assert sum(slab.nbytes for slab in slabs) == cache
    hands_on = facts_of(rig.kind).hands_on
    assert [entry.heads for entry in manifest.plans] == [("draft_0",) * hands_on] * 3 + [()]
    assert [len(entry.blocks) for entry in manifest.plans] == [int(not hands_on)] * 3 + [0]
    data = manifest.to_json()
    assert Manifest.from_json(json.loads(json.dumps(data))) == manifest
    # engines of kinds that were there before plans named them say what they said
    named = [block["kind"] for block in data["plans"][0].get("blocks", ()) if "kind" in block]
    assert named == [rig.kind] * bool(getattr(rig.sample, "kind", ""))
    told = "\n".join(head_lines(manifest))
    assert all(line in told for line in said.lines)
    assert ("was trained for" in told) == (draft.head.trained_length > 0)
    assert draft.head.trained_length or not has_rows(rig)


@FIRST
def test_manifests_that_are_refused(rig: DraftRig, zoo: Zoo) -> None:
    path = rig.engine(zoo) / "manifest.json"

    def changed(change: Callable[[Any], object], found: str) -> None:
        data = json.loads(path.read_text())
        change(data)
        with pytest.raises(EngineError, match=found):
            Manifest.from_json(data)

    changed(lambda x: x["models"][0].pop("taps"), "no taps of the target")
    if facts_of(rig.kind).hands_on:
        changed(lambda x: x["plans"][0].pop("heads"), r"plan chain-3 has heads \(none\)")
        changed(lambda x: x["models"][1]["head"].update(width=0), "rows of 0 columns")
        return
    changed(lambda x: x["plans"][0].pop("blocks"), r"plan chain-3 has blocks of \(none\)")
    changed(lambda x: x["plans"][0]["blocks"][0].update(size=0), r"blocks\[0\].size is 0")
    changed(lambda x: x["plans"][0]["blocks"][0].update(from_anchor=1), "from_anchor is 1")
    changed(lambda x: x["plans"][0]["blocks"][0].update(hidden_columns=7, bias_kind="x"), "a block")
    changed(lambda x: x["plans"][0].update(heads=["draft_0"]), "plan chain-3 has heads draft_0")
    changed(lambda x: x["models"][1]["head"].update(kind="eagle3"), "rows of 0 columns")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "onnx": ({"backend": "onnx", "block_size": 0}, "the backend onnx"),
    "stages": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    "segments": ({"segments": True}, "--segments"),
    "window": (
        {"draft_kv": ("window=16,sink=2",)},
        "--draft-kv window=16,sink=2, and the {called}",
    ),
    "dtype": ({"draft_dtype": ("bfloat16",)}, "in bfloat16, which reads hidden states of float32"),
    "cut": ({"draft_tensor_parallel_size": 2, "tensor_parallel_size": 2}, "--draft-tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
@FIRST
def test_what_drafts_do_not_go_with(rig: DraftRig, name: str, zoo: Zoo, tmp_path: Path) -> None:
    changes, found = REFUSED[name]
    target, draft = rig.target(zoo, rig.case), rig.draft(zoo, rig.case)
    found = found.format(called=facts_of(rig.kind).called)
    with pytest.raises(SpeccError, match=found) as raised:
        build(target, draft, tmp_path / "e", options(**{"plans": (), **changes}))
    assert raised.value.do
    assert not (tmp_path / "e").exists()


@rigs(
    "dflash", "medusa", "hydra",
    # as deep as users ask, of those whose passes are as long as a tree is deep
    cases=lambda rig: not facts_of(rig.kind).hands_on and rig.kind not in ("pard", "peagle"),
)  # fmt: skip
def test_trees_deeper_than_a_pass_proposes(rig: DraftRig, zoo: Zoo, tmp_path: Path) -> None:
    changes = options(plans=(SpecPlan.from_widths((1,) * 5),))
    with pytest.raises(SpeccError, match="chain-5 of depth 5, and draft_0, which"):
        build(rig.target(zoo, rig.case), rig.draft(zoo, rig.case), tmp_path / "e", changes)


@pytest.mark.default("eagle3-safeailab-narrow", "medusa-vllm")
@FIRST
def test_what_has_no_place_for_drafts_of_hidden_states(
    rig: DraftRig, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rig.engine(zoo)
    manifest = Engine.load(path).manifest
    assert manifest is not None
    with pytest.raises(ConfigError, match="--overlap of an engine whose draft reads"):
        check_overlap(manifest, "cuda")
    with pytest.raises(ConfigError, match="--offload-weights of an engine whose draft reads"):
        check_offload(manifest, "cuda", 1 << 20)
    draft = rig.draft(zoo, rig.case)
    if isinstance(draft, Path):
        with pytest.raises(ConfigError, match="--synthetic and the"):
            load_config(draft)
    asked: list[Any] = []
    monkeypatch.setattr(prepare, "prepare_peers", lambda names, pair, *rest: asked.append(pair))
    given = BenchOptions(against=("transformers",))
    _prepare_peers(Engine.load(path), given, [CHAIN.name], [], PhaseTimer())
    assert asked[0].draft is None
    assert asked[0].no_draft


@rigs("dflash", "medusa", "hydra", cases=lambda rig: rig.kind not in NO_OTHERS)
def test_drafts_that_read_other_places(rig: DraftRig, zoo: Zoo, tmp_path: Path) -> None:
    head = zoo.once("head-safeailab", lambda path: write_head(path, CASES["safeailab"]))
    drafts = [rig.draft(zoo, rig.case), head]
    with pytest.raises(ConfigError, match="reads boundaries"):
        build(write_target(zoo), drafts, tmp_path / "e", options(plans=()))
