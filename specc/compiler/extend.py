"""Give an engine other plans: its programs and weights stay, step programs and manifest are new."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.artifact.directory import EngineWriter
from specc.artifact.manifest import (
    MANIFEST_FILE,
    PROFILE_FILE,
    Manifest,
    MemoryEntry,
    PlanEntry,
    RectangleEntry,
)
from specc.errors import ConfigError
from specc.passes.step.fuse_step import fuse_step
from specc.passes.step.tiles import logit_rows, pass_rows, tile_plan
from specc.speculation.plans import SpecPlan


@contextlib.contextmanager
def extend_engine(directory: Path, manifest: Manifest) -> Iterator[EngineExtension]:
    """A copy of an engine beside it, whose large files are links; `commit` puts it in place.

    Args:
        directory: of the engine.
        manifest: of the engine, checked.
    Raises:
        OutputError: the directory cannot be written.
    """
    with EngineWriter(directory, force=True) as writer:
        for name, entry in manifest.files.items():
            if not name.startswith("steps/") and name not in (MANIFEST_FILE, PROFILE_FILE):
                writer.link_file(directory / name, name, entry)
        yield EngineExtension(writer, manifest)


class EngineExtension:
    """An engine under way to other plans.

    Args:
        writer: with all files but steps.
        manifest: of the engine as it was.
    """

    def __init__(self, writer: EngineWriter, manifest: Manifest) -> None:
        self._writer = writer
        self._manifest = manifest
        self._plans: list[SpecPlan] = []
        before = [entry.plan for entry in manifest.plans]
        # bytes of a row of logits, as the memory plan has counted them
        self._row_bytes = {
            name: entry.logits // (manifest.limits.max_batch_size * _most(logit_rows, before, name))
            for name, entry in manifest.memory_plan.items()
        }

    @property
    def directory(self) -> Path:
        """After `try_plans`, an engine that can be loaded."""
        return self._writer.staging

    def try_plans(self, plans: Sequence[SpecPlan], max_nodes: int = 1) -> Manifest:
        """Let the copy have these plans, the first its default.

        Args:
            plans: off among them; in tiles where the engine's limit of logits asks for them.
            max_nodes: rows after the committed ones, where more is needed than the plans say.
        """
        plans = self._write(plans)
        return self._writer.seal(self._with(plans, max_nodes, "fixed"))

    def commit(
        self, plans: Sequence[SpecPlan], policy: str, profile: Mapping[str, Any]
    ) -> Manifest:
        """Replace the engine by the copy.

        Args:
            plans: the first is the default.
            policy: what chooses among them.
            profile: what was measured.
        """
        plans = self._write(plans)
        self._writer.write_json(PROFILE_FILE, dict(profile))
        return self._writer.commit(self._with(plans, 1, policy))

    def _write(self, given: Sequence[SpecPlan]) -> list[SpecPlan]:
        """Write step programs; returns the plans as they are now."""
        limits = self._manifest.limits
        sizes = (self._row_bytes, limits.max_batch_size, limits.max_logits_mb)
        named: dict[str, SpecPlan] = {}
        for plan in given:
            named.setdefault(plan.name, tile_plan(plan, *sizes))
        plans = list(named.values())
        for plan in self._plans:
            if plan not in plans:
                self._writer.path(_file_of(plan)).unlink()
        self._plans = list(plans)
        slabs = {model.name: len(model.slabs) for model in self._manifest.models}
        for plan in plans:
            step = fuse_step(plan, slabs, self._manifest.rectangle is not None)
            self._writer.write_json(_file_of(plan), step.to_json())
        return plans

    def _with(self, plans: Sequence[SpecPlan], max_nodes: int, policy: str) -> Manifest:
        limits = self._manifest.limits
        nodes = max(max_nodes, *(plan.num_rows for plan in plans))
        if (rectangle := self._manifest.rectangle) is not None:
            _check_rim(rectangle, limits.max_nodes, nodes, plans)
            nodes = limits.max_nodes  # the rows are what they are
        if self._manifest.tensorrt is not None:
            _check_profiles([entry.plan for entry in self._manifest.plans], plans)
        return dataclasses.replace(
            self._manifest,
            plans=tuple(PlanEntry.of(plan, _file_of(plan)) for plan in plans),
            default_plan=plans[0].name,
            policy=policy,
            limits=dataclasses.replace(limits, max_nodes=nodes),
            memory_plan={
                name: self._memory_for(name, entry, plans, max_nodes, nodes)
                for name, entry in self._manifest.memory_plan.items()
            },
            files={},
        )

    def _memory_for(
        self, name: str, entry: MemoryEntry, plans: Sequence[SpecPlan], max_nodes: int, nodes: int
    ) -> MemoryEntry:
        """Memory of a model with other plans; of its passes an upper bound.

        What passes compute grows at most as their rows do, caches by the rows that are added.
        """
        limits = self._manifest.limits
        before = _most(pass_rows, [entry.plan for entry in self._manifest.plans], name)
        rows, widest = (
            max(max_nodes, _most(count, plans, name)) for count in (logit_rows, pass_rows)
        )
        held = (limits.max_seq_len + nodes) / (limits.max_seq_len + limits.max_nodes)
        return MemoryEntry(
            entry.weights,
            int(entry.cache * max(1.0, held)),
            limits.max_batch_size * rows * self._row_bytes[name],
            int(entry.workspace * max(1.0, widest / before)),
        )


def _most(count: Callable[[SpecPlan, str], int], plans: Sequence[SpecPlan], model: str) -> int:
    return max(1, *(count(plan, model) for plan in plans))


def _file_of(plan: SpecPlan) -> str:
    return f"steps/{plan.name}.json"


def _check_rim(
    rectangle: RectangleEntry, max_nodes: int, nodes: int, plans: Sequence[SpecPlan]
) -> None:
    """Rectangular programs have caches of a fixed number of rows."""
    catch_up = max(plan.catch_up if plan.models else 1 for plan in plans)
    if nodes > max_nodes or catch_up - 1 > rectangle.front:
        raise ConfigError(
            f"a tree of {nodes} nodes, whose drafts read back {catch_up} tokens",
            f"at most {max_nodes} nodes and {rectangle.front + 1} tokens: the caches of this"
            " engine's ONNX files have a fixed number of rows",
            "compile the engine again with the largest --tree that it is to run",
        )


def _check_profiles(built: Sequence[SpecPlan], plans: Sequence[SpecPlan]) -> None:
    """TensorRT engines run with the shapes alone that they were built for."""
    if unknown := [plan.name for plan in plans if plan not in built]:
        raise ConfigError(
            f"plan {unknown[0]}, for which the TensorRT engines have no profile",
            f"one of {', '.join(plan.name for plan in built)}",
            "compile the engine again with this --tree",
        )
