"""What tests of tuning share: a plan, and requests with what the target generated for them."""

from __future__ import annotations

from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from specc.tune.acceptance import Trajectory
from tests import models

CHAIN = SpecPlan.from_widths((1, 1, 1))


def trajectories(engine: Engine, params: SamplingParams) -> list[Trajectory]:
    """What the target alone generates for three prompts, in sequences of at most 128 tokens."""
    found = []
    prompts = [list(prompt) for prompt in models.prompts()[1:4]]
    outputs = LLM(engine, plan="off").generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        request = Request("0", prompt, params, max_seq_len=128)
        request.token_ids += output.outputs[0].token_ids
        found.append(Trajectory(request, len(prompt)))
    return found
