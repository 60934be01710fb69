"""Whether this machine has cores and memory for the ranks that are to run on it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from specc.artifact.directory import available_memory_bytes
from specc.artifact.manifest import Manifest
from specc.errors import ConfigError, EngineError
from specc.runtime.backends.base import LoadLimits
from specc.runtime.backends.held_weights import choose_mmap
from specc.runtime.ranks.rank_options import RankOptions
from specc.system.files import format_bytes
from specc.system.machine import num_usable_cores


def check_cores(num_local: int, options: RankOptions) -> None:
    """Ranks wait for each other in every layer: two on one core wait for its scheduler, too.

    Args:
        num_local: ranks on this machine.
        options: `oversubscribes` lets them be more than there are cores.
    Raises:
        ConfigError: there are more ranks than cores that this process may use.
    """
    cores = num_usable_cores()
    if num_local > cores and not options.oversubscribes:
        raise ConfigError(
            f"{num_local} ranks on this machine, and {cores}"
            f" {'core' if cores == 1 else 'cores'} that this process may use",
            "a core for each rank, as long as oversubscribes is off",
            "use more cores or more machines, or let ranks share cores, which is slow"
            " (--oversubscribe, oversubscribes=True)",
        )


def check_memory(
    manifest: Manifest,
    ranks: Collection[int],
    max_num_seqs: int | None,
    kv_cache_tokens: int | None = None,
    available: int | None = None,
    weights_budget: int | None = None,
) -> None:
    """Compare what all ranks of this machine take together with what is free, before any loads.

    Args:
        manifest: of the engine; copies of a whole one can map the same files, and are not counted.
        ranks: on this machine.
        max_num_seqs: sequences that caches are made for; None is what the engine allows.
        kv_cache_tokens: rows of all sequences together; None is what the engine has.
        available: bytes; None asks the system, where it tells.
        weights_budget: bytes that weights of the target may take on each rank; None is all.
    Raises:
        EngineError: it is not enough.
    """
    if available is None:
        available = available_memory_bytes()
    if manifest.parallel is None or available is None:
        return
    sizes = max_num_seqs, kv_cache_tokens, weights_budget
    needed = manifest.memory_of(ranks, *sizes)
    if needed > available:
        limits = manifest.limits
        raise EngineError(
            f"{format_bytes(available)} of memory available",
            f"{format_bytes(needed)} for {len(ranks)} of {manifest.num_ranks} ranks on this"
            f" machine{_by_stage(manifest, ranks, sizes)}, max_batch_size"
            f" {max_num_seqs or limits.max_batch_size} and max_seq_len {limits.max_seq_len}",
            "spread the ranks over more machines, compile with a smaller --max-batch-size or"
            " --max-seq-len, or free memory",
        )


def mmap_of_ranks(
    path: Path, manifest: Manifest, ranks: Collection[int], limits: LoadLimits
) -> bool:
    """Whether the ranks of this machine leave weights in the mapped files: all, or none of them.

    Args:
        manifest: of the engine; of a whole one each rank would hold a copy.
        ranks: on this machine.
    Raises:
        EngineError: weights shall be held, and there is no room.
    """
    files = [path / manifest.weights_file(m, rank) for rank in ranks for m in manifest.models]
    return choose_mmap(files, limits)


def _by_stage(
    manifest: Manifest, ranks: Collection[int], sizes: tuple[int | None, int | None, int | None]
) -> str:
    """What ranks of each stage take here: stages are not alike, and another order may fit."""
    if manifest.parallel is None or not manifest.stages:
        return ""
    own: dict[int, list[int]] = {}
    for rank in ranks:
        own.setdefault(manifest.parallel.stage_of(rank), []).append(rank)
    parts = [
        f"stage {stage}: {format_bytes(manifest.memory_of(those, *sizes))}"
        for stage, those in own.items()
    ]
    return f" ({', '.join(parts)})"


def threads_of_rank(num_local: int) -> int:
    """Threads of each rank: more than there are cores would wait for each other.

    Args:
        num_local: ranks on this machine.
    """
    return min(torch.get_num_threads(), max(1, num_usable_cores() // num_local))
