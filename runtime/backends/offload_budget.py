"""How much memory weights may take where some of them stay in their file."""

from __future__ import annotations

from pathlib import Path

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.directory import available_memory_bytes
from specc.artifact.manifest import Manifest
from specc.artifact.offload import OffloadPlan, plan_offload, read_pieces
from specc.artifact.segments import SegmentedModel
from specc.errors import ConfigError
from specc.runtime.backends.base import LoadLimits
from specc.system.machine import cgroup_memory_bytes

# of what is free: the rest is for what no plan counts, such as Python, torch and the allocator
_SHARE = 0.9


def least_of(offload_weights: int | str | None) -> int | None:
    """Bytes that weights take at least by `LoadLimits.offload_weights`; None: all of them."""
    return 0 if offload_weights == "auto" else offload_weights  # type: ignore[return-value]


def check_offload(manifest: Manifest, backend: str, offload_weights: int | str | None) -> None:
    """Refuse what cannot be, before anything is loaded.

    Raises:
        ConfigError: a backend that keeps weights in memory, an engine without segments, or one
            whose drafts are programs of the target.
    """
    if offload_weights is None:
        return
    found = "--offload-weights"
    if not facts_of(backend).offloads_weights:
        takers = [name for name in backend_names() if facts_of(name).offloads_weights]
        raise ConfigError(
            f"{found} with backend {backend}",
            f"backend {' or '.join(takers)}, whose programs read weights from files",
            f"leave it out, or compile with --backend {takers[0]} --segments",
        )
    if manifest.segments is None:
        raise ConfigError(
            f"{found} of an engine whose target is one program",
            "an engine of segments",
            "compile it with --segments",
        )
    if manifest.self_drafts:
        names = ", ".join(draft.name for draft in manifest.self_drafts)
        raise ConfigError(
            f"{found} of an engine whose target drafts, too ({names})",
            "drafts with weights of their own, or lookups: a draft would read the target's each"
            " time",
            "compile with another --draft, or leave --offload-weights out",
        )


def offload_of(
    manifest: Manifest, limits: LoadLimits, model: SegmentedModel, file: Path
) -> OffloadPlan | None:
    """What a rank keeps of the target's weights; None: they are mapped, and the system decides.

    Args:
        manifest: of the engine.
        limits: of what it may take.
        model: segments of the target.
        file: of the rank's weights.
    Raises:
        ConfigError: the budget is below two buffers of the largest segments.
    """
    if limits.offload_weights is None:
        return None
    budget = limits.offload_weights
    if isinstance(budget, str):
        budget = _free_bytes(manifest, limits)
    return plan_offload(*read_pieces(model, file), budget)


def _free_bytes(manifest: Manifest, limits: LoadLimits) -> int:
    """What is free for weights of one rank, when all else that the engine plans is taken."""
    known = (available_memory_bytes(), cgroup_memory_bytes())
    free = min((value for value in known if value is not None), default=None)
    if free is None:
        raise ConfigError(
            "--offload-weights auto, where the system does not tell what is free",
            "a number of bytes",
            "pass one, such as --offload-weights 4GB",
        )
    sizes = (limits.max_num_seqs, limits.kv_cache_tokens)
    others = manifest.memory_of(range(limits.num_local), *sizes, weights_budget=0)
    return max(0, int(_SHARE * free) - others) // limits.num_local
