"""`specc tune` of an engine that is cut for ranks, to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specc.artifact.directory import open_engine
from specc.config import CompileConfig
from specc.progress import PhaseTimer
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, SpecPlan
from specc.tune.options import TuneOptions
from specc.tune.run import tune
from tests import engines, models
from tests.lossless import Zoo
from tests.runtime.ranks.conftest import OPTIONS

PLANS = (
    SpecPlan.from_widths((1, 1, 1)),
    SpecPlan.from_widths((2, 1), ("draft_0", "draft_1"), MERGE),
    SpecPlan.from_widths((1, 1), ("self_x1",)),
)


@pytest.mark.slow
def test_a_cut_engine_gets_plans_and_a_profile(zoo: Zoo, tmp_path: Path) -> None:
    """One draft on each rank, and a second program of the target: all are measured."""
    config = CompileConfig(
        plans=PLANS,
        max_batch_size=2,
        max_seq_len=models.MAX_SEQ_LEN,
        backend="eager",
        probe=False,
        tensor_parallel_size=2,
        draft_ranks=2,
    )
    drafts = [zoo.checkpoint("llama", draft=name) for name in ("noisy", "target")]
    path = engines.build(zoo.checkpoint("llama"), drafts, tmp_path / "engine", config)
    prompts = [list(prompt) for prompt in models.prompts()[1:3]]
    options = TuneOptions(
        batch_sizes=(1, 2), max_nodes=4, max_depth=2, max_tokens=8, rounds=1, latency_s=0.1
    )
    tuning = tune(path, prompts, options, PhaseTimer(lambda event: None))
    assert [batch.batch_size for batch in tuning.batches] == [1, 2]
    assert {"draft_0", "draft_1", "self_x1"} <= tuning.acceptance.keys()
    # the second draft is the target: the first child is always taken
    assert tuning.acceptance["draft_1"][0][0] == 1.0
    manifest = open_engine(path)
    assert manifest.parallel is not None
    assert manifest.draft_homes == {"draft_1": 1}
    profile = json.loads((path / "profile.json").read_text())
    assert set(profile["latency"]["drafts"]) >= {"draft_0", "draft_1", "self_x1"}
    engine = Engine.load(path, ranks=OPTIONS)
    try:
        params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 2
        found = LLM(engine).generate(prompts, params)
        plain = LLM(engine, plan="off").generate(prompts, params)
        assert [x.outputs[0].token_ids for x in found] == [x.outputs[0].token_ids for x in plain]
    finally:
        engine.close()
