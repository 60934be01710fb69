"""Drafts whose ids mean other tokens: outputs stay the target's, and what is read is right.

The planted draft is the target with Llama's kind of tokenizer: its ids are shuffled, two tokens
have two, and rows of no token would win. Whatever is read or proposed wrongly costs acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.config import CompileConfig
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from specc.tune.acceptance import Trajectory, draft_acceptance
from tests import engines, models
from tests.lossless import Zoo
from tests.near_ties import forgive_near_ties
from tests.vocabularies import save_planted

TWO = ("draft_0", "draft_1")
CHAIN, TREE = SpecPlan.from_widths((1, 1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(8, 3, 3))
PLANS = (
    CHAIN,
    TREE,
    DYNAMIC,
    SpecPlan.from_widths((2, 1, 1), TWO, MERGE),
    SpecPlan.from_widths((1, 1, 1), TWO, VOTE),
    SpecPlan.from_widths((1, 1), ("draft_0", "lookup-2"), MERGE),
)
PADDED = (CHAIN, TREE)
NUM_TOKENS = 16
# of one token, and longer than a chunk
PROMPTS = models.prompts()[:4:3]


def planted(zoo: Zoo, name: str, noise: float = 0.0) -> Path:
    return zoo.once(f"planted-{name}-{noise}", lambda path: save_planted(name, path, noise=noise))


@pytest.fixture(
    scope="module",
    params=["eager", *(pytest.param(b, marks=pytest.mark.slow) for b in ("cpu", "onnx"))],
)
def engine(zoo: Zoo, request: Any) -> Engine:
    is_padded = request.param == "onnx"
    config = CompileConfig(
        plans=PADDED if is_padded else PLANS,
        max_batch_size=3,
        max_seq_len=models.MAX_SEQ_LEN,
        backend=request.param,
        probe=False,
        # prompts of more than one chunk
        **({} if is_padded else {"prefill_chunk": 16}),
    )
    drafts = [planted(zoo, "llama")]
    if not is_padded:
        drafts.append(zoo.checkpoint("llama", draft="noisy"))
    path = zoo.once(
        f"planted-engine-{request.param}",
        lambda path: engines.build(zoo.checkpoint("llama"), drafts, path, config),
    )
    loaded = Engine.load(path)
    for slabs in loaded.cache.slabs.values():
        for slab in slabs:
            # whoever attends to a row that was never written shall not get zeros
            slab.normal_(0.0, 30.0)
    return loaded


def plans_of(engine: Engine) -> list[SpecPlan]:
    return [plan for plan in engine.plans.values() if plan.speculates]


def test_outputs_are_the_targets_and_all_is_accepted(zoo: Zoo, engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for plan in plans_of(engine):
        llm = LLM(engine, plan=plan.name)
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            reference = zoo.reference("llama", prompt, NUM_TOKENS)
            found = output.outputs[0].token_ids
            assert not forgive_near_ties(llm, plan.name, prompt, found, reference)
            stats = output.metrics
            if plan.is_static:
                # only the end of the output may cut a step short
                num_cut = stats.num_spec_steps - stats.accepted_at_depth[plan.max_depth - 1]
                assert num_cut <= (stats.num_trimmed_tokens > 0), plan.name


def test_seeds_hold_for_every_plan(engine: Engine) -> None:
    """Noise belongs to the target's ids: a draft with the same numbers draws the same tokens."""
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=seed)
        for seed in range(len(PROMPTS))
    ]
    wanted = [o.outputs[0].token_ids for o in LLM(engine, plan="off").generate(PROMPTS, params)]
    for plan in plans_of(engine):
        outputs = LLM(engine, plan=plan.name).generate(PROMPTS, params)
        assert [o.outputs[0].token_ids for o in outputs] == wanted, plan.name
        if plan.is_static:
            for output in outputs:
                stats = output.metrics
                num_cut = stats.num_spec_steps - stats.accepted_at_depth[plan.max_depth - 1]
                assert num_cut <= (stats.num_trimmed_tokens > 0), plan.name


@pytest.mark.parametrize("rule", ["mss", "swor"])
def test_draws_are_accepted_where_both_distributions_are_one(engine: Engine, rule: str) -> None:
    params = SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=3, rule=rule
    )
    (output,) = LLM(engine, plan=CHAIN.name).generate([PROMPTS[1]], params)
    stats = output.metrics
    assert stats.num_spec_steps - stats.accepted_at_depth[-1] <= (stats.num_trimmed_tokens > 0)


@torch.no_grad()
def wanted_rows(target: Any, tokens: Sequence[int]) -> Tensor:
    """[layers, 2, rows, heads, dim], K and V of transformers."""
    cache = target(torch.tensor([list(tokens)]), use_cache=True).past_key_values
    return torch.stack(
        [
            torch.stack([part[0].transpose(0, 1) for part in (layer.keys, layer.values)])
            for layer in cache.layers
        ]
    )


@pytest.mark.parametrize("plan", [CHAIN.name, DYNAMIC.name, PLANS[3].name])
def test_rows_are_those_of_the_target(zoo: Zoo, engine: Engine, plan: str) -> None:
    """The draft computes the target's numbers: its rows of a text are the target's."""
    if engine.manifest.limits.block_size == 0:
        pytest.skip("caches in slots are laid out in another way")
    target = zoo.reference_model("llama")
    core = EngineCore(engine, plan, shares_prefixes=False)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8, seed=4)
    requests = [core.requests.make(list(prompt), params) for prompt in PROMPTS]
    for request in requests:
        core.scheduler.add(request)
    compared = 0
    (slab,) = engine.cache.slabs["draft_0"]
    while core.scheduler.has_work:
        assert core.advance()
        for request in requests:
            if request.blocks and request.draft_lens[0] and not request.is_finished:
                count = request.draft_lens[0]
                blocks = engine.cache.block_table([request.blocks])[0]
                rows = torch.arange(count)
                found = slab[:, :, blocks[rows // slab.shape[3]].long(), rows % slab.shape[3]]
                wanted = wanted_rows(target, request.token_ids[:count])
                wrong = (found - wanted).abs().amax((0, 1, 3, 4)) > 2e-4
                assert not wrong.any(), f"of {count}: {wrong.nonzero().flatten().tolist()}"
                compared += count
    assert compared > 100


def test_tuning_counts_in_ids_of_the_target(engine: Engine) -> None:
    """The table of the planted draft, teacher-forced: its first child is always the one."""
    if engine.manifest.limits.block_size == 0:
        pytest.skip("passes of onnx are padded")
    core = EngineCore(engine, "off")
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=2)
    requests = [core.requests.make(list(prompt), params) for prompt in PROMPTS]
    for request in requests:
        core.scheduler.add(request)
    while core.scheduler.has_work:
        assert core.advance()
    done = [Trajectory(x, len(prompt)) for x, prompt in zip(requests, PROMPTS, strict=True)]
    assert draft_acceptance(engine, 0, done, 2, 3) == [[1.0, 0.0]] * 3
    # of the other draft it is a share
    (first, _), *_ = draft_acceptance(engine, 1, done, 2, 3)
    assert 0.0 < first < 1.0
