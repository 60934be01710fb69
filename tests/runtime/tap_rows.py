"""Rows of hidden states that an engine keeps, and what transformers says that they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.runtime.backends.engine_cache import features_of
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import DynamicTree, SpecPlan
from specc.speculation.taps import Taps
from tests import models

NAME, CHUNK, NUM_TOKENS = "qwen3", 16, 20
PLANS = (
    SpecPlan.from_widths((1, 1, 1)),
    SpecPlan.from_widths((2, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3)),
)
# the embedding, between the layers, and after both of them
TAPS = Taps((2, 0, 1))


def load(path: Path, **limits: Any) -> Engine:
    engine = Engine.load(path, **limits)
    for slab in engine.cache.slabs["target"]:
        # a row that was never written shall not look like one of zeros
        if slab.is_floating_point():
            slab.normal_(0.0, 30.0)
    return engine


@dataclass
class Oracle:
    """Compares rows of requests with what transformers puts out for their tokens."""

    model: Any
    taps: Taps = TAPS
    num_rows: int = 0
    tolerance: float = 1e-4

    @torch.no_grad()
    def wanted(self, tokens: list[int]) -> Tensor:
        """[T, W], in a plain forward pass."""
        last: list[Tensor] = []
        hook = self.model.model.layers[-1].register_forward_hook(lambda *x: last.append(x[2]))
        output = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        hook.remove()
        states = list(output.hidden_states)
        if not self.taps.is_last_normed:
            states[-1] = last[0][0] if isinstance(last[0], tuple) else last[0]
        return torch.cat([states[b][0] for b in self.taps.boundaries], -1)

    def check(self, engine: Engine, request: Request) -> None:
        count = request.cache_len
        wanted = self.wanted(request.token_ids[:count])
        features = features_of(engine.manifest.models[0], engine.cache)
        blocks = engine.cache.block_table([request.blocks])[0].long()
        rows = torch.arange(count)
        found = features[blocks[rows // features.shape[1]], rows % features.shape[1]]
        wrong = (found.float() - wanted).abs().amax(1) > self.tolerance * (1 + wanted.abs().amax(1))
        assert not wrong.any(), f"of {count} rows: {wrong.nonzero().flatten().tolist()}"
        self.num_rows += count


def serve_each(
    core: EngineCore,
    check: Callable[[Engine, Request], object],
    prompts: Sequence[list[int]],
    num_tokens: int,
    every: int,
    **params: Any,
) -> list[Request]:
    """Requests that come one after the other; rows are compared after every step."""
    waiting, requests, num_steps = list(prompts), list[Request](), 0
    while waiting or core.scheduler.has_work:
        if waiting and num_steps % every == 0:
            given = {"temperature": 0, "seed": len(waiting), **params}
            own = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **given)
            requests.append(core.requests.make(waiting.pop(0), own))
            core.scheduler.add(requests[-1])
        assert core.advance()
        num_steps += 1
        for request in requests:
            if request.blocks and request.cache_len and not request.is_finished:
                check(core.engine, request)
    assert all(len(request.output_token_ids) == num_tokens for request in requests)
    return requests


def serve(
    engine: Engine,
    plan: str,
    oracle: Oracle,
    num_tokens: int = NUM_TOKENS,
    every: int = 3,
    count: int = 6,
    **params: Any,
) -> EngineCore:
    """Requests of several lengths, some with a common beginning, that come one after the other.

    Args:
        num_tokens: that each puts out.
        every: steps until the next one comes.
        count: of requests; the first has a prompt of one token.
    """
    core = EngineCore(engine, plan)
    generator = torch.Generator().manual_seed(5)

    def text(length: int) -> list[int]:
        return torch.randint(0, models.VOCAB, (length,), generator=generator).tolist()

    prefix = text(2 * CHUNK + 3)
    waiting = [text(1), prefix + text(4), text(40), prefix + text(9), prefix[:CHUNK], text(7)]
    waiting = waiting[:count]
    serve_each(core, oracle.check, waiting, num_tokens, every, **params)
    return core
