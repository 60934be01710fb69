"""Self-drafts: outputs and committed rows are those of plain decoding, after every step.

Tokens alone do not tell: where a draft overwrites rows that the target computed, greedy outputs
mostly stay what they were, and go wrong much later. So K and V of every layer are compared with
those of one pass over the whole text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from tests.interleavings import Figures, Solo, check_each_step, run_interleaving
from tests.tiers import every

# blocks have 4 rows: a sequence of 16 has the first row that the view does not see
VIEW, OTHER = "self_w8_s4", "self_w4_s0"
# of these, 24 and 12
BLOCKS, FEW = "self_w8_s4_b8", "self_w4_s0_b4"
PLANS = [
    SpecPlan.from_widths((1,), (VIEW,)),
    SpecPlan.from_widths((1, 1, 1, 1), (VIEW,)),
    SpecPlan.from_widths((3, 2, 1), (VIEW,)),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3), VIEW),
    # more rows than nodes
    SpecPlan.from_dynamic(DynamicTree(5, 4, 3), OTHER),
    SpecPlan.from_widths((2, 1, 1), (VIEW, "lookup-2"), MERGE),
    SpecPlan.from_widths((1, 1, 1), ("draft_0", VIEW), MERGE),
    SpecPlan.from_widths((2, 1), (OTHER, VIEW), MERGE),
    SpecPlan.from_widths((1, 1, 1), (VIEW, "draft_0", OTHER), VOTE),
    SpecPlan.from_widths((1, 1), (OTHER, "suffix"), VOTE),
    SpecPlan.from_widths((1, 1, 1, 1), (BLOCKS,)),
    SpecPlan.from_widths((3, 2, 1), (FEW,)),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3), FEW),
    SpecPlan.from_widths((2, 1), (FEW, VIEW, BLOCKS), MERGE),
    SpecPlan.from_widths((1, 1, 1), (BLOCKS, "draft_0", FEW), VOTE),
]
IDS = [plan.name for plan in PLANS]
# of each kind of views, and of trees that follow from data
ALONE = (0, 2, 4, 8, 10, 12)
OFF = SpecPlan.from_widths(())
# within the budget, around its end by a row and by a block, and above it
LENGTHS = (3, 11, 12, 13, 15, 16, 17, 19, 20, 21, 40, 23, 24, 25, 28)


class RowOracle:
    """Compares the target's committed rows with those of one pass over the same tokens.

    A row may differ by TOLERANCE of the largest element that K or V of its layer has, or of 1 where
    that is less: two orders of a sum differ by that much, and K reaches 7.4 in some tiny models.

    Args:
        plain: an engine with the same target, and a cache of its own.
    """

    TOLERANCE = 1e-5

    def __init__(self, plain: Engine) -> None:
        self._plain = plain
        blocks = plain.cache.allocator.allocate(plain.cache.shape.blocks_per_sequence)
        self._table = plain.cache.block_table([blocks])
        self.num_rows = 0

    @torch.inference_mode()
    def rows(self, engine: Engine, request: Request) -> tuple[Tensor, Tensor]:
        """Committed rows of a running request, and those of one pass over its tokens."""
        count = request.cache_len
        places = torch.arange(count)
        self._plain.target(
            torch.tensor(request.token_ids[:count]),
            places,
            torch.tensor([0, count], dtype=torch.int32),
            places.int(),
            torch.zeros(1, dtype=torch.int32),
            None,
            self._table,
            torch.tensor([count - 1]),
        )
        found = rows_of(engine, engine.cache.block_table([request.blocks])[0], count)
        return found, rows_of(self._plain, self._table[0], count)

    def check(self, engine: Engine, request: Request) -> None:
        """Raises AssertionError: a committed row of a running request is another."""
        found, wanted = self.rows(engine, request)
        count = request.cache_len
        # [layers, 2, 1, 1, 1]
        size = wanted.abs().amax((2, 3, 4), keepdim=True).clamp(min=1.0)
        wrong = ((found - wanted).abs() / size).amax((0, 1, 3, 4)) > self.TOLERANCE
        assert not wrong.any(), f"of {count} rows, these are others: {wrong.nonzero().flatten()}"
        self.num_rows += count


def rows_of(engine: Engine, blocks: Tensor, count: int) -> Tensor:
    """[layers, 2, rows, heads, dim] of a sequence, K and V."""
    (slab,) = engine.cache.slabs["target"]
    rows = torch.arange(count)
    return slab[:, :, blocks[rows // slab.shape[3]].long(), rows % slab.shape[3]]


@pytest.fixture(scope="module")
def spoiled(make_engine: Callable[..., Engine]) -> Engine:
    """An engine of all plans, whose cache holds anything before it is written."""
    engine = make_engine(plans=[OFF, *PLANS], max_num_seqs=5)
    torch.manual_seed(3)
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            slab.normal_(0.0, 30.0)
    return engine


@pytest.fixture(scope="module")
def oracle(make_engine: Callable[..., Engine]) -> RowOracle:
    return RowOracle(make_engine(plans=[OFF]))


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in LENGTHS]


def serve(
    core: EngineCore,
    texts: list[list[int]],
    params: list[SamplingParams],
    after: Callable[[Request], object],
) -> list[list[int]]:
    """Outputs of requests that run together; `after` sees each that runs after every iteration."""
    requests = [core.requests.make(list(t), p) for t, p in zip(texts, params, strict=True)]
    for request in requests:
        core.scheduler.add(request)
    while core.scheduler.has_work:
        assert core.advance()
        for request in requests:
            if request.blocks and request.cache_len and not request.is_finished:
                after(request)
    return [request.output_token_ids for request in requests]


@pytest.mark.default(
    "selfw8s4-chain-1-1",
    "selfw8s4-chain-1-5",
    "selfw8s4-chain-4-5",
    "selfw8s4-tree-3-2-1-1",
    "vote-selfw8s4+0+selfw4s0-chain-3-1",
    "selfw4s0b4-dynamic-6-3-3-1",
)
@pytest.mark.parametrize(
    ("plan", "batch"),
    [
        # some of the plans alone, and the first two in batches; the others in the slow tier
        pytest.param(
            plan,
            batch,
            id=f"{name}-{batch}",
            marks=[] if (i in ALONE if batch == 1 else i < 2) else [pytest.mark.slow],
        )
        for i, (plan, name) in enumerate(zip(PLANS, IDS, strict=True))
        for batch in (1, 5)
    ],
)
def test_greedy_tokens_and_rows(
    spoiled: Engine,
    oracle: RowOracle,
    texts: list[list[int]],
    greedy: Callable[..., list[int]],
    plan: SpecPlan,
    batch: int,
) -> None:
    """Ragged batches: some sequences are seen whole, of some a part, and blocks are left behind."""
    core = EngineCore(spoiled, plan.name, shares_prefixes=False)
    chosen = texts if batch > 1 else texts[2::3]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    before = oracle.num_rows
    for first in range(0, len(chosen), batch):
        part = chosen[first : first + batch]
        found = serve(core, part, [params] * len(part), lambda r: oracle.check(spoiled, r))
        assert found == [greedy(text, 24) for text in part]
    stats = core.scheduler.stats
    assert stats.num_spec_steps > 10
    assert oracle.num_rows - before > 200
    # the draft is right and wrong
    assert 1.05 < stats.mean_acceptance_length < plan.max_depth + 0.98 or plan.max_depth == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, id=name, marks=[] if i == 10 else [pytest.mark.slow])
        for i, (plan, name) in enumerate(zip(PLANS, IDS, strict=True))
    ],
)
def test_seeded_tokens_and_rows(
    spoiled: Engine, oracle: RowOracle, texts: list[list[int]], plan: SpecPlan
) -> None:
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=i, temperature=t, **options)
        for i, (t, options) in enumerate(
            [
                (1.0, {}),
                (0.7, {"top_p": 0.9}),
                (1.0, {"repetition_penalty": 1.2}),
                (1.0, {"rule": "delta"}),
                (0.5, {"top_k": 5, "presence_penalty": 0.3}),
            ]
        )
    ]
    chosen = texts[3:8]
    wanted = serve(EngineCore(spoiled, "off"), chosen, params, lambda request: None)
    core = EngineCore(spoiled, plan.name, shares_prefixes=False)
    assert serve(core, chosen, params, lambda r: oracle.check(spoiled, r)) == wanted


WHOLE, ALL_BLOCKS = "self_w92_s0", "self_w4_s0_b88"
EXACT = [
    SpecPlan.from_widths((1, 1, 1, 1), (WHOLE,)),
    SpecPlan.from_widths((3, 2, 1), (WHOLE,)),
    # all candidates: which of fewer are kept is another question
    SpecPlan.from_dynamic(DynamicTree(22, 3, 3), WHOLE),
    SpecPlan.from_widths((2, 1), (OTHER, WHOLE), MERGE),
    SpecPlan.from_widths((2, 1, 1), (ALL_BLOCKS,)),
    SpecPlan.from_widths((1, 1), (FEW, ALL_BLOCKS), MERGE),
]
ALWAYS_RIGHT = [
    pytest.param(plan, temperature, rule, id=f"{plan.name}-{rule}-{temperature}")
    for plan in EXACT
    for temperature, rule in [
        (0.0, "coupled"), (1.0, "coupled"), (1.0, "swor"), (1.0, "mss"),
    ]
    if rule == "coupled" or (plan.is_static and not plan.combine)
]  # fmt: skip


@pytest.mark.default(
    "selfw92s0-chain-4-swor-1.0",
    "selfw92s0-tree-3-2-1-swor-1.0",
    "selfw4s0b88-tree-2-1-1-coupled-0.0",
    "merge-selfw4s0b4+selfw4s0b88-chain-2-coupled-0.0",
)
@pytest.mark.parametrize(("plan", "temperature", "rule"), every(2, ALWAYS_RIGHT))
def test_a_view_of_all_rows_is_always_right(
    make_engine: Callable[..., Engine],
    texts: list[list[int]],
    plan: SpecPlan,
    temperature: float,
    rule: str,
) -> None:
    """The draft is the target: positions, noise, masks and the rows that it drew from agree."""
    engine = make_engine(plans=[OFF, plan], max_num_seqs=5)
    params = [
        SamplingParams(
            max_tokens=1 + 4 * (plan.max_depth + 1),
            ignore_eos=True,
            temperature=temperature,
            seed=i,
            rule=rule,
        )
        for i in range(5)
    ]
    llm = LLM(engine, plan=plan.name)
    llm.generate(texts[3:8], params)
    assert llm.get_metrics().mean_acceptance_length == plan.max_depth + 1


@pytest.mark.parametrize(("view", "most"), every(3, [(VIEW, 15), (BLOCKS, 23), (FEW, 11)], 1))
def test_a_budget_that_begins_to_bite(
    make_engine: Callable[..., Engine], view: str, most: int
) -> None:
    """A draft is exact as long as a sequence is seen whole, and one row later it is not."""
    plan = SpecPlan.from_widths((1,), (view,))
    engine = make_engine(plans=[OFF, plan], max_num_seqs=5)
    dice = torch.Generator().manual_seed(1)
    for length, is_whole in ((most - 3, True), (most, True), (most + 1, False), (most + 2, False)):
        accepted = 0
        for seed in range(30):
            text = torch.randint(0, 60, (length,), generator=dice).tolist()
            params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, seed=seed)
            llm = LLM(engine, plan=plan.name)
            llm.generate([text], [params])
            accepted += llm.get_metrics().num_accepted_tokens
        assert (accepted == 30) == is_whole, (length, accepted)


@pytest.fixture(scope="module")
def crowded(make_engine: Callable[..., Engine]) -> Engine:
    """Five sequences, and blocks for little more than one of the largest."""
    engine = make_engine(plans=[OFF, SpecPlan.from_widths((1, 1, 1)), *PLANS], max_num_seqs=5)
    engine.cache.shape = dataclasses.replace(engine.cache.shape, pool_blocks=20)
    pool: Any = type(engine.cache.allocator)(20)
    engine.cache.allocator = pool
    return engine


@pytest.mark.slow
def test_interleavings(
    crowded: Engine,
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
    oracle: RowOracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Preemption, shared prefixes and shared passes; plans change from step to step."""
    check_each_step(monkeypatch, crowded, oracle.check)
    figures, solo = Figures(), Solo(make_engine(plans=[OFF]))
    before = oracle.num_rows
    for seed in range(4):
        run_interleaving(crowded, solo, seed, prompts, figures)
    assert figures.num_ties == 0
    assert figures.num_compared > 40
    assert figures.num_preemptions > 2
    assert figures.num_cached_tokens > 30
    assert figures.num_shared_passes > 30
    assert figures.steps.keys() >= {plan.name for plan in PLANS}
    assert oracle.num_rows - before > 2000
