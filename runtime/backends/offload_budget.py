"""Memory budget of offloaded weights: how many bytes stay resident."""

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

# share of free memory to use: the rest is for Python, torch and the allocator
_SHARE = 0.9


def least_of(offload_weights: int | str | None) -> int | None:
    """Least bytes of resident weights under `LoadLimits.offload_weights`; None: no offload."""
    return 0 if offload_weights == "auto" else offload_weights  # type: ignore[return-value]


def check_offload(manifest: Manifest, backend: str, offload_weights: int | str | None) -> None:
    """Check that an engine supports `--offload-weights`, before anything is loaded.

    Raises:
        ConfigError: the backend does not offload, the engine has stages or no segments, or its
            drafts run the target's programs or read its hidden states.
    """
    if offload_weights is None:
        return
    found, facts = "--offload-weights", facts_of(backend)
    if not facts.offloads_weights:
        takers = [name for name in backend_names() if facts_of(name).offloads_weights]
        raise ConfigError(
            f"{found} with backend {backend}",
            f"backend {' or '.join(takers)}, whose programs can do without some of the weights",
            f"leave it out, or compile with --backend {takers[0]} --segments",
        )
    if facts.is_on_gpu and manifest.parallel is not None:
        raise ConfigError(
            f"{found} of an engine of {manifest.num_ranks} ranks on GPUs",
            "an engine of one rank: what follows orders would copy weights, too, which nothing has"
            " shown",
            "leave it out, or compile for one rank",
        )
    if manifest.stages:
        raise ConfigError(
            f"{found} of an engine in {len(manifest.stages)} stages",
            "an engine of segments: a stage is one program, whose weights stay in memory",
            "leave it out, or compile with --segments in place of --pipeline-parallel-size",
        )
    if facts.offloads_weights == "segments" and manifest.segments is None:
        raise ConfigError(
            f"{found} of an engine whose target is one program",
            "an engine of segments",
            "compile it with --segments",
        )
    if manifest.self_drafts:
        names = ", ".join(draft.name for draft in manifest.self_drafts)
        raise ConfigError(
            f"{found} of an engine whose target drafts, too ({names})",
            "drafts with weights of their own, or lookups: each level of a draft would read the"
            " target's weights once more, so that a step takes as long as the tokens it may bring",
            "compile with another --draft, or leave --offload-weights out",
        )
    if heads := [model.name for model in manifest.models if model.reads_hidden]:
        raise ConfigError(
            f"{found} of an engine whose draft reads the target's hidden states"
            f" ({', '.join(heads)})",
            "drafts that read tokens alone: no target that keeps hidden states has been run so",
            "compile with another --draft, or leave --offload-weights out",
        )


def offload_of(
    manifest: Manifest, limits: LoadLimits, model: SegmentedModel, file: Path
) -> OffloadPlan | None:
    """Weights of the target that a rank keeps resident; None: all are mapped, without a budget.

    Raises:
        ConfigError: the budget is below two buffers of the largest segments.
    """
    budget = offload_bytes(manifest, limits)
    return None if budget is None else plan_offload(*read_pieces(model, file), budget)


def offload_bytes(manifest: Manifest, limits: LoadLimits) -> int | None:
    """Resolve `LoadLimits.offload_weights` to bytes by the free memory; None: no offload.

    Args:
        manifest: of all ranks, whose memory plans add up.
    Raises:
        ConfigError: see `budget_of`.
    """
    if limits.offload_weights is None:
        return None
    return budget_of(manifest, limits, free_bytes())


def free_bytes() -> int | None:
    """Memory available to this process; None if unknown."""
    known = (available_memory_bytes(), cgroup_memory_bytes())
    return min((value for value in known if value is not None), default=None)


def budget_of(manifest: Manifest, limits: LoadLimits, free: int | None) -> int:
    """Bytes of the target's weights that may be resident on each rank.

    Args:
        limits: bytes, or `auto`: free memory minus everything else in the memory plan.
        free: bytes available before loading to all ranks of this machine; None if unknown.
    Raises:
        ConfigError: `auto`, and the free memory is unknown.
    """
    budget = limits.offload_weights
    if isinstance(budget, int):
        return budget
    if free is None:
        raise ConfigError(
            "--offload-weights auto, where the system does not tell what is free",
            "a number of bytes",
            "pass one, such as --offload-weights 4GB",
        )
    sizes = (limits.max_num_seqs, limits.kv_cache_tokens)
    others = manifest.memory_of(range(limits.num_local), *sizes, weights_budget=0)
    return max(0, int(_SHARE * free) - others) // limits.num_local
