"""Greedy output of hybrids equals `transformers.generate`, token for token, on the CPU's backends.

Prompts around borders of blocks and of the chunks that transformers computes recurrences in, in one
batch and alone, without a draft, and with chains and trees, also of a dynamic shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specc.config import CompileConfig
from specc.drafters.feature_head import FeatureHead
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from tests import engines, models
from tests.draft_kinds.mtp import MtpRig
from tests.lossless import Zoo, run_case
from tests.mtp import HYBRID
from tests.runtime.head_rig import BLOCK, CHAIN, DYNAMIC, TREE, load, prompts_of, serve

NUM_TOKENS = 24
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200)
PLANS = (
    OFF, SpecPlan.from_widths((1, 1, 1, 1)), SpecPlan.from_widths((2, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(6, 2, 3)),
)  # fmt: skip


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, models.VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def engine_of(zoo: Zoo, name: str, backend: str, draft: str = "noisy") -> Engine:
    """Chunks of 48 tokens; what nobody has written yet is noise."""
    config = CompileConfig(
        plans=PLANS, dtype="float32", max_batch_size=5, max_seq_len=240, block_size=16,
        prefill_chunk=48, backend=backend, probe=False,
    )  # fmt: skip
    files = zoo.checkpoint(name), zoo.checkpoint(name, draft=draft)

    def make(path: Path) -> object:
        return engines.build(*files, path, config)

    engine = Engine.load(zoo.once(f"hybrid-{name}-{backend}-{draft}", make))
    assert engine.cache.states is not None
    slabs = [slab for pair in engine.cache.slabs.values() for slab in pair]
    for states in (engine.cache.states, *engine.cache.draft_states.values()):
        slabs += [*states.states, *states.replay]
    for slab in slabs:
        slab.normal_(0.0, 30.0)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", models.HYBRIDS)
def test_greedy_equals_generate(zoo: Zoo, name: str, backend: str) -> None:
    engine = engine_of(zoo, name, backend)
    for number, plan in enumerate(PLANS):
        for batch in (prompts(), [prompts()[number + 3]]):
            outcome = run_case(zoo, name, engine, plan.name, batch, NUM_TOKENS)
            assert outcome.num_compared == NUM_TOKENS * len(batch)
            if len(batch) > 1 and plan.speculates:
                assert outcome.stats.mean_acceptance_length > 1.1, plan.name
    tokens = [zoo.reference(name, prompt, NUM_TOKENS).tokens for prompt in prompts()]
    assert sum(len(set(line)) for line in tokens) / len(tokens) > 5


@pytest.mark.default("lfm2-cpu")
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", models.HYBRIDS)
def test_drafts_that_are_their_targets(zoo: Zoo, name: str, backend: str) -> None:
    """All that they propose is accepted: their states are right."""
    engine = engine_of(zoo, name, backend, "target")
    for plan in PLANS:
        outcome = run_case(zoo, name, engine, plan.name, prompts(), NUM_TOKENS)
        assert outcome.num_compared == NUM_TOKENS * len(LENGTHS)
        # a dynamic tree may go on where the likeliest tokens do not, and an output ends in a step
        least, stats = 1 if plan.dynamic else plan.max_depth, outcome.stats
        for count in stats.accepted_at_depth[:least]:
            assert stats.num_spec_steps - count <= len(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [CHAIN, TREE, DYNAMIC], ids=lambda plan: plan.name)
def test_mtp_modules(zoo: Zoo, plan: SpecPlan) -> None:
    """Every node that the module of a Qwen3-Next drafts, and outputs beside those without it."""
    rig = MtpRig("mtp", HYBRID, FeatureHead(0))
    core, oracle = EngineCore(load(rig.engine(zoo)), plan.name), rig.oracle(zoo)
    oracle.watch(core)
    found = _outputs(serve(core, oracle, prompts_of(BLOCK)))
    assert oracle.num_nodes > 50
    assert oracle.num_rows > 300
    oracle.reset()
    plain = serve(EngineCore(core.engine, "off"), oracle, prompts_of(BLOCK))
    assert found == _outputs(plain)


def _outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]
