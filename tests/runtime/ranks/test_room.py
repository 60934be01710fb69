"""Cores and memory of a machine are compared with all ranks that run on it, before any starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specc.artifact import directory
from specc.artifact.directory import read_manifest
from specc.errors import ConfigError, EngineError
from specc.runtime.backends import held_weights
from specc.runtime.backends.base import LoadLimits
from specc.runtime.engine import Engine
from specc.runtime.engine_args import EngineArgs
from specc.runtime.ranks import follower, launch, room
from specc.runtime.ranks.rank_options import RankOptions
from specc.runtime.ranks.room import check_cores, check_memory, mmap_of_ranks, threads_of_rank
from specc.system import machine
from specc.system.files import format_bytes
from tests.lossless import Zoo
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.ranks.test_sharded_engine import path_of
from tests.runtime.ranks.test_stages import staged_path


@pytest.fixture
def cut_path(zoo: Zoo) -> Path:
    return path_of(zoo, "llama", "eager", 2)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with as many cores as a test says."""

    def set_cores(count: int) -> None:
        for module in (room, machine):
            monkeypatch.setattr(module, "num_usable_cores", lambda: count)

    return set_cores


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which a rank is started, or a part of an engine loaded."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("too late")

    monkeypatch.setattr(launch, "_start_all", refuse)
    monkeypatch.setattr(launch, "backend_of", refuse)
    monkeypatch.setattr(launch, "make_group", refuse)


def test_more_ranks_than_cores(cut_path: Path, cores: Any, no_ranks: None) -> None:
    cores(1)
    with pytest.raises(ConfigError) as caught:
        EngineArgs(cut_path).load()
    assert caught.value.found == "2 ranks on this machine, and 1 core that this process may use"
    assert caught.value.needed.startswith("a core for each rank")
    assert "--oversubscribe" in caught.value.do


def test_as_many_ranks_as_cores(cores: Any) -> None:
    cores(3)
    for count in (1, 2, 3):
        check_cores(count, RankOptions(count))
    with pytest.raises(ConfigError, match="4 ranks on this machine, and 3 cores"):
        check_cores(4, RankOptions(4))
    check_cores(4, RankOptions(4, oversubscribes=True))


