"""The backend cpu: programs as instructions of the C++ library, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from specc.artifact.manifest import Manifest
from specc.artifact.segments import SegmentedModel
from specc.runtime.backends.base import LoadedPrograms, LoadLimits, RuntimeBackend
from specc.runtime.backends.cpu.native_calls import Pool
from specc.runtime.backends.cpu.program import CpuProgram
from specc.runtime.backends.cpu.segments import CpuSegments
from specc.runtime.backends.cpu.step import CpuStep
from specc.runtime.backends.engine_cache import caches_of, make_cache, states_of
from specc.runtime.backends.held_weights import load_weights
from specc.runtime.backends.offload_budget import offload_of
from specc.runtime.backends.program_files import (
    MappedWeights,
    load_operators,
    read_json,
    read_self_draft,
    readable_weights,
)
from specc.runtime.execution.shared_runner import RepeatedRunner
from specc.system.allocator import keep_freed_memory


class CpuBackend(RuntimeBackend):
    """See `RuntimeBackend`."""

    def load(self, path: Path, manifest: Manifest, limits: LoadLimits) -> LoadedPrograms:
        """See `RuntimeBackend.load`."""
        cache = make_cache(manifest, limits)
        memory = manifest.memory_plan.values()
        reserve = max(entry.workspace + entry.logits for entry in memory)
        keep_freed_memory(reserve)
        operators = load_operators()
        pool = Pool(reserve)
        names = {model.name: manifest.weights_file(model, limits.rank) for model in manifest.models}
        files = {model: path / name for model, name in names.items()}
        sums = {model: manifest.files[name].crc32 for model, name in names.items()}
        weights = load_weights(files, limits, sums)
        target = manifest.models[0]
        models: dict[str, CpuProgram | CpuSegments] = {}
        for model in manifest.models:
            bound = readable_weights(model, target, weights), caches_of(model, cache)
            states = states_of(model, cache)
            if manifest.segments is not None and model is target:
                models[model.name] = _load_segments(
                    path, manifest, limits, *bound, pool, reserve, states
                )
            else:
                models[model.name] = CpuProgram(
                    read_json(path / model.program_file), *bound, pool, reserve, states
                )
        self_drafts = {
            entry.name: CpuProgram(
                read_self_draft(path, entry),
                weights[target.name],
                caches_of(target, cache),
                pool,
                reserve,
                states_of(target, cache),
            )
            for entry in manifest.self_drafts
        }
        programs = models | self_drafts
        steps, winners_steps = (
            {
                name: CpuStep(read_json(path / file), programs, pool)
                for name, file in files.items()
                if name not in limits.skips
            }
            for files in (manifest.step_files, manifest.winners_files)
        )
        return LoadedPrograms(
            dict(models),
            dict(steps),
            cache,
            operators,
            mapped_weights=tuple(w for w in weights.values() if isinstance(w, MappedWeights)),
            winners_steps=dict(winners_steps),
            self_drafts=dict(self_drafts),
            runner_type=RepeatedRunner,
            stored_weights=tuple(weights.values()),
        )


def _load_segments(
    path: Path,
    manifest: Manifest,
    limits: LoadLimits,
    weights: Mapping[str, Tensor],
    caches: Sequence[tuple[Tensor, Tensor]],
    pool: Pool,
    reserve: int,
    states: Sequence[tuple[Tensor, Tensor]],
) -> CpuSegments:
    """The target, of engines that have it as segments."""
    target, file = manifest.models[0], path / manifest.weights_file(manifest.models[0], limits.rank)
    model = SegmentedModel.read(path / target.segments_file)
    offload = offload_of(manifest, limits, model, file)
    return CpuSegments(model, weights, caches, offload, file, pool, reserve, states)


BACKEND = CpuBackend()
