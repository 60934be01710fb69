"""Other plans for an engine of stages: each stage's memory grows with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specc.artifact.directory import read_manifest
from specc.compiler.build import build
from specc.compiler.extend import extend_engine
from specc.config import CompileConfig
from specc.speculation.plans import OFF, SpecPlan
from tests import models
from tests.traces import shared_traces

CHAIN = SpecPlan.from_widths((1, 1), ("lookup-2",))
TREE = SpecPlan.from_widths((3, 2, 1), ("lookup-2",))


def compiled(root: Path, checkpoint: Path, plan: SpecPlan) -> Path:
    config = CompileConfig(
        plans=(plan,), max_seq_len=96, max_batch_size=2, block_size=16, backend="eager",
        probe=False, pipeline_parallel_size=2,
    )  # fmt: skip
    with shared_traces():
        build(checkpoint, [], root / plan.name, config)
    return root / plan.name


def test_memory_of_stages_is_that_of_the_plans(tmp_path: Path) -> None:
    checkpoint = models.save_tiny("llama", tmp_path / "checkpoint")
    small, large = (compiled(tmp_path, checkpoint, plan) for plan in (CHAIN, TREE))
    before, wanted = read_manifest(small), read_manifest(large)
    with extend_engine(small, before) as extension:
        found = extension.try_plans([OFF, TREE])
    for own, other in zip(found.stages, wanted.stages, strict=True):
        assert own.memory.weights == other.memory.weights
        assert own.memory.logits == other.memory.logits
        assert own.memory.cache >= other.memory.cache
        # an upper bound
        assert own.memory.workspace >= other.memory.workspace
    for rank in (0, 1):
        assert found.memory_of((rank,)) >= wanted.memory_of((rank,)) > before.memory_of((rank,))
    assert found.total_memory == max(stage.memory.total for stage in found.stages)


def test_the_largest_stage_may_have_no_logits(tmp_path: Path) -> None:
    """As in the middle of three: rows of logits are counted by the others."""
    manifest = read_manifest(compiled(tmp_path, models.save_tiny("llama", tmp_path / "m"), CHAIN))
    assert manifest.parallel is not None
    first, last = manifest.stages
    silent = dataclasses.replace(first.memory, weights=first.memory.weights * 2, logits=0)
    stages = (dataclasses.replace(first, memory=silent), last)
    manifest = dataclasses.replace(
        manifest,
        parallel=dataclasses.replace(manifest.parallel, stages=stages),
        memory_plan={"target": silent},
    )
    with extend_engine(tmp_path / CHAIN.name, manifest) as extension:
        found = extension._with(extension._write([OFF, TREE]), 1, "fixed")
    assert [stage.memory.logits for stage in found.stages] == [
        0,
        last.memory.logits // CHAIN.num_nodes * TREE.num_nodes,
    ]
