"""Whatever order requests come, go and meet in, each has the tokens that it has alone."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.speculation.plans import DynamicTree, SpecPlan
from specc.system.machine import describe_machine
from tests import engines
from tests.interleavings import Draw, Figures, NearTies, Solo, run_interleaving
from tests.logprob_interleavings import DrawLogprobs, LogprobFigures

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
    for seed in range(4, 8):
        run_interleaving(crowded, solo, seed, prompts, figures)
    assert figures.num_ties == 0
    # all that is to be shown has happened, and often
    assert figures.num_compared > 40
    assert min(figures.num_greedy, figures.num_seeded) > 12
    assert figures.num_preemptions > 3
    assert figures.num_cached_tokens > 30
    assert figures.num_cancelled > 0
    assert figures.num_shared_passes > 40
    # each of them compared with one that is built anew
    assert figures.num_tables > 100
    assert set(figures.steps) == {plan.name for plan in PLANS}


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.0, id="free"),
        pytest.param(0.7, id="controlled", marks=pytest.mark.slow),
    ],
)
def test_log_probabilities(
    crowded: Engine, make_engine: Callable[..., Engine], prompts: list[list[int]], share: float
) -> None:
    """Of every survivor: those of its solo run, before and after it had to give way."""
    figures, logprobs = Figures(), LogprobFigures()
    solo = Solo(make_engine(plans=PLANS))
    words = [a + b for a in "abcdefghijklmnopqrstuvwxyz0123456" for b in "ABCDEFGHIJ"]
    draw = DrawLogprobs(words, (), share)
    for seed in range(3):
        run_interleaving(
            crowded, solo, 1000 + seed, prompts, figures,
            draw=draw,
            compare=logprobs.compare,
        )  # fmt: skip
    assert figures.num_ties == 0
    assert figures.num_preemptions > 1
    assert figures.num_shared_passes > 20
    assert set(figures.steps) == {plan.name for plan in PLANS}
    assert logprobs.num_values > 1000
    assert logprobs.num_preempted > 0
    assert (logprobs.num_controlled > 10) == bool(share)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with the same plans, compiled for the CPU."""
    path = tmp_path_factory.mktemp("pair") / "engine"
    plans = tuple(plan for plan in PLANS if plan.speculates and plan.models)
    config = CompileConfig(
        plans=plans, max_seq_len=256, max_batch_size=6, backend="cpu", block_size=4, probe=False
    )
    pair = ROOT / "examples" / "pair"
    return engines.build(pair / "target", pair / "draft", path, config)


def check_pair(
    path: Path, num_interleavings: int, logprobs: LogprobFigures | None = None
) -> Figures:
    engine = Engine.load(path, kv_cache_tokens=144)
    other = Engine.load(path)
    assert engine.tokenizer is not None
    texts = ("def read(path):\n    with open(", "import os\n", "class Node:\n    def __init__(self")
    prompts = [engine.tokenizer.encode(text * n).ids[:60] for n, text in enumerate(texts, 1)]
    prompts += [prompts[0][:12] + prompts[1], prompts[0][:12] + prompts[2][:30]]
    figures, solo = Figures(), Solo(other)
    options: dict[str, Any] = {}
    if logprobs is not None:
        draw: Draw = DrawLogprobs(
            ["self", "import", "return ", "(", "):\n", "def read", "with open("],
            sorted(engine.eos_token_ids),
        )
        options = {"draw": draw, "compare": logprobs.compare}
    for seed in range(num_interleavings):
        run_interleaving(
            engine, solo, seed, prompts, figures, NearTies(other), max_tokens=64, **options
        )
    return figures


# the default tier has them of tiny models, above, and compiled engines whose requests join and
# leave in backends/cpu/test_lossless.py
@pytest.mark.slow
def test_interleavings_of_the_demo_pair(pair: Path) -> None:
    figures = check_pair(pair, 2)
    assert figures.num_compared > 15
    assert figures.num_preemptions >= 3
    assert figures.num_cached_tokens > 100
    assert figures.num_ties <= 1
    assert figures.num_tables > 100


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


@pytest.mark.slow
def test_log_probabilities_of_the_demo_pair(pair: Path) -> None:
    logprobs = LogprobFigures()
    figures = check_pair(pair, 1, logprobs)
    assert figures.num_ties <= 1
    assert logprobs.num_values > 500
    assert logprobs.num_controlled > 1


@pytest.mark.slow
def test_log_probabilities_of_40_interleavings_of_the_demo_pair(pair: Path) -> None:
    logprobs = LogprobFigures()
    figures = check_pair(pair, 40, logprobs)
    assert figures.num_preemptions > 50
    assert figures.num_ties <= figures.num_compared // 100
    assert min(logprobs.num_preempted, logprobs.num_controlled) > 40
    results = ROOT / "build" / "logprobs_interleavings.json"
    results.parent.mkdir(exist_ok=True)
    report = {
        "command": "make test-full PYTEST_ARGS=tests/runtime/test_interleavings.py",
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "versions": {"torch": torch.__version__},
        "backend": "cpu",
        "interleavings": figures.to_json(),
        "logprobs": logprobs.to_json(),
    }
    results.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
