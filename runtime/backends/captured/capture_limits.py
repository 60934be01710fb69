"""What capturing graphs may cost while an engine loads, and whether the engine fits at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specc.artifact.manifest import Manifest
from specc.errors import ConfigError, EngineError
from specc.runtime.backends.captured.graph_device import GraphDevice
from specc.system.files import format_bytes


@dataclass(frozen=True)
class CaptureLimits:
    """What capturing graphs while an engine loads may cost; the rest is captured at first use.

    Args:
        max_seconds: of capturing. A step runs once before its capture, and what that takes to
            compile kernels is not counted: it would be needed without graphs, too. Below 0
            nothing is captured while the engine loads.
        max_bytes: of the device's memory; weights, caches and the memory of a pass come first.
        sizes: batch sizes to capture, ascending; None is powers of two up to the largest batch.
    Raises:
        ConfigError: no sizes, or sizes that do not ascend from 1 on.
    """

    max_seconds: float = 30.0
    max_bytes: int = 4 << 30
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = self.sizes
        if sizes is not None and (not sizes or list(sizes) != sorted({*sizes}) or sizes[0] < 1):
            raise ConfigError(
                f"capture sizes {list(sizes)}",
                "batch sizes that ascend, each at least 1",
                "for example 1, 2, 4, 8",
            )

    @classmethod
    def lazy(cls) -> CaptureLimits:
        """Nothing while the engine loads: for a few steps of few batch sizes."""
        return cls(max_seconds=-1.0)

    def buckets(self, max_batch: int) -> tuple[int, ...]:
        """Batch sizes that get graphs; the last one is `max_batch`."""
        if self.sizes is None:
            powers = (1 << i for i in range(max_batch.bit_length()))
            return tuple(dict.fromkeys([*(size for size in powers if size < max_batch), max_batch]))
        return (*(size for size in self.sizes if size < max_batch), max_batch)


def fit_device(
    manifest: Manifest,
    graphs: GraphDevice,
    limits: CaptureLimits,
    max_num_seqs: int | None = None,
    kv_cache_tokens: int | None = None,
    weights_budget: int | None = None,
) -> CaptureLimits:
    """Compare an engine's memory plan with what is free, before anything is allocated.

    Args:
        manifest: of the engine.
        graphs: the device.
        limits: of capturing.
        max_num_seqs: sequences that caches are made for; None is what the engine allows.
        kv_cache_tokens: rows of all sequences together; None is the worst case of each.
        weights_budget: bytes that weights of the target take; None is all of them.
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
    if weights_budget is not None:
        whole = manifest.memory_plan[manifest.models[0].name].weights
        weights -= max(0, whole - weights_budget)
    rows = manifest.limits.cache_rows(num_seqs, kv_cache_tokens)
    caches = sum(entry.cache for entry in plan) * rows // manifest.limits.cache_rows()
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
