"""An engine with random weights, put together in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specc.artifact.in_memory import BenchPrograms
from specc.errors import EngineError

# importing this registers the operators that programs call
from specc.kernels import ops as _ops  # noqa: F401
from specc.runtime.backends.captured.captured_runner import CapturedRunner
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.device_link import DeviceLink
from specc.runtime.backends.captured.step_binder import StepBinder
from specc.runtime.backends.captured.step_buffers import StepBuffers
from specc.runtime.backends.cuda import choose_launches
from specc.runtime.backends.cuda.backend import choose_on_gpu
from specc.runtime.backends.cuda.step_rows import step_rows
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.engine_cache import (
    caches_of,
    slab_shapes,
    state_shapes,
    states_of,
)
from specc.runtime.backends.graph_device import GraphDevice
from specc.runtime.engine import Engine
from specc.runtime.execution.batch_rows import last_tokens_of
from specc.runtime.scheduling.kv_cache import CacheShape, KVCache
from specc.runtime.scheduling.state_slabs import StateSizes, StateSlabs
from specc.speculation.plans import replay_rows
from specc.system.files import format_bytes


def check_memory(programs: BenchPrograms, extra: int, free: int) -> None:
    """Refuse what does not fit, before anything is allocated.

    Args:
        extra: bytes that a benchmark takes beside them.
        free: bytes of the device.
    Raises:
        EngineError: more is needed than is free.
    """
    needed = programs.memory_bytes + extra
    if needed > free:
        parts = ", ".join(
            f"{model.entry.source} {format_bytes(model.memory.total)}" for model in programs.models
        )
        raise EngineError(
            f"{format_bytes(free)} of memory free on the device",
            f"{format_bytes(needed)}: {parts}, and {format_bytes(extra)} to measure with",
            "choose smaller shapes, a smaller --batch-size or --context, or free memory",
        )


def make_states(programs: BenchPrograms, device: torch.device) -> StateSlabs | None:
    """States of the full batch, and none of prefixes; None where no layer keeps some."""
    shapes = state_shapes(programs.models[0].entry)
    sizes = StateSizes(programs.limits.max_batch_size, replay_rows(programs.plans))
    return StateSlabs(shapes, sizes, device) if shapes else None


def make_engine(
    programs: BenchPrograms,
    weights: Mapping[str, Mapping[str, Tensor]],
    graphs: GraphDevice,
    backend: str,
) -> Engine:
    """Bind programs to weights and caches; steps are captured for the full batch.

    Args:
        programs: target, and draft where the plans speculate.
        weights: model name → key → tensor, on the device.
        backend: what the report calls it.
    """
    limits = programs.limits
    shape = CacheShape(
        limits.max_seq_len, limits.max_nodes, limits.block_size, limits.max_batch_size
    )
    specs = {model.entry.name: slab_shapes(model.entry) for model in programs.models}
    states = make_states(programs, graphs.device)
    cache = KVCache(shape, specs, getattr(torch, programs.dtype), graphs.device, states=states)
    models = {
        model.entry.name: ModelProgram(
            model.program,
            weights[model.entry.name],
            caches_of(model.entry, cache),
            graphs.device,
            states=states_of(model.entry, cache),
        )
        for model in programs.models
    }
    target_name = programs.models[0].entry.name
    for name, model in models.items():
        draft = None if name == target_name else name
        choose_on_gpu([model], graphs, step_rows(programs.plans, draft, limits.max_batch_size))
    depth = max(plan.max_depth for plan in programs.plans)
    buffers = StepBuffers(
        graphs,
        limits.max_batch_size,
        shape.blocks_per_sequence,
        2 + depth + 1 + len(models) - 1,
        num_last=last_tokens_of(programs.plans),
        has_states=states is not None,
    )
    buckets = (limits.max_batch_size,)
    steps = {
        name: CapturedStep(
            StepBinder(step, models, cache.environment, buffers, graphs),
            buckets,
            skips_filters=True,
        )
        for name, step in programs.steps.items()
    }
    if choose_launches.can_launch_dependent(graphs.device):
        choose_launches.choose_launches(steps, cache, graphs)
    target, *drafts = models.values()
    return Engine(
        target=target,
        drafts=list(drafts),
        steps=dict(steps),
        cache=cache,
        default_plan=programs.plans[0].name,
        prefill_chunk=limits.prefill_chunk,
        vocab_size=programs.models[0].entry.vocab_size,
        position_limit=limits.max_seq_len,
        backend=backend,
        link=DeviceLink(graphs),
        runner_type=CapturedRunner,
    )
