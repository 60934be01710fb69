"""Engines for ONNX, from end to end: their output is that of transformers, token for token.

The same harness as test_lossless.py. Writing a pair as ONNX takes some seconds of a core, so the
default tier takes architectures that differ in what such a file holds: sliding windows, learned
positions, experts. The slow tier takes all, and leaves its figures in build/lossless_onnx.json.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.artifact.cache_rows import CacheRows
from specc.artifact.manifest import Manifest
from specc.compiler import build as compiler
from specc.config import CompileConfig
from specc.errors import EngineError
from specc.passes.step.fuse_step import STEP_OUTPUTS
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.onnx.program import OnnxProgram
from specc.runtime.backends.padded import model as padded_model
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from tests import drafts, engines, models
from tests.lossless import (
    FULL_MATRIX,
    PLAN_IDS,
    PLANS,
    Zoo,
    check_all_plans,
    check_full_acceptance,
    check_join_and_leave,
    check_matrix,
    collect_figures,
    layout_of,
    run_case,
)
from tests.near_ties import Reference, Tie
from tests.runtime.backends.cpu.cpu_pair import step_inputs
from tests.tiers import every

# windows; the file takes others for learned positions, the slow tier for experts
NAMES = [
    pytest.param(name, marks=() if name == "gemma3" else pytest.mark.slow)
    for name in ("gemma3", "gpt2", "qwen3_moe")
]
ONNX = {"backend": "onnx"}
# as many tokens as make a window of 16 and several trees
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Figures of the slow cases; written when the last of them has run."""
    yield from collect_figures(request.config.rootpath / "build" / "lossless_onnx.json")


def engine_path(zoo: Zoo, name: str, dtype: str = "float32") -> Path:
    layout = layout_of(name)
    sizes = layout["block_size"], layout["prefill_chunk"], models.MAX_SEQ_LEN
    return zoo.compiled(name, "noisy", *sizes, dtype, "onnx")


def make_engine(zoo: Zoo, name: str, **options: Any) -> Engine:
    return zoo.engine(name, "noisy", **layout_of(name), **ONNX, **options)


def poison(engine: Engine) -> Engine:
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            # whoever attends to a row that was never written shall not get zeros
            slab.normal_(0.0, 30.0)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_runs_onnx(zoo: Zoo, name: str) -> None:
    """Else the tests below would say nothing."""
    engine = make_engine(zoo, name)
    assert engine.backend == "onnx"
    assert {type(model) for model in (engine.target, *engine.drafts)} == {OnnxProgram}
    assert engine.manifest.rectangle is not None
    rows = engine.manifest.rectangle.rows
    assert rows.front > 0, "a draft is fed tokens before a short sequence"
    # as long as it can get
    assert engine.cache.reserve(rows.slots + rows.scratch) == rows.total
    for model, slabs in engine.cache.slabs.items():
        assert {slab.shape[4] for slab in slabs} == {rows.total}
        # the rim is planned for, too
        planned = engine.manifest.memory_plan[model].cache
        assert sum(slab.nbytes for slab in slabs) == planned


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(3, PLANS), ids=PLAN_IDS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_generate(zoo: Zoo, name: str, plan: SpecPlan) -> None:
    outcome, _ = check_matrix(zoo, name, plan, "noisy", **layout_of(name), **ONNX)
    if plan.tree.max_depth > 1:
        assert 1.2 <= outcome.stats.mean_acceptance_length <= 4.0
        # depth 2 of a tree is never in place: its acceptance moves rows
        assert outcome.stats.accepted_at_depth[1] > 0


