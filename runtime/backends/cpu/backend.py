"""The backend cpu: compiled programs and C++ operators of the engine, on the host."""

from __future__ import annotations

from pathlib import Path

from specc.artifact.manifest import Manifest
from specc.runtime.backends.base import LoadedPrograms, LoadLimits, RuntimeBackend
from specc.runtime.backends.cpu.compiled_program import CompiledProgram
from specc.runtime.backends.cpu.compiled_step import CompiledStep
from specc.runtime.backends.engine_cache import caches_of, make_cache
from specc.runtime.backends.program_files import (
    MappedWeights,
    load_operators,
    read_json,
    read_self_draft,
)


class CpuBackend(RuntimeBackend):
    """See `RuntimeBackend`."""

    def load(self, path: Path, manifest: Manifest, limits: LoadLimits) -> LoadedPrograms:
        """See `RuntimeBackend.load`."""
        cache = make_cache(manifest, limits)
        operators = load_operators(path, manifest)
        weights = {
            model.name: MappedWeights(path / manifest.weights_file(model, limits.rank))
            for model in manifest.models
        }
        models = {
            model.name: CompiledProgram(
                read_json(path / model.program_file),
                path / model.package_file,
                weights[model.name],
                caches_of(model, cache),
                manifest.files[model.package_file].sha256,
            )
            for model in manifest.models
        }
        target = manifest.models[0]
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
            mapped_weights=tuple(weights.values()),
            winners_steps=dict(winners_steps),
            self_drafts=dict(self_drafts),
        )


BACKEND = CpuBackend()
