"""A backend in one file: graphs run by torch, each pass of the target counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specc.artifact.backends import BackendFacts
from specc.artifact.manifest import Manifest
from specc.runtime.backends.base import LoadedPrograms, LoadLimits, RuntimeBackend
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.backends.engine_cache import caches_of, make_cache
from specc.runtime.backends.program_files import MappedWeights, read_json

FACTS = BackendFacts("counted", ("float32",), "cpu", "flat")


class CountedProgram(ModelProgram):
    """A model's graph that knows how often it ran."""

    num_passes = 0

    def forward(self, *inputs: Any) -> Any:
        self.num_passes += 1
        return super().forward(*inputs)


class CountedBackend(RuntimeBackend):
    """See `RuntimeBackend`; keeps the limits that it was asked for."""

    def __init__(self) -> None:
        self.limits: LoadLimits | None = None

    def load(self, path: Path, manifest: Manifest, limits: LoadLimits) -> LoadedPrograms:
        self.limits = limits
        cache = make_cache(manifest, limits)
        models = {
            model.name: CountedProgram(
                read_json(path / model.program_file),
                MappedWeights(path / model.weights_file),
                caches_of(model, cache),
            )
            for model in manifest.models
        }
        steps = {
            plan.name: EagerStep(read_json(path / plan.file), models) for plan in manifest.plans
        }
        return LoadedPrograms(dict(models), dict(steps), cache)