@pytest.mark.parametrize("plan", PLANS[1:], ids=PLAN_IDS[1:])
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_draft_equal_to_the_target_is_always_accepted(
    zoo: Zoo, name: str, plan: SpecPlan
) -> None:
    """What a draft attends to shows in nothing but its acceptance."""
    check_full_acceptance(zoo, name, plan, **layout_of(name), **ONNX)


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(5, PLAN_IDS, 2))
def test_requests_join_and_leave_while_others_run(
    zoo: Zoo, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch grows and shrinks, leaves holes, and runs two plans in one iteration."""
    engine = make_engine(zoo, "gemma3", max_num_seqs=3)
    cut, runs = padded_model._runs, []

    def record(*args: Any) -> list[Any]:
        found = list(cut(*args))
        runs.append(len(found))
        return found

    monkeypatch.setattr(padded_model, "_runs", record)
    check_join_and_leave(zoo, "gemma3", engine, plan, plain=1)
    assert max(runs) > 1, "there were holes"
    assert min(runs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(2, [OFF.name, "tree-3-2-1-1"]))
@pytest.mark.parametrize("name", NAMES)
def test_the_graphs_of_an_onnx_engine_give_the_same_tokens(zoo: Zoo, name: str, plan: str) -> None:
    eager = poison(Engine.load(engine_path(zoo, name), backend="eager"))
    assert type(eager.target) is ModelProgram
    assert eager.cache.rows is None, "flat caches"
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = [
        [
            output.outputs[0].token_ids
            for output in LLM(engine, plan=plan).generate(models.prompts(), params)
        ]
        for engine in (eager, make_engine(zoo, name))
    ]
    assert found[0] == found[1]


@pytest.mark.slow
def test_wide_trees_in_tiles(zoo: Zoo, tmp_path: Path) -> None:
    wide = (SpecPlan.from_widths((15, 16)), SpecPlan.from_dynamic(DynamicTree(256, 23, 3)))
    config = CompileConfig(
        plans=wide,
        max_batch_size=16,
        max_seq_len=models.MAX_SEQ_LEN,
        max_logits_mb=1,
        probe=False,
        **ONNX,
    )
    path = tmp_path / "engine"
    build = compiler.build(
        zoo.checkpoint("gpt2"), zoo.checkpoint("gpt2", draft="noisy"), path, config
    )
    tiles = {entry.name: entry.plan.tile for entry in build.manifest.plans}
    assert tiles == {wide[0].name: 128, wide[1].name: 128, OFF.name: None}
    engine = poison(Engine.load(path, max_num_seqs=3))
    for plan in wide:
        outcome = run_case(zoo, "gpt2", engine, plan.name, models.prompts()[1:4], NUM_TOKENS)
        assert outcome.stats.accepted_at_depth[1] > 0


# between nodes 1 and 3, and 4 and 6, which have children, lies a leaf
GAPS = TokenTree((-1, 0, 0, 0, 1, 3, 3, 4, 6, 6, 9))
OTHER = "draft_1"
# of a draft of another architecture; that of drafts of the target's own is in tests/drafts.py
MIXED = (
    SpecPlan.from_widths((1,) * 4, (OTHER,)),
    SpecPlan.from_dynamic(DynamicTree(8, 2, 3), OTHER),
    SpecPlan.from_tree(GAPS, (OTHER,)),
)


@pytest.fixture(scope="module")
def mixed_path(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of learned positions, up to the last one, and two drafts; plans of every kind.

    One draft is often right; the other is of another architecture, and never is.
    """
    config = CompileConfig(
        plans=(*MIXED, *drafts.PLANS),
        max_batch_size=4,
        max_seq_len=models.POSITIONS,
        prefill_chunk=64,
        probe=False,
        **ONNX,
    )
    path = tmp_path_factory.mktemp("mixed") / "engine"
    other = zoo.checkpoint("gemma3", draft="random")
    return engines.build(
        zoo.checkpoint("gpt2"), [zoo.checkpoint("gpt2", draft="noisy"), other], path, config
    )


@pytest.fixture(scope="module")
def mixed(mixed_path: Path) -> Engine:
    loaded = poison(Engine.load(mixed_path))
    assert {type(model) for model in (loaded.target, *loaded.drafts)} == {OnnxProgram}
    # nor may anybody look up what no sequence ever held
    loaded.cache.history.random_(0, models.VOCAB)
    return loaded


@pytest.mark.default("tree-n10-d4-e3d3", "merge-0+1-tree-n10-d4-e3d3")
@pytest.mark.parametrize("plan", every(3, drafts.PLAN_IDS))
def test_trees_and_combinations_of_every_kind(zoo: Zoo, mixed: Engine, plan: str) -> None:
    prompts = models.prompts()
    for batch in (prompts[:4], prompts[4:]):
        run_case(zoo, "gpt2", mixed, plan, batch, NUM_TOKENS)


@pytest.mark.slow
def test_every_kind_of_plan_has_proposals_accepted(mixed: Engine) -> None:
    """Else a wrong commit could hide: of drafts, not of lookups in random text."""
    accepted = {}
    for plan in drafts.PLANS:
        if "draft_0" not in plan.drafts:
            continue
        llm = LLM(mixed, plan=plan.name)
        llm.generate(
            models.prompts(), SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        )
        accepted[plan.name] = llm.get_metrics().num_accepted_tokens
    assert all(accepted.values()), accepted


@pytest.fixture(scope="module")
def both(mixed_path: Path) -> tuple[Engine, Engine]:
    """On onnxruntime, and by the eager graphs."""
    return Engine.load(mixed_path), Engine.load(mixed_path, backend="eager")


@pytest.mark.parametrize("seed", every(3, [1, 2, 3]))
@pytest.mark.parametrize("plan", [OFF.name, *(plan.name for plan in MIXED)])
def test_steps_equal_those_of_the_eager_graphs(
    both: tuple[Engine, Engine], plan: str, seed: int
) -> None:
    """All that a draft proposes, too: what only touches a draft never changes an output."""
    onnx, eager = both
    rows, generator = onnx.cache.rows, torch.Generator().manual_seed(seed)
    assert rows is not None
    onnx.cache.reserve(rows.slots)
    for model, slabs in eager.cache.slabs.items():
        for slab, other in zip(slabs, onnx.cache.slabs[model], strict=True):
            slab.normal_(generator=generator)
            other.normal_(generator=generator)
            slots_of(other, rows).copy_(slab)
    given = step_inputs(eager, 4, seed, is_greedy=True)
    environments = [given | engine.cache.environment for engine in (onnx, eager)]
    for engine, environment in zip((onnx, eager), environments, strict=True):
        engine.steps[plan].run(environment)
    found, wanted = environments
    for name in (*STEP_OUTPUTS, f"{OTHER}_len"):
        if name in wanted and name != "logits":
            assert torch.equal(found[name], wanted[name]), name
    for name, value in wanted.items():
        if name.startswith("q_") or name == "logits":
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)
    lengths = {"target": wanted["next_cache_len"], OTHER: wanted.get(f"{OTHER}_len")}
    for model, committed in lengths.items():
        for slab, other in zip(eager.cache.slabs[model], onnx.cache.slabs[model], strict=True):
            for b, block in enumerate(given["block_table"][:, 0].tolist()):
                last = int(given["cache_len"][b] if committed is None else committed[b])
                mine = slots_of(other, rows)[:, :, block, :last]
                torch.testing.assert_close(mine, slab[:, :, block, :last], rtol=1e-4, atol=1e-4)


