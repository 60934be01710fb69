"""A draft equal to its target stays equal, whatever the steps before did to its cache."""

from __future__ import annotations

import pytest

from specc.runtime.llm import LLM
from specc.runtime.policies.base import Policy
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from tests import models
from tests.lossless import Zoo
from tests.near_ties import forgive_near_ties


class Script(Policy):
    """Plans in turn, again and again."""

    def __init__(self, *plans: str) -> None:
        self.plans = plans
        self.step = 0

    def choose(self, num_running: int, stats: SpecStats) -> str:
        self.step += 1
        return self.plans[self.step % len(self.plans)]


@pytest.mark.parametrize(
    ("script", "depth"),
    [
        pytest.param(("chain-4", "off"), 4, id="one-step-behind"),
        pytest.param(
            ("chain-4", "tree-3-2-1-1", "off", "off"),
            4,
            id="two-steps-behind",
            marks=pytest.mark.slow,
        ),
        # longer than a prefill chunk of 7
        pytest.param(("tree-2-2-1", *["off"] * 10, "chain-4"), 3, id="a-chunk-behind"),
        pytest.param(
            ("chain-1", "tree-2-2-1", "off", "chain-4"), 1, id="all-plans", marks=pytest.mark.slow
        ),
    ],
)
def test_draft_catches_up_after_other_plans(zoo: Zoo, script: tuple[str, ...], depth: int) -> None:
    """Every step accepts a whole path, as deep as the shallowest plan of the script at least."""
    engine = zoo.engine("gemma3", "target", block_size=16, prefill_chunk=7)
    llm = LLM(engine, policy=Script(*script))
    prompts = models.prompts()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        reference = zoo.reference("gemma3", prompt, models.NUM_TOKENS)
        found = output.outputs[0].token_ids
        assert not forgive_near_ties(llm, str(script), prompt, found, reference)
        stats = output.metrics
        # only the end of the output may cut a step short
        num_cut = stats.num_spec_steps - stats.accepted_at_depth[depth - 1]
        assert num_cut <= (stats.num_trimmed_tokens > 0)
