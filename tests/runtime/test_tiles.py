"""Engines whose trees are too wide for the logits that they may hold: tiles, end to end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specc.artifact.directory import open_engine
from specc.artifact.manifest import Manifest
from specc.compiler import build as compiler
from specc.compiler.extend import extend_engine
from specc.config import CompileConfig
from specc.errors import ConfigError, RequestError
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.cpu.native_calls import Pool
from specc.runtime.backends.cpu.step import CpuStep
from specc.runtime.backends.step_io import StepInputs
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from tests import engines, models
from tests.lossless import Zoo, run_case

NAME, BATCH = "qwen3", 8
STATIC = SpecPlan.from_widths((31, 32))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(1024, 23, 3))
NARROW = SpecPlan.from_widths((1,) * 4)
WIDE = (STATIC, DYNAMIC)
# of a row: 128 tokens in float32
ROW_BYTES = models.VOCAB * 4


@pytest.fixture(scope="module")
def path(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 sequences of 1024 nodes have 4 MiB of logits, and may have 1."""
    path = tmp_path_factory.mktemp("tiles") / "engine"
    config = CompileConfig(
        plans=(*WIDE, NARROW),
        max_batch_size=BATCH,
        max_seq_len=models.MAX_SEQ_LEN,
        max_logits_mb=1,
        backend="cpu",
        probe=False,
    )
    draft = zoo.checkpoint(NAME, draft="noisy")
    return engines.build(zoo.checkpoint(NAME), draft, path, config)


@pytest.fixture(scope="module")
def manifest(path: Path) -> Manifest:
    return open_engine(path, None)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    engine = Engine.load(path)
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            # whoever attends to a row that was never written shall not get zeros
            slab.normal_(0.0, 30.0)
    return engine


def test_plans_that_do_not_fit_get_the_widest_tiles_that_do(manifest: Manifest) -> None:
    tiles = {entry.name: entry.plan.tile for entry in manifest.plans}
    assert STATIC.num_nodes == DYNAMIC.num_nodes == 1024
    assert tiles == {STATIC.name: 256, DYNAMIC.name: 256, NARROW.name: None, "off": None}
    assert BATCH * 256 * ROW_BYTES == 1 << 20
    # what the drafts are asked at a time: 31 nodes of a level, 23 of the dynamic tree's
    assert manifest.memory_plan["target"].logits == 1 << 20
    assert manifest.memory_plan["draft_0"].logits == BATCH * 31 * ROW_BYTES


@pytest.mark.parametrize("plan", WIDE, ids=lambda plan: plan.name)
def test_1024_nodes(zoo: Zoo, engine: Engine, plan: SpecPlan) -> None:
    """Greedy output is that of `generate`, seeded output that of plain decoding."""
    outcome = run_case(zoo, NAME, engine, plan.name, models.prompts()[2:4], num_tokens=24)
    # a draft that is near the target hits with one of so many
    assert outcome.stats.mean_acceptance_length > 1.9
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=3, temperature=1.0, top_p=0.95),
        SamplingParams(
            temperature=0,
            max_tokens=12,
            ignore_eos=True,
            seed=4,
            rule="delta",
            frequency_penalty=0.4,
        ),
    ]
    found = [
        [
            output.outputs[0].token_ids
            for output in LLM(engine, plan=name).generate(
                [list(prompt) for prompt in models.prompts()[1:3]], params
            )
        ]
        for name in (plan.name, "off")
    ]
    assert found[0] == found[1]


def steps_of(engine: Engine, plan: SpecPlan, pool: Pool | None = None) -> CpuStep:
    """A plan's step beside those of the engine."""
    models = {"target": engine.target, "draft_0": engine.drafts[0]}
    program = fuse_step(plan, dict.fromkeys(models, 1)).to_json()
    return CpuStep(json.loads(json.dumps(program)), models, pool)


def inputs_of(engine: Engine, last_token: int) -> StepInputs:
    """A step of 8 sequences."""
    shape = engine.cache.shape
    table = torch.arange(shape.num_blocks, dtype=torch.int32).view(shape.max_num_seqs, -1)
    greedy = torch.tensor([[0.0, 1, 0, 1, 0, 0]]).repeat(BATCH, 1)
    rows = [(5, last_token, 20)] * BATCH
    return StepInputs(rows, table, greedy, torch.zeros(BATCH, 4).long())


def peak_bytes(engine: Engine, plan: SpecPlan) -> int:
    """Most bytes that a step of 8 sequences takes at a time."""
    pool = Pool()
    steps_of(engine, plan, pool).advance(inputs_of(engine, 7), engine.cache.environment)
    return pool.counts()[2]


