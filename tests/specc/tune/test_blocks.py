"""`specc tune` of engines whose draft fills a block in one pass."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.directory import open_engine
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.cost.draft_levels import draft_levels
from specc.cost.latency_table import LatencyTable, PassPart, PassSeconds
from specc.cost.step_seconds import StepSeconds
from specc.drafters.block import BlockDraft
from specc.drafters.hydra import PrefixHydraHeads
from specc.drafters.medusa import MedusaHeads
from specc.drafters.pard import PardDraft
from specc.errors import ConfigError
from specc.progress import PhaseTimer
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import DynamicTree, SpecPlan
from specc.tune.acceptance import STRIDE
from specc.tune.candidates import candidates
from specc.tune.drafters.block import block_acceptance, block_chains
from specc.tune.options import TuneOptions
from specc.tune.run import _Readers, tune
from tests.draft_kinds.block import RIGS as BLOCKS
from tests.draft_kinds.domino import RIGS as DOMINOS
from tests.draft_kinds.medusa import RIGS as MEDUSAS
from tests.draft_kinds.pard import RIGS as PARDS
from tests.draft_kinds.peagle import RIGS as PEAGLES
from tests.draft_kinds.peagle import Read
from tests.draft_kinds.rig import DraftRig
from tests.draft_kinds.test_hydra import RIGS as HYDRAS
from tests.draft_kinds.xpress import RIGS as XPRESSES
from tests.head_reference import hidden_states
from tests.lossless import Zoo
from tests.specc.tune.runs import LENGTH, PROMPT, drawn

CHILDREN, DEPTH = 48, 3
QUIET = PhaseTimer(lambda event: None)


@pytest.fixture(scope="module")
def compiled(zoo: Zoo, target: Path) -> Callable[[str], Path]:
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1, 1)),),
        max_batch_size=2,
        max_seq_len=64,
        block_size=4,
        # prompts of more than one chunk
        prefill_chunk=4,
        backend="eager",
        probe=False,
    )

    def make(name: str) -> Path:
        drafter = rig_of(name).draft(zoo, name)
        return zoo.once(f"blocks-tune-{name}", lambda path: build(target, drafter, path, config))

    return make


def rig_of(name: str) -> DraftRig:
    """What has a case of this name, of those that propose all levels in one pass."""
    every = (*BLOCKS, *DOMINOS, *XPRESSES, *MEDUSAS, *HYDRAS, *PARDS, *PEAGLES)
    return next(rig for rig in every if name in rig.cases)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("speculators-mixed", marks=pytest.mark.slow),
        "dspark-speculators",
        pytest.param("dspark-gated", marks=pytest.mark.slow),
        pytest.param("dspark-rnn", marks=pytest.mark.slow),
        pytest.param("dflash2", marks=pytest.mark.slow),
        pytest.param("lilicorr", marks=pytest.mark.slow),
        pytest.param("domino", marks=pytest.mark.slow),
        pytest.param("xpress", marks=pytest.mark.slow),
        "vllm",
        "prefix",
        pytest.param("mlp", marks=pytest.mark.slow),
        "qwen3-padded",
        "vllm-peagle",
    ],
)
@torch.no_grad()
def test_chains_are_those_of_steps(name: str, compiled: Callable[[str], Path], zoo: Zoo) -> None:
    """By depth and root: as many children as give most tokens of any text a rank."""
    engine = Engine.load(compiled(name))
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            slab.normal_(0.0, 30.0)
    assert engine.manifest is not None
    block = _Readers.of(engine.manifest).drafters["draft_0"]
    oracle = rig_of(name).oracle(zoo, name)
    reference, boundaries = oracle.reference, getattr(oracle.reference.case, "boundaries", ())
    free, every = engine.cache.allocator.num_free, []
    for seed in (0, 1):
        trajectory = drawn(seed)
        tokens = trajectory.token_ids
        taps = torch.tensor(tokens)
        if boundaries:
            taps = hidden_states(oracle.target, tokens, boundaries)
        expected = []
        for root in range(PROMPT, LENGTH - 1, STRIDE):
            chain = []
            for level in range(min(DEPTH, LENGTH - 1 - root)):
                path = tokens[root + 1 : root + 1 + level]
                known: Any = taps[:root]
                if name in PEAGLES[0].cases:
                    known = Read(known, tokens)
                more = (tokens[root - 1],) if name in XPRESSES[0].cases else ()
                logits = reference.after(known, tokens[root], path, *more)
                count = min(CHILDREN, block.candidates or CHILDREN)
                ids = logits.topk(count).indices.tolist()
                wanted = tokens[root + level + 1]
                chain.append(ids.index(wanted) if wanted in ids else -1)
            expected.append(chain)
        assert block_chains(engine, block, trajectory, CHILDREN, DEPTH) == expected
        every += [rank for chain in expected for rank in chain]
    assert len(every) == 2 * (3 + 3 + 3 + 1)
    assert len({rank for rank in every if rank >= 0}) > (0 if block.candidates else 3)
    assert engine.cache.allocator.num_free == free
    # no deeper than a block
    deepest = 9 if name in (*PARDS[0].cases, *PEAGLES[0].cases) else 4
    table = block_acceptance(engine, block, [drawn(0), drawn(1)], CHILDREN, 9)
    assert len(table) == min(9, block.num_proposed) == deepest
    roots = [every[i] for i in (0, 3, 6, 9, 10, 13, 16, 19)]
    assert sum(table[0]) == pytest.approx(sum(rank >= 0 for rank in roots) / len(roots))


def test_one_pass_for_all_levels() -> None:
    """Whatever the tree, its levels together are the pass that a step makes."""
    block = BlockDraft(6, 0, draft="draft_0")
    passes = PassSeconds({1: 1.0, 8: 3.0, 40: 7.0}, {1: 0.01, 40: 0.02}, "draft_0")
    latency = LatencyTable(PassSeconds({1: 10.0}, {1: 0.0}, "target"), {"draft_0": passes})
    # the last one's passes are as long as its trees are deep
    blocks = (block, MedusaHeads(6, draft="draft_0"), PardDraft(6, 0, draft="draft_0"))
    shapes = ((1,), (3, 1), (2, 2, 1, 1))
    for block, widths in itertools.product(blocks, shapes):
        plan = SpecPlan.from_widths(widths).with_drafters({"draft_0": block})
        ((_, (rows,)),) = draft_levels(plan)
        seconds = StepSeconds(latency, block, 2, 30.0)
        found = seconds.of(plan.tree) - seconds.verify(plan.num_nodes)
        assert found == pytest.approx(passes([PassPart(2, 2 * rows, 60.0)]))


def test_heads_of_levels_count_as_passes() -> None:
    heads = PrefixHydraHeads(6, num_layers=1, hidden_columns=8, draft="draft_0")
    passes = PassSeconds({1: 1.0, 8: 3.0, 40: 7.0}, {1: 0.01, 40: 0.02}, "draft_0")
    latency = LatencyTable(PassSeconds({1: 10.0}, {1: 0.0}, "target"), {"draft_0": passes})
    for widths, fed in (((1,), ()), ((3, 1), (3,)), ((2, 2, 1, 1), (2, 4, 4))):
        plan = SpecPlan.from_widths(widths).with_drafters({"draft_0": heads})
        # rows of what may have been accepted, then the nodes of each level
        levels = (len(widths) + 1, *fed)
        assert draft_levels(plan) == ((heads, levels),)
        seconds = StepSeconds(latency, heads, 2, 30.0)
        found = seconds.of(plan.tree) - seconds.verify(plan.num_nodes)
        parts = [PassPart(2, 2 * rows, 60.0) for rows in levels]
        assert found == pytest.approx(sum(passes([part]) for part in parts))


def test_what_a_block_cannot_offer_is_left_out() -> None:
    """Best-first trees have candidates that grow with their size, not with K alone."""
    fits = SpecPlan.from_dynamic(DynamicTree(16, 8, 4))
    large = SpecPlan.from_dynamic(DynamicTree(450, 9, 8))
    readers = _Readers({"draft_0": BlockDraft(16, 0)})
    assert [plan.name for plan in readers.takes({fits: 1.0, large: None})] == [fits.name]
    (kept,) = readers.takes({fits: 1.0})
    assert kept.drafters[0].name == "draft_0"


def test_no_plan_is_deeper_than_a_block() -> None:
    """The last row of acceptance stands for greater depths, too, and passes propose no more."""
    block = BlockDraft(5, 0, draft="draft_0")
    latency = LatencyTable(
        PassSeconds({1: 10.0, 64: 10.5}, {1: 0.0}, "target"),
        {"draft_0": PassSeconds({1: 0.5, 64: 0.6}, {1: 0.0}, "draft_0")},
    )
    acceptance = {"draft_0": [[rate, 0.05] for rate in (0.8, 0.75, 0.7, 0.65)]}
    seconds = {"draft_0": StepSeconds(latency, block, 1, 0.0)}
    found = candidates(acceptance, seconds, [], TuneOptions())
    plans = list(_Readers({"draft_0": block}).takes(found))
    # the best tree, the best chain and a best-first one, as deep as may be
    assert [plan.max_depth for plan in plans] == [block.num_proposed] * 3
    assert [bool(plan.dynamic) for plan in plans] == [False, False, True]
    shallow = candidates(acceptance, seconds, [], TuneOptions(max_depth=2))
    assert {plan.max_depth for plan in shallow} == {2}


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("dspark-speculators", "a block drafter"),
        ("vllm", "a set of Medusa heads"),
        ("mlp", "a set of Hydra heads"),
    ],
)
def test_an_engine_without_a_plan_of_its_drafter(
    name: str, called: str, compiled: Callable[[str], Path]
) -> None:
    manifest: Any = open_engine(compiled(name), None)
    pruned = replace(manifest, plans=tuple(x for x in manifest.plans if not x.plan.speculates))
    with pytest.raises(ConfigError, match=rf"{called} \(draft_0\), and no plan that asks it"):
        _Readers.of(pruned)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["speculators-mixed", "dspark-speculators", "vllm", "prefix"])
def test_tuned_engines(name: str, compiled: Callable[[str], Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(compiled(name), tmp_path / "engine"))
    prompts: list[Any] = [[5, 6, 7, 8], [50, 40, 30]]
    options = TuneOptions(
        batch_sizes=(2,), max_nodes=6, max_depth=8, max_tokens=6, rounds=1, latency_s=0.1
    )
    tuning = tune(path, prompts, options, QUIET)
    assert {name: len(table) for name, table in tuning.acceptance.items()} == {"draft_0": 4}
    assert tuning.latency is not None
    assert "draft_0" in tuning.latency.drafts
    measured = [one.plan for batch in tuning.batches for one in batch.candidates]
    assert measured
    assert all(plan.drafters[0].name == "draft_0" for plan in measured)
    plans = [entry for entry in open_engine(path, None).plans if entry.plan.speculates]
    assert plans
    engine = Engine.load(path)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    outputs = [
        [list(o.outputs[0].token_ids) for o in LLM(engine, plan=name).generate(prompts, params)]
        for name in ("off", plans[0].plan.name)
    ]
    assert outputs[0] == outputs[1]
