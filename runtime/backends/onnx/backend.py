"""Programs of an engine on onnxruntime: sessions for the models, the step's own operators here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.manifest import Manifest, ModelEntry
from specc.runtime.backends.onnx.program import OnnxProgram, load_onnx
from specc.runtime.backends.program import StepProgram, read_json
from specc.runtime.backends.rectangular.head_major import place_commits
from specc.runtime.scheduling.kv_cache import KVCache

LayerCaches = Sequence[tuple[Tensor, Tensor]]


def load_onnx_programs(
    path: Path,
    manifest: Manifest,
    cache: KVCache,
    caches_of: Callable[[ModelEntry], LayerCaches],
    operators: Any = torch.ops.specc,
) -> tuple[dict[str, OnnxProgram], dict[str, OnnxStep]]:
    """Models and steps of an engine.

    Args:
        path: the engine directory.
        manifest: its manifest.
        cache: heads before rows.
        caches_of: a model's layers' k and v caches, as they are now.
        operators: namespace of the `specc::` operators that run here.
    Raises:
        EngineError: a file is absent, or onnxruntime cannot run it.
    """
    rows = cache.rows
    assert rows is not None, "rectangles have caches of their own"

    def load(model: ModelEntry) -> OnnxProgram:
        def grow(num_slots: int) -> tuple[int, LayerCaches]:
            return cache.reserve(num_slots), caches_of(model)

        is_short = cache.length < rows.total
        return load_onnx(path, model, caches_of(model), rows, grow if is_short else None)

    models = {model.name: load(model) for model in manifest.models}

    def adapt(graph: fx.GraphModule) -> None:
        place_commits(graph, rows, operators)
        _use(graph, operators)

    steps = {
        plan.name: OnnxStep(read_json(path / plan.file), models, adapt, cache)
        for plan in manifest.plans
    }
    return models, steps


class OnnxStep(StepProgram):
    """A step that has rows for its tree before it begins.

    Args:
        program: content of `steps/<plan>.json`.
        models: name → program, for the stages' calls.
        adapt: called with each stage's graph, which it may change.
        cache: of the models.
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
        """See `StepProgram.run`."""
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
