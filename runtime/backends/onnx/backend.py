"""The backend onnx: sessions of onnxruntime for the models, the step's own operators here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from specc.artifact.block_sums import read_in_blocks
from specc.artifact.manifest import Manifest
from specc.artifact.model_entry import ModelEntry
from specc.runtime.backends.base import LoadedPrograms, LoadLimits, RuntimeBackend
from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.backends.engine_cache import LayerCaches, caches_of, make_cache, rows_of
from specc.runtime.backends.onnx.program import OnnxProgram, can_grow, load_onnx
from specc.runtime.backends.padded.hnd_commit import place_commits
from specc.runtime.backends.program_files import load_operators, read_json
from specc.runtime.scheduling.kv_cache import KVCache


class OnnxBackend(RuntimeBackend):
    """See `RuntimeBackend`."""

    def load(self, path: Path, manifest: Manifest, limits: LoadLimits) -> LoadedPrograms:
        """See `RuntimeBackend.load`."""
        rows = rows_of(manifest)
        assert rows is not None, "the manifest was validated"
        cache = make_cache(manifest, limits, rows=rows, grows=can_grow())
        operators = load_operators()
        for name in manifest.weights_files:
            # onnxruntime maps them
            if crc32 := manifest.files[name].crc32:
                read_in_blocks(path / name, crc32)
        models = {model.name: _load_model(path, model, cache) for model in manifest.models}

        def adapt(graph: fx.GraphModule) -> None:
            place_commits(graph, rows, operators)
            _use(graph, operators)

        steps = {
            plan.name: OnnxStep(read_json(path / plan.file), models, adapt, cache)
            for plan in manifest.plans
        }
        # rows of a padded batch are as long as each other: nothing else goes with them
        return LoadedPrograms(dict(models), dict(steps), cache, operators)


BACKEND = OnnxBackend()


def _load_model(path: Path, model: ModelEntry, cache: KVCache) -> OnnxProgram:
    def grow(num_slots: int) -> tuple[int, LayerCaches]:
        return cache.reserve(num_slots), caches_of(model, cache)

    assert cache.rows is not None, "padded batches have caches of their own"
    is_short = cache.length < cache.rows.total
    return load_onnx(path, model, caches_of(model, cache), cache.rows, grow if is_short else None)


class OnnxStep(EagerStep):
    """A step that has rows for its tree before it begins.

    Args:
        program: content of `steps/<plan>.json`.
        models: name → program, for the stages' calls.
        adapt: called with each stage's graph, which it may change.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        models: Mapping[str, OnnxProgram],
        adapt: Callable[[fx.GraphModule], object],
        cache: KVCache,
    ) -> None:
        super().__init__(program, models, adapt)
        self._cache = cache

    def run(self, environment: dict[str, Tensor]) -> dict[str, float]:
        """See `EagerStep.run`."""
        self._cache.reserve(int(environment["cache_len"].max()) + self.plan.num_rows)
        # slabs that were replaced are replaced here, too
        environment.update(self._cache.environment)
        return super().run(environment)


def _use(graph: fx.GraphModule, operators: Any) -> None:
    """Let a stage call the operators of this namespace."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "specc":
            packet = getattr(operators, node.target._schema.name.removeprefix("specc::"))
            node.target = getattr(packet, node.target._overloadname)
    graph.recompile()
