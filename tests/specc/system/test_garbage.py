"""Cycles are looked for rarely while something compiles, and as before after it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from specc.compiler import build as compiler
from specc.config import CompileConfig
from specc.system.garbage import rare_collections


@pytest.fixture
def threshold() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield (700, 10, 10)
    gc.set_threshold(*before)


def test_thresholds_come_back(threshold):
    with rare_collections():
        assert gc.get_threshold()[0] >= 100_000
    assert gc.get_threshold() == threshold
    with pytest.raises(KeyError), rare_collections():
        raise KeyError
    assert gc.get_threshold() == threshold


def test_blocks_that_overlap(threshold):
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with rare_collections():
            entered.set()
            leave.wait(30)

    other = threading.Thread(target=hold)
    with rare_collections():
        other.start()
        assert entered.wait(30)
    # the first has ended, the second has not
    assert gc.get_threshold()[0] >= 100_000
    leave.set()
    other.join(30)
    assert gc.get_threshold() == threshold


@pytest.mark.parametrize("given", [(0, 10, 10), (1_000_000, 5, 5)])
def test_a_process_that_collects_as_rarely_keeps_its_thresholds(threshold, given):
    gc.set_threshold(*given)
    with rare_collections():
        assert gc.get_threshold() == given
    assert gc.get_threshold() == given


def test_a_compilation_collects_rarely(threshold, tiny_models, tmp_path):
    seen = set()
    compiler.build(
        tiny_models.target,
        None,
        tmp_path / "engine",
        CompileConfig(backend="eager", max_seq_len=64),
        listen=lambda event: seen.add(gc.get_threshold()[0]),
    )
    assert seen
    assert min(seen) >= 100_000
    assert gc.get_threshold() == threshold
