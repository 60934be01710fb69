"""What weights may take on each rank, where the rest of the engine takes its share first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import read_manifest
from specc.artifact.manifest_entries import StageEntry
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.runtime.backends import offload_budget
from specc.runtime.backends.base import LoadLimits
from specc.runtime.backends.offload_budget import budget_of, check_offload, offload_bytes
from specc.runtime.ranks import follower
from specc.speculation.plans import SpecPlan
from tests import engines, models

FREE = 1 << 30


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks share the target; a draft of twice its width is rank 0's."""
    root = tmp_path_factory.mktemp("budget")
    target = models.save_tiny("llama", root / "target")
    draft = models.save_tiny("llama", root / "draft", hidden_size=128)
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1,)),), max_seq_len=64, backend="eager", probe=False,
        tensor_parallel_size=2, segments=True,
    )  # fmt: skip
    return engines.build(target, draft, root / "engine", config)


def test_a_follower_leaves_room_for_the_drafts_of_rank_0(path, monkeypatch) -> None:
    manifest, heard = read_manifest(path), []

    class Backend:
        def load(self, path: Path, part: Any, limits: LoadLimits) -> None:
            heard.append((part, limits))

    monkeypatch.setattr(offload_budget, "available_memory_bytes", lambda: FREE)
    monkeypatch.setattr(offload_budget, "cgroup_memory_bytes", lambda: None)
    monkeypatch.setattr(follower, "backend_of", lambda name: Backend())
    setup = {
        "rank": 1, "backend": "eager", "max_num_seqs": None, "kv_cache_tokens": None,
        "offload_weights": "auto", "num_local": 2, "mmap": None, "checks_weights": True,
    }  # fmt: skip
    follower.load_part(path, manifest, setup)
    ((part, limits),) = heard
    given = LoadLimits(None, None, offload_weights="auto", num_local=2)
    # rank 0 asks for the same of its own manifest
    assert limits.offload_weights == offload_bytes(manifest, given)
    others = manifest.memory_of(range(2), weights_budget=0)
    assert limits.offload_weights == (int(0.9 * FREE) - others) // 2
    draft = manifest.memory_of([0]) - replace(manifest, models=manifest.models[:1]).memory_of([0])
    assert draft > 0
    alone = budget_of(part, given, FREE)
    assert alone - limits.offload_weights == pytest.approx(draft / 2, abs=1)


@pytest.mark.parametrize("given", [None, 4096])
def test_what_is_said_in_bytes_is_taken(path, given) -> None:
    limits = LoadLimits(None, None, offload_weights=given, num_local=2)
    assert offload_bytes(read_manifest(path), limits) == given


def test_stages_are_told_to_be_segments_instead(path) -> None:
    """Told to add --segments, a user would be refused by the compiler."""
    manifest = read_manifest(path)
    stage = StageEntry((0,), "float32", (None, 64), manifest.memory_plan["target"])
    assert manifest.parallel is not None
    staged = replace(manifest, parallel=replace(manifest.parallel, stages=(stage, stage)))
    with pytest.raises(ConfigError) as caught:
        check_offload(staged, "cpu", "auto")
    assert caught.value.found == "--offload-weights of an engine in 2 stages"
    assert caught.value.do.endswith("with --segments in place of --pipeline-parallel-size")
