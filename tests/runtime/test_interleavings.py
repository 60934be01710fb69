"""Whatever order requests come, go and meet in, each has the tokens that it has alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specc.api import compile_with
from specc.config import CompileConfig
from specc.plans import DynamicTree, SpecPlan
from specc.runtime.engine import Engine
from tests.interleavings import Figures, NearTies, Solo, run_interleaving

ROOT = Path(__file__).resolve().parents[2]

PLANS = [
    SpecPlan.from_widths(()),
    SpecPlan.from_widths((1,)),
    SpecPlan.from_widths((1, 1, 1)),
    SpecPlan.from_widths((2, 2)),
    SpecPlan.from_dynamic(DynamicTree(5, 2, 3)),
    SpecPlan.from_widths((1, 1, 1, 1), ("lookup-2",)),
]


@pytest.fixture(scope="module")
def crowded(make_engine: Callable[..., Engine]) -> Engine:
    """Five sequences, and blocks for little more than one of the largest."""
    engine = make_engine(plans=PLANS, max_num_seqs=5)
    shape = dataclasses.replace(engine.cache.shape, pool_blocks=20)
    engine.cache.shape = shape
    pool: Any = type(engine.cache.allocator)(20)
    engine.cache.allocator = pool
    return engine


def test_interleavings(
    crowded: Engine, make_engine: Callable[..., Engine], prompts: list[list[int]]
) -> None:
    figures, solo = Figures(), Solo(make_engine(plans=PLANS))
    for seed in range(12):
        run_interleaving(crowded, solo, seed, prompts, figures)
    assert figures.num_ties == 0
    # all that is to be shown has happened, and often
    assert figures.num_compared > 120
    assert min(figures.num_greedy, figures.num_seeded) > 40
    assert figures.num_preemptions > 10
    assert figures.num_cached_tokens > 100
    assert figures.num_cancelled > 2
    assert figures.num_shared_passes > 120
    assert set(figures.steps) == {plan.name for plan in PLANS}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with the same plans, compiled for the CPU."""
    path = tmp_path_factory.mktemp("pair") / "engine"
    plans = tuple(plan for plan in PLANS if plan.speculates and plan.models)
    config = CompileConfig(
        plans=plans, max_seq_len=256, max_batch_size=6, backend="cpu", block_size=4
    )
    pair = ROOT / "examples" / "pair"
    compile_with(str(pair / "target"), str(pair / "draft"), path, config)
    return path


def check_pair(path: Path, num_interleavings: int) -> Figures:
    engine = Engine.load(path, kv_cache_tokens=144)
    other = Engine.load(path)
    assert engine.tokenizer is not None
    texts = ("def read(path):\n    with open(", "import os\n", "class Node:\n    def __init__(self")
    prompts = [engine.tokenizer.encode(text * n).ids[:60] for n, text in enumerate(texts, 1)]
    prompts += [prompts[0][:12] + prompts[1], prompts[0][:12] + prompts[2][:30]]
    figures, solo = Figures(), Solo(other)
    for seed in range(num_interleavings):
        run_interleaving(engine, solo, seed, prompts, figures, NearTies(other), max_tokens=64)
    return figures


def test_interleavings_of_the_demo_pair(pair: Path) -> None:
    figures = check_pair(pair, 3)
    assert figures.num_compared > 30
    assert figures.num_preemptions >= 3
    assert figures.num_cached_tokens > 100
    assert figures.num_ties <= 1


@pytest.mark.slow
def test_200_interleavings_of_the_demo_pair(pair: Path) -> None:
    figures = check_pair(pair, 200)
    assert figures.num_preemptions > 200
    assert figures.num_cached_tokens > 5000
    assert figures.num_shared_passes > 2000
    assert figures.num_ties <= figures.num_compared // 100
    results = ROOT / "build" / "interleavings.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(figures.to_json(), indent=1) + "\n", encoding="utf-8")