def slots_of(slab: Tensor, rows: CacheRows) -> Tensor:
    """[layers, 2, blocks, slots, HK, D] of a slab with heads in front."""
    return slab[..., rows.front : rows.front + rows.slots, :].transpose(3, 4)


@pytest.mark.parametrize("plan", [plan.name for plan in MIXED])
def test_a_draft_of_another_architecture(zoo: Zoo, mixed: Engine, plan: str) -> None:
    own = [model.model_type for model in mixed.manifest.models]
    assert own == ["gpt2", "gpt2", "gemma3_text"]
    run_case(zoo, "gpt2", mixed, plan, models.prompts()[:4], NUM_TOKENS)


@pytest.mark.parametrize("plan", [OFF.name, MIXED[0].name])
def test_spans_that_end_at_the_last_position(zoo: Zoo, mixed: Engine, plan: str) -> None:
    """Short chunks at the end of a learned table, beside long ones, and decoding up to it."""
    chooser = random.Random(4)
    # of the first, a chunk of 62 tokens in one pass with the second's first two
    lengths = (models.POSITIONS - 2, 90, models.POSITIONS - 4)
    prompts = [[chooser.randrange(models.VOCAB) for _ in range(length)] for length in lengths]
    outputs = LLM(mixed, plan=plan).generate(
        prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        found = output.outputs[0].token_ids
        assert found == zoo.reference("gpt2", prompt, len(found)).tokens
        assert len(found) == min(4, models.POSITIONS - len(prompt))


def require_small_gap(prompt: Sequence[int], reference: Reference, tie: Tie) -> None:
    """Of a target in float16 against one in float32."""
    assert tie.gap < 0.05, tie


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "opt"])
def test_float16(zoo: Zoo, name: str) -> None:
    """The tokens of float32, but for near ties; accepted rows are moved, too."""
    engine = make_engine(zoo, name, dtype="float16")
    assert engine.cache.slabs["target"][0].dtype is torch.float16
    for plan in (OFF.name, "tree-3-2-1-1"):
        prompts = models.prompts()
        outcome = run_case(zoo, name, engine, plan, prompts, NUM_TOKENS, require_small_gap)
        assert len(outcome.ties) <= 3
    assert outcome.stats.accepted_at_depth[1] > 0


