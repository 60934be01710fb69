"""An engine of a good draft with plans of every shape, alone and led."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.ranks.rank_options import RankOptions
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from tests import engines, models
from tests.lossless import Zoo

NAME = "llama"
TREE = SpecPlan.from_widths((3, 2, 1))
PLANS = (
    SpecPlan.from_widths((1, 1, 1)),
    TREE,
    SpecPlan.from_dynamic(DynamicTree(10, 3, 3)),
    SpecPlan.from_widths((2, 1), ("draft_0", "lookup-2"), MERGE),
    replace(TREE, name="tiles-3-2-1", tile=4),
)
# several engines in one process, none of which may take it down
OPTIONS = RankOptions(2, timeout_s=20.0, ends_process=False, oversubscribes=True)


def build(zoo: Zoo, path: Path, backend: str) -> Path:
    config = CompileConfig(
        plans=PLANS,
        max_batch_size=4,
        max_seq_len=models.MAX_SEQ_LEN,
        block_size=16,
        prefill_chunk=24,
        backend=backend,
        probe=False,
    )
    target, draft = zoo.checkpoint(NAME), zoo.checkpoint(NAME, draft="noisy")
    return engines.build(target, draft, path, config)


@pytest.fixture(scope="session")
def engine_path(zoo: Zoo) -> Path:
    return zoo.once("ranks-eager", lambda path: build(zoo, path, "eager"))


@pytest.fixture(scope="session")
def cpu_path(zoo: Zoo) -> Path:
    return zoo.once("ranks-cpu", lambda path: build(zoo, path, "cpu"))


@pytest.fixture(scope="module")
def load_led() -> Iterator[Callable[..., Engine]]:
    """Load led engines; their ranks end with the module."""
    loaded: list[Engine] = []

    def load(path: Path, num_ranks: int = 2, **options: object) -> Engine:
        engine = Engine.load(path, ranks=replace(OPTIONS, num_ranks=num_ranks), **options)
        loaded.append(engine)
        return engine

    yield load
    for engine in loaded:
        engine.target.leader.close()
    gc.collect()
