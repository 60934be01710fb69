"""Whether an engine fits into the memory of a device, and what is left for captured graphs."""

from __future__ import annotations

from dataclasses import replace

from specc.artifact.manifest import Manifest
from specc.errors import EngineError
from specc.runtime.backends.captured.graph_device import GraphDevice
from specc.runtime.backends.cuda.backend import CaptureLimits
from specc.system.files import format_bytes


def fit_device(
    manifest: Manifest,
    graphs: GraphDevice,
    limits: CaptureLimits,
    max_num_seqs: int | None = None,
    kv_cache_tokens: int | None = None,
) -> CaptureLimits:
    """Compare an engine's memory plan with what is free, before anything is allocated.

    Args:
        manifest: of the engine.
        graphs: the device.
        limits: of capturing.
        max_num_seqs: sequences that caches are made for; None is what the engine allows.
        kv_cache_tokens: rows of all sequences together; None is the worst case of each.
    Returns:
        the limits, with graphs held to what weights, caches and passes leave free: a step that
        gets no graph while the engine loads runs all the same.
    Raises:
        EngineError: weights, caches and the values of a pass need more than there is.
    """
    free = graphs.free_bytes()
    plan = manifest.memory_plan.values()
    most = manifest.limits.max_batch_size
    num_seqs = min(max_num_seqs or most, most)
    weights = sum(entry.weights for entry in plan)
    caches = sum(entry.cache for entry in plan) * num_seqs // most
    if kv_cache_tokens is not None:
        rows = num_seqs * (manifest.limits.max_seq_len + manifest.limits.max_nodes)
        caches = caches * min(kv_cache_tokens, rows) // rows
    passes = sum(entry.logits + entry.workspace for entry in plan)
    needed = weights + caches + passes
    if needed > free:
        raise EngineError(
            f"{format_bytes(free)} of memory free on {graphs.device}",
            f"{format_bytes(needed)}: weights {format_bytes(weights)}, caches"
            f" {format_bytes(caches)} for {num_seqs} sequences of"
            f" {manifest.limits.max_seq_len} tokens, passes {format_bytes(passes)}",
            "lower max_num_seqs, compile with a smaller --max-batch-size or --max-seq-len, or end"
            " what else uses the GPU",
        )
    return replace(limits, max_bytes=min(limits.max_bytes, free - needed))
