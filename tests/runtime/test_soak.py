"""A service under random load: nothing is lost, mixed up or kept."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from specc.api import compile_with
from specc.config import CompileConfig
from specc.plans import SpecPlan
from specc.runtime.engine import Engine
from specc.runtime.engine_core import EngineCore
from specc.runtime.service import Service
from tests.interleavings import Moody, NearTies, Solo
from tests.soak import SoakFigures, assert_sound, run_soak

ROOT = Path(__file__).resolve().parents[2]
PLANS = (SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((1,)), SpecPlan.from_widths((2, 2)))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("soak") / "engine"
    config = CompileConfig(
        plans=PLANS, max_seq_len=128, max_batch_size=8, backend="cpu", block_size=4
    )
    pair = ROOT / "examples" / "pair"
    compile_with(str(pair / "target"), str(pair / "draft"), path, config)
    return path


def soak(path: Path, num_requests: int, seconds: float) -> SoakFigures:
    served, other = Engine.load(path, kv_cache_tokens=144), Engine.load(path)
    assert served.tokenizer is not None
    texts = ("def read(path):\n    with open(", "import os\n", "class Node:\n    def __init__(self")
    prompts = [served.tokenizer.encode(text * n).ids[:70] for n, text in enumerate(texts, 1)]
    prompts += [prompts[0] + prompts[1], prompts[0] + prompts[2]]
    core = EngineCore(served, policy=Moody(list(served.plans), random.Random(2)))
    with Service(core=core, max_waiting=64) as service:
        figures = run_soak(
            service,
            Solo(other),
            NearTies(other),
            prompts,
            num_requests=num_requests,
            seconds=seconds,
        )
        assert_sound(service, figures)
    assert figures.num_ties <= figures.num_compared // 100
    assert figures.num_preemptions > 0
    assert figures.num_cached_tokens > 0
    assert figures.num_faults > 0
    return figures


def test_soak_for_a_while(engine: Path) -> None:
    figures = soak(engine, 0, seconds=60)
    assert figures.num_compared > 100


@pytest.mark.slow
def test_soak(engine: Path) -> None:
    """20,000 requests and ten minutes at least; memory stays as it is."""
    figures = soak(engine, 20_000, seconds=600)
    path = ROOT / "build" / "soak.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures.to_json(), indent=1) + "\n", encoding="utf-8")
    assert 0.95 < figures.growth < 1.05
