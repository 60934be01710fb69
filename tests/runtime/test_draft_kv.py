"""Draft models that attend to a window: past their positions, over the rows that they would have.

Outputs are the target's whatever a draft sees, so its rows are compared with those of transformers
under the same mask, in every layer, after every step. What a layer sees shows in the rows of the
next one.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from specc.cli.render import layers_table
from specc.config import CompileConfig
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from tests import engines, models
from tests.lossless import Zoo
from tests.near_ties import forgive_near_ties
from tests.tiers import every

WINDOW, SINK, TRAINED = 16, 3, 24
PLANS = (
    SpecPlan.from_widths((1, 1, 1)),
    SpecPlan.from_widths((2, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3)),
    SpecPlan.from_widths((1, 1), ("draft_0", "lookup-2"), MERGE),
)
# within the window, around its end, and past what the draft was trained for
LENGTHS = (3, 16, 19, 40, 61)


@pytest.fixture(scope="module", params=["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def engine(zoo: Zoo, request: Any) -> Engine:
    config = CompileConfig(
        plans=PLANS,
        max_batch_size=3,
        max_seq_len=models.MAX_SEQ_LEN,
        # prompts of more than one chunk
        prefill_chunk=32,
        backend=request.param,
        probe=False,
        draft_kv=(f"window={WINDOW},sink={SINK}",),
    )
    draft = zoo.checkpoint("qwen3", draft="noisy", max_position_embeddings=TRAINED)
    path = zoo.once(
        f"draft-kv-{request.param}",
        lambda path: engines.build(zoo.checkpoint("qwen3"), draft, path, config),
    )
    loaded = Engine.load(path)
    for slabs in loaded.cache.slabs.values():
        for slab in slabs:
            # whoever attends to a row that was never written shall not get zeros
            slab.normal_(0.0, 30.0)
    return loaded


@torch.no_grad()
def wanted_rows(draft: Any, tokens: Sequence[int]) -> Tensor:
    """[layers, 2, rows, heads, dim], K and V of transformers, every layer masked alike."""
    places = torch.arange(len(tokens))
    distance = places[:, None] - places
    is_seen = (distance >= 0) & ((distance < WINDOW) | (places < SINK))
    mask = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    cache = draft(torch.tensor([list(tokens)]), attention_mask=mask, use_cache=True)
    return torch.stack(
        [
            torch.stack([part[0].transpose(0, 1) for part in (layer.keys, layer.values)])
            for layer in cache.past_key_values.layers
        ]
    )


def found_rows(engine: Engine, request: Request, count: int) -> Tensor:
    """The same of the engine's cache."""
    (slab,) = engine.cache.slabs["draft_0"]
    blocks = engine.cache.block_table([request.blocks])[0]
    rows = torch.arange(count)
    return slab[:, :, blocks[rows // slab.shape[3]].long(), rows % slab.shape[3]]


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(4, [plan.name for plan in PLANS]))
def test_outputs_and_rows(zoo: Zoo, engine: Engine, plan: str) -> None:
    draft = zoo.reference_model("qwen3", draft="noisy", max_position_embeddings=TRAINED)
    generator = torch.Generator().manual_seed(5)
    texts = [
        torch.randint(0, models.VOCAB, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]
    core = EngineCore(engine, plan, shares_prefixes=False)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    requests = [core.requests.make(list(text), params) for text in texts]
    for request in requests:
        core.scheduler.add(request)
    compared = 0
    while core.scheduler.has_work:
        assert core.advance()
        for request in requests:
            if request.blocks and request.draft_lens[0] and not request.is_finished:
                count = request.draft_lens[0]
                wanted = wanted_rows(draft, request.token_ids[:count])
                found = found_rows(engine, request, count)
                wrong = (found - wanted).abs().amax((0, 1, 3, 4)) > 2e-4
                assert not wrong.any(), f"of {count}: {wrong.nonzero().flatten().tolist()}"
                compared += count
    assert compared > 500
    for text, request in zip(texts, requests, strict=True):
        reference = zoo.reference("qwen3", text, 24)
        found = request.output_token_ids
        assert not forgive_near_ties(LLM(engine, plan="off"), plan, text, found, reference)
    # the draft is right often enough that its rows matter
    assert core.scheduler.stats.mean_acceptance_length > 1.1


def test_what_the_manifest_says(engine: Engine) -> None:
    target, draft = engine.manifest.models
    assert {layer.window for layer in target.layers} == {0}
    assert {layer.window for layer in draft.layers} == {WINDOW}
    assert {layer.sink for layer in target.layers} == {0}
    assert {layer.sink for layer in draft.layers} == {SINK}
    table = Console(file=io.StringIO(), width=200)
    table.print(layers_table(engine.manifest.models))
    assert f"causal, window {WINDOW}, sink {SINK}" in table.file.getvalue()
    # sequences are as long as the target allows, which the draft was not trained for
    assert draft.max_position == engine.position_limit == models.MAX_SEQ_LEN > TRAINED
