"""One pass over prompts and trees of several plans writes and computes what each alone would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.execution.pass_inputs import causal_inputs
from specc.runtime.execution.shared_pass import span_tokens, tree_tokens
from specc.runtime.scheduling.batch import Batch, RunResult, Span, StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from specc.speculation.tree import WORD_BITS, TokenTree

PLANS = [
    OFF,
    SpecPlan.from_widths((1, 1, 1)),
    SpecPlan.from_widths((2, 1)),
    SpecPlan.from_dynamic(DynamicTree(5, 2, 3)),
]


def make_request(name: str, tokens: list[int], num_rows: int, blocks: list[int]) -> Request:
    """A request whose first rows are committed; prefilled where all but the last token are."""
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    is_ready = num_rows == len(tokens) - 1
    num_prompt = len(tokens) - 1 if is_ready else len(tokens)
    request = Request(name, tokens[:num_prompt], params, max_seq_len=40, num_drafts=1)
    request.blocks = blocks
    if is_ready:
        request.append(tokens[num_prompt:])
    request.cache_len = num_rows
    request.draft_lens = [num_rows]
    return request


@pytest.fixture(scope="module")
def engines(make_engine: Callable[..., Engine]) -> list[Engine]:
    return [make_engine(plans=PLANS, max_num_seqs=6, max_seq_len=40) for _ in range(2)]


def run(engine: Engine, is_shared: bool) -> tuple[RunResult, Any]:
    """An iteration of everything: the end and the middle of a prompt, and a group of each plan."""
    core = EngineCore(engine)
    core.runner.shares_pass = is_shared
    generator = torch.Generator().manual_seed(1)
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            slab.zero_()
    engine.cache.history.zero_()
    per = engine.cache.shape.blocks_per_sequence
    requests = []
    # committed rows, tokens
    shapes = ((3, 9), (0, 12), (4, 5), (7, 8), (2, 3), (9, 10))
    for i, (num_rows, count) in enumerate(shapes):
        tokens = torch.randint(0, 60, (count,), generator=generator).tolist()
        blocks = list(range(i * per, (i + 1) * per))
        request = make_request(str(i), tokens, num_rows, blocks)
        rows = core.engine.cache.history_rows(blocks, 0, num_rows)
        core.engine.cache.record(rows, torch.tensor(tokens[:num_rows]))
        if i == 3:
            # its draft has to catch up
            request.draft_lens = [3]
        if num_rows:
            for model, end in (
                (core.engine.target, num_rows),
                (core.engine.drafts[0], request.draft_lens[0]),
            ):
                model(*causal_inputs([Span(request, 0, end)], core.engine.cache).of_model())
        requests.append(request)
    ends, middle, *ready = requests
    groups = [StepGroup(plan, [s]) for plan, s in zip(PLANS[1:], ready, strict=False)]
    groups.append(StepGroup(OFF, ready[3:]))
    batch = Batch([Span(ends, 3, 9, (0,)), Span(middle, 0, 7, (0,))], groups)
    result = core.runner.run(batch)
    assert core.runner.num_shared_passes == is_shared
    for request, start, end in ((ends, 3, 9), (middle, 0, 7)):
        rows = engine.cache.history_rows(request.blocks, start, end)
        assert engine.cache.history.view(-1)[rows].tolist() == request.token_ids[start:end]
    return result, engine.cache


def test_a_shared_pass_does_what_single_ones_do(engines: list[Engine]) -> None:
    (one, alone), (other, together) = run(engines[0], False), run(engines[1], True)
    assert one.first_tokens == other.first_tokens
    assert one.first_tokens[0] is not None
    assert one.first_tokens[1] is None
    assert len(one.steps) == len(PLANS)
    for first, second in zip(one.steps, other.steps, strict=True):
        assert first[:4] == second[:4]
    for model, slabs in alone.slabs.items():
        for i, slab in enumerate(slabs):
            torch.testing.assert_close(slab, together.slabs[model][i], rtol=1e-5, atol=1e-5)
    assert torch.equal(alone.history, together.history)
    assert other.pass_s > 0
    shares = [step.stage_s["verify"] for step in other.steps]
    assert other.prefill_s + sum(shares) == pytest.approx(other.pass_s)


def test_a_chunk_is_a_chain_after_its_rows() -> None:
    first = make_request("a", list(range(50, 130)), 5, [0])
    second = make_request("b", list(range(10)), 0, [1])
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    flat = span_tokens([Span(first, 5, 75), Span(second, 0, 10)], table)
    assert flat.tokens.tolist() == [*range(55, 125), *range(10)]
    assert flat.positions.tolist() == flat.slots.tolist() == [*range(5, 75), *range(10)]
    assert flat.counts == [70, 10]
    assert flat.cache_len.tolist() == [5, 0]
    # only the second prompt ends
    assert flat.logit_rows.tolist() == [79]
    for row, (start, words) in enumerate(zip([0] * 70 + [70] * 10, flat.ancestors, strict=True)):
        seen = [
            j for j in range(2 * WORD_BITS) if int(words[j // WORD_BITS]) >> (j % WORD_BITS) & 1
        ]
        assert seen == list(range(row - start + 1))


def test_nodes_of_a_tree_have_its_depths(engines: list[Engine]) -> None:
    engine = engines[0]
    core = EngineCore(engine)
    plan = PLANS[2]
    request = make_request("a", [3, 1, 4, 1, 5], 4, list(range(4)))
    group = StepGroup(plan, [request])
    inputs = core.runner.inputs(group)
    step: Any = engine.steps[plan.name]
    drafted = step.draft(inputs, engine.cache.environment)
    flat = tree_tokens(plan, inputs, drafted)
    assert flat.tokens.tolist() == drafted.values["tokens"][0].tolist()
    assert flat.tokens[0] == 5
    assert flat.positions.tolist() == [4, 5, 5, 6, 6]
    assert flat.slots.tolist() == [4, 5, 6, 7, 8]
    assert torch.equal(flat.ancestors, TokenTree.from_widths((2, 1)).ancestor_words())
