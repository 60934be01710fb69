"""What tests of tuning share: a plan, and requests with what the target generated for them."""

from __future__ import annotations

import torch

from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from specc.tune.acceptance import Trajectory
from tests import models
from tests.heads import VOCAB

CHAIN = SpecPlan.from_widths((1, 1, 1))
LENGTH, PROMPT = 20, 6


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


def drawn(seed: int) -> Trajectory:
    """Random tokens, LENGTH of them, PROMPT of which are the prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=generator).tolist()
    request = Request(
        "0", tokens[:PROMPT], SamplingParams(temperature=0, max_tokens=64), max_seq_len=64
    )
    request.token_ids += tokens[PROMPT:]
    return Trajectory(request, PROMPT)
