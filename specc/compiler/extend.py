"""Give an engine other plans: its programs and weights stay, step programs and manifest are new."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.artifact.engine_writer import EngineWriter
from specc.artifact.manifest import MANIFEST_FILE, PROFILE_FILE, Manifest
from specc.artifact.manifest_entries import MemoryEntry, PlanEntry
from specc.compiler.backends.registry import compiler_backend
from specc.compiler.engine_files import step_file, write_steps
from specc.compiler.model_entries import draft_states
from specc.lora.target_adapters import TargetAdapters
from specc.passes.step.step_graph import TARGET
from specc.passes.step.tiles import logit_rows, pass_rows, tile_plan
from specc.speculation.plans import SpecPlan, replay_rows


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
        self._backend = compiler_backend(manifest.backend)
        self._plans: list[SpecPlan] = []
        self._entries: tuple[PlanEntry, ...] = ()
        before = [entry.plan for entry in manifest.plans]
        logits = {name: entry.logits for name, entry in manifest.memory_plan.items()}
        if manifest.stages:
            # the stage that takes the most may be one that has none
            logits[TARGET] = max(stage.memory.logits for stage in manifest.stages)
        # bytes of a row of logits, as the memory plan has counted them
        self._row_bytes = {
            name: count // (manifest.limits.max_batch_size * _most(logit_rows, before, name))
            for name, count in logits.items()
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
                entry = PlanEntry.of(plan, step_file(plan))
                for file in {entry.file, entry.winners_file}:
                    self._writer.path(file).unlink(missing_ok=True)
        self._plans = list(plans)
        slabs = {model.name: model.num_slabs for model in self._manifest.models}
        is_padded, size = self._backend.facts.is_padded, limits.block_size
        is_cut = self._manifest.parallel is not None
        windowed, models = self._manifest.windowed, self._manifest.models
        states = models[0].state_slabs, draft_states(models)
        names = tuple(entry.name for entry in self._manifest.adapters)
        adapters = TargetAdapters(names, models[0].vocab_size)
        self._entries = write_steps(
            self._writer, plans, slabs, is_padded, size, is_cut, windowed, *states,
            adapters,
        )  # fmt: skip
        return plans

    def _with(self, plans: Sequence[SpecPlan], max_nodes: int, policy: str) -> Manifest:
        limits = self._manifest.limits
        nodes = max(max_nodes, *(plan.num_rows for plan in plans))
        nodes = self._backend.extended_nodes(self._manifest, plans, nodes)
        sizes = (plans, max_nodes, nodes)
        memory = {
            name: self._memory_for(name, entry, *sizes)
            for name, entry in self._manifest.memory_plan.items()
        }
        parallel = self._manifest.parallel
        if parallel is not None and parallel.stages:
            stages = tuple(
                dataclasses.replace(stage, memory=self._memory_for(TARGET, stage.memory, *sizes))
                for stage in parallel.stages
            )
            parallel = dataclasses.replace(parallel, stages=stages)
            # no rank has more
            memory[TARGET] = max((stage.memory for stage in stages), key=lambda m: m.total)
        return dataclasses.replace(
            self._manifest,
            plans=self._entries,
            default_plan=plans[0].name,
            policy=policy,
            limits=dataclasses.replace(limits, max_nodes=nodes),
            memory_plan=memory,
            parallel=parallel,
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
        held = dataclasses.replace(limits, max_nodes=nodes).cache_rows() / limits.cache_rows()
        return MemoryEntry(
            entry.weights,
            int(entry.cache * max(1.0, held)),
            limits.max_batch_size * rows * self._row_bytes[name] if entry.logits else 0,
            int(entry.workspace * max(1.0, widest / before)),
            self._states_for(name, plans),
            entry.checkpoints,
        )

    def _states_for(self, name: str, plans: Sequence[SpecPlan]) -> int:
        """Bytes of the states of all sequences, and of a replay row for each node."""
        (model,) = (x for x in self._manifest.models if x.name == name)
        each = model.state_bytes + model.replay_bytes * replay_rows(plans)
        return self._manifest.limits.max_batch_size * each


def _most(count: Callable[[SpecPlan, str], int], plans: Sequence[SpecPlan], model: str) -> int:
    return max(1, *(count(plan, model) for plan in plans))