@pytest.mark.parametrize("plan", WIDE, ids=lambda plan: plan.name)
def test_a_step_takes_what_the_memory_plan_says(
    engine: Engine, manifest: Manifest, plan: SpecPlan
) -> None:
    """What an arena sees: tiles take a quarter."""
    planned = manifest.memory_plan["target"]
    tiled, whole = peak_bytes(engine, replace(plan, tile=256)), peak_bytes(engine, plan)
    print(tiled, whole, planned)
    assert planned.logits < tiled < planned.logits + 2 * planned.workspace
    # three more tiles of logits, and as much again of everything else
    assert whole > tiled + 3 * planned.logits


def test_values_that_are_asked_for_stay_when_others_follow(engine: Engine) -> None:
    step, caches = steps_of(engine, NARROW), engine.cache.environment
    logits = step.advance(inputs_of(engine, 7), caches, ("logits", "path")).values["logits"]
    assert logits.nbytes == BATCH * NARROW.num_nodes * ROW_BYTES
    before = logits.clone()
    following = step.advance(inputs_of(engine, 9), caches, ("logits",)).values["logits"]
    assert torch.equal(logits, before)
    assert not torch.equal(following, before)


def test_log_probabilities_come_from_plain_decoding(engine: Engine) -> None:
    """A request that wants them runs beside one that speculates in tiles."""
    prompts = [list(prompt) for prompt in models.prompts()[1:3]]
    scored = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2)
    plain = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    found = {}
    for plan in (STATIC.name, "off"):
        llm = LLM(engine, plan=plan)
        found[plan] = [o.outputs[0] for o in llm.generate(prompts, [scored, plain])]
    speculated = llm_steps(engine, STATIC.name, prompts[1], plain)
    assert speculated < 8
    for one, other in zip(found[STATIC.name], found["off"], strict=True):
        assert one.token_ids == other.token_ids
    mine, wanted = (found[plan][0].logprobs for plan in (STATIC.name, "off"))
    assert [list(entry) for entry in mine] == [list(entry) for entry in wanted]
    for entry, other in zip(mine, wanted, strict=True):
        for token, score in entry.items():
            assert score.logprob == pytest.approx(other[token].logprob, abs=1e-4)


def llm_steps(engine: Engine, plan: str, prompt: list[int], params: SamplingParams) -> int:
    llm = LLM(engine, plan=plan)
    llm.generate([prompt], params)
    return llm.get_metrics().num_steps


@pytest.mark.parametrize(
    ("plan", "found", "do"),
    [
        (STATIC.name, "have lost the logits of all but 256 nodes", "a larger --max-logits-mb"),
        # reranked, too: more memory would not help
        (DYNAMIC.name, "have lost how often", "choose another plan$"),
    ],
)
def test_rules_that_look_at_logits_are_refused(
    engine: Engine, plan: str, found: str, do: str
) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, rule="mss")
    with pytest.raises(RequestError) as caught:
        LLM(engine, plan=plan).generate([[1, 2]], params)
    assert found in caught.value.found
    assert re.search(do, caught.value.do)
    assert caught.value.needed.endswith("coupled, delta")
    # which runs beside them under another plan
    LLM(engine, plan=NARROW.name).generate([[1, 2]], params)


def test_not_even_one_node_fits(zoo: Zoo, tmp_path: Path) -> None:
    config = CompileConfig(max_batch_size=4096, max_logits_mb=1, backend="eager", probe=False)
    with pytest.raises(ConfigError) as caught:
        compiler.build(zoo.checkpoint(NAME), None, tmp_path / "engine", config)
    assert "one node of each of 4096 sequences take 2.0 MiB" in caught.value.found
    assert caught.value.do.startswith("pass --max-logits-mb 2,")
    assert not (tmp_path / "engine").exists()


def test_plans_that_come_later_are_held_to_the_same_limit(path: Path, manifest: Manifest) -> None:
    with extend_engine(path, manifest) as extension:
        other = SpecPlan.from_widths((20, 20))
        made = extension.try_plans([other, STATIC, OFF])
        tiles = {entry.name: entry.plan.tile for entry in made.plans}
        assert tiles == {other.name: 211, STATIC.name: 256, "off": None}
        assert made.memory_plan["target"].logits == 1 << 20
        loaded = Engine.load(extension.directory, backend="eager")
        assert loaded.plans[other.name].tile == 211
