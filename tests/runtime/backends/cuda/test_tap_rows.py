"""Hidden states that captured steps keep: those of transformers, in fused graphs, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.backends.capture_limits import CaptureLimits
from tests import engines, models
from tests.lossless import Zoo
from tests.runtime.tap_rows import NAME, PLANS, TAPS, Oracle, load, serve

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def path(zoo: Zoo) -> Path:
    """An engine for CUDA, which needs no GPU to compile."""
    config = CompileConfig(
        plans=PLANS, max_batch_size=4, max_seq_len=models.MAX_SEQ_LEN, block_size=8,
        prefill_chunk=16, backend="cuda", probe=False,
    )  # fmt: skip
    checkpoints = zoo.checkpoint(NAME), zoo.checkpoint(NAME, draft="noisy")

    def with_taps(*given: Any) -> object:
        return build(*given, taps=TAPS)

    def write(made: Path) -> None:
        engines.build(*checkpoints, made, config, builder=with_taps, key=(TAPS,))

    return zoo.once("taps-cuda", write)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [pytest.param(p.name, marks=() if p is PLANS[1] else SLOW) for p in PLANS]
)
def test_rows_of_captured_steps(zoo: Zoo, path: Path, plan: str, device: Any) -> None:
    """Steps are queued ahead of results; graphs run with the oracles of their operators."""
    engine = load(path, capture=CaptureLimits.lazy())
    assert engine.backend == "cuda"
    oracle = Oracle(zoo.reference_model(NAME))
    stats = serve(engine, plan, oracle).scheduler.stats
    assert device.tapes
    assert oracle.num_rows > 1000
    assert stats.mean_acceptance_length > 1.05


@SLOW
def test_rows_of_the_kernels(zoo: Zoo, path: Path, device: Any, triton_kernels: None) -> None:
    """All of it with the Triton kernels, in their interpreter: one request, a few steps."""
    engine = load(path, capture=CaptureLimits(sizes=(1,), max_seconds=-1))
    oracle = Oracle(zoo.reference_model(NAME))
    serve(engine, PLANS[1].name, oracle, num_tokens=10, count=1)
    assert oracle.num_rows > 8
