"""`specc tune` of engines whose draft reads the target's hidden states."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from specc.artifact.directory import open_engine
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.progress import PhaseTimer
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from specc.tune.acceptance import STRIDE
from specc.tune.drafters.head import head_acceptance, head_chains
from specc.tune.options import TuneOptions
from specc.tune.run import tune
from tests.head_reference import Reference, hidden_states
from tests.heads import CASES, draw_tensors, write_head
from tests.lossless import Zoo
from tests.specc.tune.runs import LENGTH, PROMPT, drawn

CASE = CASES["safeailab-narrow"]
CHILDREN, DEPTH = 48, 3


@pytest.fixture(scope="module")
def compiled(zoo: Zoo, target: Path) -> Path:
    head = zoo.once("head-safeailab-narrow", lambda path: write_head(path, CASE))
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1, 1)),),
        max_batch_size=2,
        max_seq_len=64,
        block_size=4,
        # of more than one chunk
        prefill_chunk=7,
        backend="eager",
        probe=False,
    )
    return zoo.once("heads-tune", lambda path: build(target, head, path, config))


@torch.no_grad()
def test_chains_are_those_of_steps(compiled: Path, target: Path) -> None:
    """By depth and root: as many children as give most tokens of any text a rank."""
    from transformers import AutoModelForCausalLM

    engine = Engine.load(compiled)
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            slab.normal_(0.0, 30.0)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    reference = Reference(CASE, draw_tensors(CASE), model.get_input_embeddings().weight)
    free, every = engine.cache.allocator.num_free, []
    for seed in (0, 1):
        trajectory = drawn(seed)
        tokens = trajectory.token_ids
        taps = hidden_states(model, tokens, CASE.boundaries)
        expected = []
        for root in range(PROMPT, LENGTH - 1, STRIDE):
            chain = []
            for level in range(min(DEPTH, LENGTH - 1 - root)):
                path = tokens[root + 1 : root + 1 + level]
                best = reference.logits(taps[:root], tokens[: root + 1], path).topk(CHILDREN)
                wanted = tokens[root + level + 1]
                ids = best.indices.tolist()
                chain.append(ids.index(wanted) if wanted in ids else -1)
            expected.append(chain)
        assert head_chains(engine, 0, trajectory, CHILDREN, DEPTH) == expected
        every += [rank for chain in expected for rank in chain]
    assert len(every) == 2 * (3 + 3 + 3 + 1)
    assert len({rank for rank in every if rank >= 0}) > 3
    assert engine.cache.allocator.num_free == free
    table = head_acceptance(engine, 0, [drawn(0), drawn(1)], CHILDREN, DEPTH)
    roots = [every[i] for i in (0, 3, 6, 9, 10, 13, 16, 19)]
    assert sum(table[0]) == pytest.approx(sum(rank >= 0 for rank in roots) / len(roots))


@pytest.mark.slow
def test_tuned_engine_drafts_with_its_head(compiled: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(compiled, tmp_path / "engine"))
    prompts = [[5, 6, 7, 8], [50, 40, 30]]
    options = TuneOptions(
        batch_sizes=(2,), max_nodes=6, max_depth=2, max_tokens=6, rounds=1, latency_s=0.1
    )
    tuning = tune(path, prompts, options, PhaseTimer(lambda event: None))
    assert set(tuning.acceptance) == {"draft_0"}
    assert tuning.latency is not None
    assert "draft_0" in tuning.latency.drafts
    plans = [entry for entry in open_engine(path, None).plans if entry.plan.speculates]
    assert plans
    assert all(entry.heads == ("draft_0",) for entry in plans)
    engine = Engine.load(path)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    outputs = [
        [list(o.outputs[0].token_ids) for o in LLM(engine, plan=name).generate(prompts, params)]
        for name in ("off", plans[0].plan.name)
    ]
    assert outputs[0] == outputs[1]
