"""The backend cpu: compiled programs and C++ operators of the engine, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from specc.artifact.manifest import Manifest
from specc.artifact.segments import SegmentedModel
from specc.runtime.backends.base import LoadedPrograms, LoadLimits, RuntimeBackend
from specc.runtime.backends.cpu.compiled_program import CompiledProgram
from specc.runtime.backends.cpu.compiled_segments import CompiledSegments
from specc.runtime.backends.cpu.compiled_step import CompiledStep
from specc.runtime.backends.engine_cache import caches_of, make_cache
from specc.runtime.backends.held_weights import load_weights
from specc.runtime.backends.offload_budget import offload_of
from specc.runtime.backends.program_files import (
    MappedWeights,
    load_operators,
    read_json,
    read_self_draft,
)
from specc.system.allocator import keep_freed_memory


class CpuBackend(RuntimeBackend):
    """See `RuntimeBackend`."""

    def load(self, path: Path, manifest: Manifest, limits: LoadLimits) -> LoadedPrograms:
        """See `RuntimeBackend.load`."""
        cache = make_cache(manifest, limits)
        memory = manifest.memory_plan.values()
        keep_freed_memory(max(entry.workspace + entry.logits for entry in memory))
        operators = load_operators(path, manifest)
        names = {model.name: manifest.weights_file(model, limits.rank) for model in manifest.models}
        files = {model: path / name for model, name in names.items()}
        sums = {model: manifest.files[name].crc32 for model, name in names.items()}
        weights = load_weights(files, limits, sums)
        target = manifest.models[0]
        models: dict[str, CompiledProgram | CompiledSegments] = {}
        for model in manifest.models:
            bound = weights[model.name], caches_of(model, cache)
            if manifest.segments is not None and model is target:
                models[model.name] = _load_segments(path, manifest, limits, *bound)
            else:
                models[model.name] = CompiledProgram(
                    read_json(path / model.program_file),
                    path / model.package_file,
                    *bound,
                    manifest.files[model.package_file].sha256,
                )
        self_drafts = {
            entry.name: CompiledProgram(
                read_self_draft(path, entry),
                path / entry.package_file,
                weights[target.name],
                caches_of(target, cache),
                manifest.files[entry.package_file].sha256,
            )
            for entry in manifest.self_drafts
        }
        programs = models | self_drafts
        steps, winners_steps = (
            {
                name: CompiledStep(read_json(path / file), programs)
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
        )


def _load_segments(
    path: Path,
    manifest: Manifest,
    limits: LoadLimits,
    weights: Mapping[str, Tensor],
    caches: Sequence[tuple[Tensor, Tensor]],
) -> CompiledSegments:
    """The target, of engines that have it as segments."""
    target, file = manifest.models[0], path / manifest.weights_file(manifest.models[0], limits.rank)
    model = SegmentedModel.read(path / target.segments_file)
    packages = [
        (path / name, manifest.files[name].sha256)
        for name in map(target.segment_package, range(len(model.kinds)))
    ]
    offload = offload_of(manifest, limits, model, file)
    return CompiledSegments(model, packages, weights, caches, offload, file)


BACKEND = CpuBackend()
