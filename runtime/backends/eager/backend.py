"""The backend eager: the graphs of any engine, on the host."""

from __future__ import annotations

from pathlib import Path

from specc.artifact.manifest import Manifest
from specc.runtime.backends.base import LoadedPrograms, LoadLimits, RuntimeBackend
from specc.runtime.backends.eager.program import ModelProgram, SegmentedProgram
from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.backends.engine_cache import caches_of, make_cache, states_of
from specc.runtime.backends.program_files import (
    map_weights,
    read_json,
    read_self_draft,
    readable_weights,
)
from specc.runtime.execution.shared_runner import SharedRunner


class EagerBackend(RuntimeBackend):
    """See `RuntimeBackend`."""

    def load(self, path: Path, manifest: Manifest, limits: LoadLimits) -> LoadedPrograms:
        """See `RuntimeBackend.load`."""
        cache = make_cache(manifest, limits)
        weights = {
            model.name: map_weights(path, manifest, manifest.weights_file(model, limits.rank))
            for model in manifest.models
        }
        target = manifest.models[0]
        models: dict[str, ModelProgram | SegmentedProgram] = {}
        for model in manifest.models:
            bound = readable_weights(model, target, weights), caches_of(model, cache)
            states = states_of(model, cache)
            if manifest.segments is not None and model is target:
                models[model.name] = SegmentedProgram.load(
                    path / model.segments_file, *bound, rehearses=True, states=states
                )
            else:
                models[model.name] = ModelProgram(
                    read_json(path / model.program_file), *bound, rehearses=True, states=states
                )
        self_drafts = {
            entry.name: ModelProgram(
                read_self_draft(path, entry),
                weights[target.name],
                caches_of(target, cache),
                rehearses=True,
                states=states_of(target, cache),
            )
            for entry in manifest.self_drafts
        }
        programs = {**models, **self_drafts}
        steps, winners_steps = (
            {
                name: EagerStep(read_json(path / file), programs)
                for name, file in files.items()
                if name not in limits.skips
            }
            for files in (manifest.step_files, manifest.winners_files)
        )
        return LoadedPrograms(
            dict(models),
            dict(steps),
            cache,
            mapped_weights=tuple(weights.values()),
            winners_steps=dict(winners_steps),
            self_drafts=dict(self_drafts),
            runner_type=SharedRunner,
            stored_weights=tuple(weights.values()),
        )


BACKEND = EagerBackend()