@pytest.mark.slow
def test_ranks_may_share_a_core(cut_path: Path, cores: Any) -> None:
    """The way through, as the commands, the servers and `LLM` take it."""
    cores(1)
    engine = EngineArgs(cut_path, oversubscribes=True).load()
    try:
        assert len(engine.target.leader.pids) == 1  # type: ignore[attr-defined]
    finally:
        engine.target.leader.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("count", "num_local", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_threads_of_a_rank(
    cores: Any, monkeypatch: pytest.MonkeyPatch, count: int, num_local: int, threads: int
) -> None:
    cores(count)
    monkeypatch.setattr(room.torch, "get_num_threads", lambda: count)
    assert threads_of_rank(num_local) == threads


def test_ranks_of_a_launch_on_this_machine_are_counted(
    cut_path: Path, cores: Any, no_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(1)
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for rank in "01":
        for name, value in {**given, "RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match="2 ranks on this machine, and 1 core"):
            Engine.load(cut_path)
    # the first of two hosts
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(AssertionError, match="too late"):
        Engine.load(cut_path, ranks=replace(OPTIONS, oversubscribes=False, start_timeout_s=1.0))


def test_memory_of_ranks_is_the_sum(zoo: Zoo, cut_path: Path) -> None:
    """Each has its part of the target, and rank 0 the draft."""
    manifest = read_manifest(cut_path)
    target, draft = (manifest.memory_plan[name].total for name in ("target", "draft_0"))
    assert manifest.memory_of((0,)) == target + draft == manifest.total_memory
    assert manifest.memory_of((1,)) == target
    assert manifest.memory_of(range(2)) == 2 * target + draft
    caches = [manifest.memory_plan[name].cache for name in ("target", "draft_0")]
    half = manifest.limits.max_batch_size // 2
    assert manifest.memory_of(range(2), half) == 2 * target + draft - caches[0] - caches[1] // 2
    whole = read_manifest(path_of(zoo, "llama", "eager", 1))
    assert whole.memory_of((0,)) == whole.total_memory


def test_memory_of_stages_is_each_ones_own(zoo: Zoo) -> None:
    """A host has to have room for its own stage, which may be the larger one."""
    manifest = read_manifest(staged_path(zoo, 1, 2))
    assert manifest.parallel is not None
    first, last = (manifest.memory_of((rank,)) for rank in range(2))
    draft = manifest.memory_plan["draft_0"].total
    assert [first - draft, last] == [stage.memory.total for stage in manifest.stages]
    uneven = tuple(
        replace(stage, memory=replace(stage.memory, weights=stage.memory.weights * factor))
        for stage, factor in zip(manifest.stages, (1, 9), strict=True)
    )
    manifest = replace(manifest, parallel=replace(manifest.parallel, stages=uneven))
    last = manifest.memory_of((1,))
    assert last > first
    check_memory(manifest, (0,), None, available=first)
    with pytest.raises(EngineError) as caught:
        check_memory(manifest, (1,), None, available=first)
    needed = format_bytes(last)
    wanted = f"{needed} for 1 of 2 ranks on this machine (stage 1: {needed}), "
    assert caught.value.needed.startswith(wanted)
    with pytest.raises(EngineError) as caught:
        check_memory(manifest, range(2), None, available=first + last - 1)
    assert f"(stage 0: {format_bytes(first)}, stage 1: {needed})" in caught.value.needed


def test_too_little_memory_for_all(
    cut_path: Path, no_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank would fit, two do not: nobody is started."""
    manifest = read_manifest(cut_path)
    both = manifest.memory_of(range(2))
    check_memory(manifest, range(2), None, both)
    check_memory(manifest, (0,), None, both - 1)
    monkeypatch.setattr(room, "available_memory_bytes", lambda: both - 1)
    with pytest.raises(EngineError) as caught:
        Engine.load(cut_path, ranks=OPTIONS)
    assert caught.value.found == f"{format_bytes(both - 1)} of memory available"
    assert caught.value.needed.startswith(f"{format_bytes(both)} for 2 of 2 ranks on this machine")
    assert "more machines" in caught.value.do


def test_ranks_hold_their_weights_together_or_map_them(
    cut_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not some of them, whose passes would wait for those of the others."""
    manifest = read_manifest(cut_path)
    names = [manifest.weights_file(model, rank) for rank in range(2) for model in manifest.models]
    both = sum((cut_path / name).stat().st_size for name in names) * 9 // 8 + (256 << 20)
    monkeypatch.setattr(held_weights, "are_huge_pages_given", lambda: True)
    for free, maps in ((both, False), (both - 1, True)):
        monkeypatch.setattr(held_weights, "free_bytes", lambda n=free: n)
        assert mmap_of_ranks(cut_path, manifest, range(2), LoadLimits()) is maps
    # and a rank does as it is told
    for told in (False, True):
        limits: list[LoadLimits] = []
        monkeypatch.setattr(follower, "backend_of", lambda name, to=limits: Recorder(to))
        setup = {"rank": 1, "backend": "cpu", "max_num_seqs": 1, "kv_cache_tokens": None}
        more = {"offload_weights": None, "num_local": 2, "mmap": told, "checks_weights": True}
        follower.load_part(cut_path, manifest, setup | more)
        assert [each.mmap for each in limits] == [told]


class Recorder:
    """A backend that keeps what it is asked to load by."""

    def __init__(self, heard: list[LoadLimits]) -> None:
        self._heard = heard

    def load(self, path: Path, part: Any, limits: LoadLimits) -> None:
        self._heard.append(limits)


def test_a_rank_that_follows_takes_what_it_is_told_to(
    cut_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rank 0 counts it: with fewer rows, and with weights that stay in their file."""
    manifest = read_manifest(cut_path)
    rows, budget = manifest.limits.max_seq_len, 4096
    setup = {
        "backend": "eager", "verify": False, "max_num_seqs": 1, "kv_cache_tokens": None,
        "offload_weights": None,
    }  # fmt: skip
    for told in ({}, {"kv_cache_tokens": rows}, {"offload_weights": budget}):
        sizes = (1, told.get("kv_cache_tokens"), told.get("offload_weights"))
        needed = manifest.memory_of((1,), *sizes)
        assert not told or needed < manifest.memory_of((1,), 1)
        for available, fits in ((needed, True), (needed - 1, False)):
            monkeypatch.setattr(directory, "available_memory_bytes", lambda n=available: n)
            if fits:
                follower.open_part(cut_path, setup | told)
                continue
            with pytest.raises(EngineError, match="of memory available"):
                follower.open_part(cut_path, setup | told)
