"""What the runtime asks of a backend, and what it gets: the programs of an engine, ready to run.

What is known of a backend without loading it is in `specc/artifact/backends.py`. A backend is a
package of its name in this folder, whose module `backend` has a `BACKEND`; nothing imports that
before an engine needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specc.artifact.manifest import Manifest
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.device_models import DeviceRanks
from specc.runtime.backends.program_files import MappedWeights, StoredWeights
from specc.runtime.backends.step import Model, Step
from specc.runtime.execution.draws import BegunModel, DrawnPrograms
from specc.runtime.execution.link import HostLink, Link
from specc.runtime.runner import Runner
from specc.runtime.scheduling.kv_cache import KVCache


@dataclass(frozen=True)
class LoadLimits:
    """What an engine may take here; None leaves it to the engine, or to the backend.

    Args:
        max_num_seqs: sequences that run together.
        kv_cache_tokens: rows of the cache, for all sequences together.
        capture: what capturing graphs may cost, for backends that capture.
        rank: whose part of the models that are cut is loaded.
        ranks: of backends that capture, what joins this process to the others; None: it is alone.
        offload_weights: bytes that weights of the target may take in memory, of each rank: others
            are read from their file in every pass; `auto` is what is free. None: all of them.
        mmap: weights stay in the mapped files, True, or are held in memory, False, see
            `choose_mmap`; of backends that hold them.
        num_local: ranks of this machine, which share what is free.
        overlaps: of backends that capture, steps draft for one half of their sequences while they
            verify the other half, see `check_overlap`.
        skips: of other backends, plans whose steps are not loaded.
        replay_rows: of each sequence's states, where the plans of the manifest do not say it: a
            rank that follows has none.
    """

    max_num_seqs: int | None = None
    kv_cache_tokens: int | None = None
    capture: CaptureLimits | None = None
    rank: int = 0
    ranks: DeviceRanks | None = None
    offload_weights: int | str | None = None
    num_local: int = 1
    mmap: bool | None = None
    overlaps: bool = False
    skips: frozenset[str] = frozenset()
    replay_rows: int | None = None


@dataclass(frozen=True)
class LoadedPrograms:
    """An engine's programs, bound to weights and caches.

    Args:
        models: name → program, in the order of the manifest: the target, draft_0, …
        steps: plan name → step.
        cache: that all programs are bound to.
        operators: namespace of the `specc::` operators for calls between steps.
        link: to the device that the programs run on.
        mapped_weights: files that the programs read while they run.
        winners_steps: plan name → the step whose acceptance reads `winners` of the target instead
            of logits, where the engine has one.
        drawn: for batches whose tokens the target draws; None where it cannot.
        staged: the target, where it has stages.
        self_drafts: name → second program of the target, as passes between steps call it.
        runner_type: what runs batches of these steps.
        stored_weights: files that weights are in, or were read from, where programs on the host
            read these at addresses that stay.
    """

    models: dict[str, Model]
    steps: dict[str, Step]
    cache: KVCache
    operators: Any = torch.ops.specc
    link: Link = field(default_factory=HostLink)
    mapped_weights: tuple[MappedWeights, ...] = ()
    winners_steps: dict[str, Step] = field(default_factory=dict)
    drawn: DrawnPrograms | None = None
    staged: BegunModel | None = None
    self_drafts: dict[str, Model] = field(default_factory=dict)
    runner_type: type[Runner] = Runner
    stored_weights: tuple[StoredWeights, ...] = ()


class RuntimeBackend(ABC):
    """Loads engines; what it loads is run by `Runner`, for which `Step` says what it can do."""

    @abstractmethod
    def load(self, path: Path, manifest: Manifest, limits: LoadLimits) -> LoadedPrograms:
        """Bind the programs of an engine to its weights and to a cache.

        Args:
            path: the engine directory.
            manifest: its manifest, which was compared with this machine and installation.
            limits: of what the engine may take.
        Raises:
            EngineError: a file is absent, altered or malformed; a package or a device is missing;
                or there is not enough memory.
            ConfigError: limits that the engine does not allow.
        """

    def take_device(self, local_rank: int, num_local: int) -> None:  # noqa: B027  host: nothing
        """Choose what this process runs on, before anything is loaded or allocated.

        Args:
            local_rank: of this process, among the ranks of this machine.
            num_local: ranks of the engine on this machine.
        Raises:
            ConfigError: the machine has too few devices.
        """