@pytest.mark.slow
def test_bfloat16_is_refused_at_load(zoo: Zoo) -> None:
    path = engine_path(zoo, "gemma3", "bfloat16")
    with pytest.raises(EngineError, match="onnxruntime") as caught:
        Engine.load(path)
    assert "float32 or float16" in caught.value.needed
    assert "--backend eager" in caught.value.do
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    eager = LLM(Engine.load(path, backend="eager"), plan=OFF.name)
    assert len(eager.generate([[1, 2, 3]], params)[0].outputs[0].token_ids) == 4


def test_no_onnxruntime(mixed_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EngineError, match="no onnxruntime") as caught:
        Engine.load(mixed_path)
    assert 'pip install "onnx' in caught.value.do
    assert Engine.load(mixed_path, backend="eager").backend == "eager"


def test_engines_without_onnx_files_are_refused(saved_engine: Any) -> None:
    with pytest.raises(EngineError, match="backend onnx and an engine for backend eager"):
        Engine.load(saved_engine.path, backend="onnx")


@pytest.mark.parametrize("file", ["target/model.onnx", "draft-0/model.onnx"])
def test_altered_files_are_refused(mixed_path: Path, tmp_path: Path, file: str) -> None:
    path = tmp_path / "engine"
    shutil.copytree(mixed_path, path)
    assert Engine.load(path).backend == "onnx"
    data = bytearray((path / file).read_bytes())
    data[len(data) // 2] ^= 1
    (path / file).write_bytes(data)
    with pytest.raises(EngineError, match=r"model\.onnx"):
        Engine.load(path)
    (path / file).unlink()
    with pytest.raises(EngineError, match=r"model\.onnx"):
        Engine.load(path)


def test_manifests_of_other_cache_rows_are_refused(mixed: Engine) -> None:
    manifest = mixed.manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    rectangle = manifest.rectangle
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"rectangle": None}, "rectangle None"),
        ({"backend": "eager"}, "backend eager with rectangle"),
        ({"rectangle": replace(rectangle, slots=rectangle.slots - 1)}, "rectangle.slots"),
        ({"rectangle": replace(rectangle, front=-1)}, "rectangle.front is -1"),
        ({"limits": replace(manifest.limits, block_size=16)}, "block_size is 16"),
    )
    for change, reason in changes:
        with pytest.raises(EngineError) as caught:
            Manifest.from_json(replace(manifest, **change).to_json())
        assert reason in caught.value.found


@pytest.mark.slow
@FULL_MATRIX
@pytest.mark.parametrize("name", models.DRAFT_NOISE)
def test_full_matrix(
    zoo: Zoo, outcomes: list[dict[str, Any]], name: str, draft: str, other: bool
) -> None:
    outcomes += check_all_plans(zoo, name, draft, **layout_of(name, other), **ONNX)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_every_architecture_in_every_kind_of_plan(zoo: Zoo, name: str) -> None:
    engine = drafts.engine(zoo, name, "onnx")
    for plan in drafts.PLAN_IDS:
        run_case(zoo, name, engine, plan, models.prompts(), NUM_TOKENS)
