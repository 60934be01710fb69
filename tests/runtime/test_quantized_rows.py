"""Quantized caches: every plan gives what plain decoding of the same engine gives, row by row.

A row has to read alike in the pass that wrote it and in every later one; where a tree saw its own
nodes unrounded, it would not be the target of plain decoding that verifies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specc.artifact.kv_rows import INT8, QUANTIZED_ROWS, SCALE_BYTES
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from tests.interleavings import Figures, Solo, check_each_step, run_interleaving
from tests.runtime.test_views import (
    BLOCKS,
    FEW,
    LENGTHS,
    OFF,
    OTHER,
    VIEW,
    WHOLE,
    RowOracle,
    serve,
)
from tests.tiers import every

PLANS = [
    SpecPlan.from_widths((1, 1, 1, 1)),
    SpecPlan.from_widths((3, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3)),
    SpecPlan.from_widths((2, 1, 1), ("draft_0", "lookup-2"), MERGE),
    SpecPlan.from_widths((1, 1, 1, 1), (VIEW,)),
    SpecPlan.from_widths((3, 2, 1), (FEW,)),
    SpecPlan.from_widths((2, 1), (OTHER, BLOCKS), MERGE),
]
IDS = [plan.name for plan in PLANS]


class CodeOracle(RowOracle):
    """Compares codes and scales; a value between two codes may round to either."""

    def __init__(self, plain: Engine) -> None:
        super().__init__(plain)
        self.num_codes = self.num_others = 0

    def check(self, engine: Engine, request: Request) -> None:
        found, wanted = self.rows(engine, request)
        codes = [x[..., :-SCALE_BYTES].int() for x in (found, wanted)]
        scales = [x[..., -SCALE_BYTES:].contiguous().view(torch.float32) for x in (found, wanted)]
        # a code that rounds otherwise moves the rows of later layers by as much
        torch.testing.assert_close(*scales, rtol=2e-2, atol=1e-3)
        differences = (codes[0] - codes[1]).abs()
        assert differences.max() <= 3, differences.amax((0, 1, 3, 4))
        self.num_codes += differences.numel()
        self.num_others += int((differences > 0).sum())
        self.num_rows += request.cache_len

    def check_share(self) -> None:
        """Others are rare: rows that were written by another rule would be nearly all others."""
        assert self.num_others <= 0.002 * self.num_codes, (self.num_others, self.num_codes)


def spoil(engine: Engine) -> Engine:
    """Let the cache hold anything before it is written."""
    torch.manual_seed(3)
    for slabs in engine.cache.slabs.values():
        for slab in slabs:
            slab.random_(-128, 127)
    return engine


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return spoil(make_engine(plans=[OFF, *PLANS], max_num_seqs=5, kv_cache_dtype=INT8))


@pytest.fixture(scope="module")
def oracle(make_engine: Callable[..., Engine]) -> CodeOracle:
    return CodeOracle(make_engine(plans=[OFF], kv_cache_dtype=INT8))


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(8, PLANS), ids=IDS)
def test_tokens_and_rows(
    engine: Engine, oracle: CodeOracle, texts: list[list[int]], plan: SpecPlan
) -> None:
    """Greedy and seeded requests beside each other, batches of 5 and of 1."""
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=i, temperature=t)
        for i, t in enumerate((0.0, 1.0, 0.0, 0.7, 0.0))
    ]
    core = EngineCore(engine, plan.name, shares_prefixes=False)
    for chosen in (texts[5:10], texts[0:5], texts[12:13]):
        own = params[: len(chosen)]
        wanted = serve(EngineCore(engine, "off"), chosen, own, lambda request: None)
        assert serve(core, chosen, own, lambda r: oracle.check(engine, r)) == wanted
    stats = core.scheduler.stats
    assert stats.num_spec_steps > 10
    assert stats.mean_acceptance_length > 1.05
    oracle.check_share()


@pytest.mark.default("widths0-1.0")
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (3, 2, 1)])
def test_a_view_of_all_rows_is_always_right(
    make_engine: Callable[..., Engine],
    texts: list[list[int]],
    widths: tuple[int, ...],
    temperature: float,
) -> None:
    """Draft levels and verification read the same rows of the tree, so they agree."""
    plan = SpecPlan.from_widths(widths, (WHOLE,))
    made = make_engine(plans=[OFF, plan], max_num_seqs=5, kv_cache_dtype=INT8)
    count = 1 + 4 * (plan.max_depth + 1)
    params = [
        SamplingParams(max_tokens=count, ignore_eos=True, temperature=temperature, seed=i)
        for i in range(5)
    ]
    llm = LLM(made, plan=plan.name)
    llm.generate(texts[3:8], params)
    assert llm.get_metrics().mean_acceptance_length == plan.max_depth + 1


@pytest.mark.parametrize("quantized", QUANTIZED_ROWS)
def test_outputs_are_near_those_of_unrounded_rows(
    make_engine: Callable[..., Engine], texts: list[list[int]], quantized: str
) -> None:
    """Rounding changes logits by a little: first tokens are nearly all the same."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    found = [
        serve(
            EngineCore(make_engine(plans=[OFF], max_num_seqs=5, kv_cache_dtype=kind), "off"),
            texts[:5] + texts[5:10],
            [params] * 10,
            lambda request: None,
        )
        for kind in ("auto", quantized)
    ]
    assert sum(a == b for a, b in zip(*found, strict=True)) >= 8


@pytest.mark.slow
def test_interleavings(
    make_engine: Callable[..., Engine],
    prompts: list[list[int]],
    oracle: CodeOracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Preemption, shared prefixes and shared passes; plans change from step to step."""
    plans = [OFF, *PLANS]
    crowded = make_engine(plans=plans, max_num_seqs=5, kv_cache_dtype=INT8)
    crowded.cache.shape = dataclasses.replace(crowded.cache.shape, pool_blocks=20)
    pool: Any = type(crowded.cache.allocator)(20)
    crowded.cache.allocator = pool
    check_each_step(monkeypatch, crowded, oracle.check)
    figures = Figures()
    solo = Solo(make_engine(plans=[OFF], kv_cache_dtype=INT8))
    for seed in range(2):
        run_interleaving(crowded, solo, seed, prompts, figures)
    assert figures.num_ties == 0
    assert figures.num_compared > 15
    assert figures.num_preemptions > 0
    assert figures.num_cached_tokens > 10
    oracle.check_share()
