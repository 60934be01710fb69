"""Latency tables of engines on this machine: what was measured once, later loads read.

Seconds of passes hold for an engine, a machine, a number of threads, and how weights are held. So
a table that `specc serve` has measured is kept in specc's cache under a name of all of these. A
profile of `specc tune` brings a table of the machine that it ran on: it is taken where that is this
machine, and where nothing else is known.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specc.artifact.manifest import MANIFEST_FILE
from specc.cost.latency_table import SCHEMA_VERSION, LatencyTable
from specc.errors import SpeccError
from specc.system.kept_file import KeptFile
from specc.system.machine import cpu_model, isa_flags, num_usable_cores
from specc.version import __version__

if TYPE_CHECKING:
    from specc.runtime.scheduling.kv_cache import KVCache

_log = logging.getLogger(__name__)


class LoadedEngine(Protocol):
    """Of an `Engine`, which looks for its table while it is loaded."""

    directory: Path | None
    profile: Mapping[str, Any]
    backend: str
    cache: KVCache
    loaded_with: Mapping[str, Any]


class KeptLatency:
    """The table of an engine, as it was loaded, on this machine.

    Args:
        engine: loaded; one that was made by hand has no table.
    """

    def __init__(self, engine: LoadedEngine) -> None:
        self._engine = engine
        self._file = None
        if engine.directory is not None:
            self._file = KeptFile(_name_of(engine), "an engine's passes", _log.warning)

    @property
    def place(self) -> str:
        """Where it is kept, for people; empty of an engine that was made by hand."""
        return "" if self._file is None else str(self._file.path)

    def find(self) -> dict[str, Any] | None:
        """The table of this machine, as JSON: a profile's, or what was measured here earlier."""
        profiled = self._engine.profile.get("latency")
        if profiled is not None and is_of_here(profiled, self._engine):
            return dict(profiled)
        found = None if self._file is None else self._file.read()
        if found is None:
            return None
        try:
            LatencyTable.from_json(found)
        except SpeccError as error:
            _log.warning("the latency table %s is not read: %s", self.place, error.found)
            return None
        return dict(found)

    def write(self, table: LatencyTable) -> None:
        """Keep a table; a cache that cannot be written is a warning."""
        if self._file is not None:
            self._file.write(table.to_json())


def with_kept_latency(engine: LoadedEngine) -> Mapping[str, Any]:
    """An engine's profile, with the latency table of this machine, where one is known."""
    table = KeptLatency(engine).find()
    return engine.profile if table is None else {**engine.profile, "latency": table}


def is_of_here(table: Mapping[str, Any], engine: LoadedEngine) -> bool:
    """Whether a table was measured on a machine like this, with as many cores and threads."""
    about = table.get("about")
    machine = about.get("machine") if isinstance(about, Mapping) else None
    if not isinstance(about, Mapping) or not isinstance(machine, Mapping):
        return False
    # tables of earlier versions do not say their threads
    threads = about.get("threads", torch.get_num_threads())
    return (
        machine.get("cpu") == cpu_model()
        and machine.get("usable_cores") == num_usable_cores()
        and about.get("backend") == engine.backend
        and about.get("device", "cpu") == device_name(engine)
        and threads == torch.get_num_threads()
    )


def device_name(engine: LoadedEngine) -> str:
    """What an engine's programs run on: the name of a GPU, or `cpu`."""
    device = engine.cache.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _name_of(engine: LoadedEngine) -> str:
    """In the cache: the machine's name for people, then a digest of all that a table holds for."""
    assert engine.directory is not None
    device = device_name(engine)
    machine = cpu_model() if device == "cpu" else device
    conditions = [
        SCHEMA_VERSION,
        __version__,
        str(torch.__version__),
        # with it, the hashes of all programs and weights
        hashlib.sha256((engine.directory / MANIFEST_FILE).read_bytes()).hexdigest(),
        device,
        cpu_model(),
        num_usable_cores(),
        isa_flags(),
        torch.get_num_threads(),
        engine.backend,
        engine.cache.shape.max_num_seqs,
        engine.cache.shape.num_blocks,
        sorted(engine.loaded_with.items()),
    ]
    digest = hashlib.sha256(json.dumps(conditions, default=str).encode()).hexdigest()[:24]
    return f"latency/{re.sub('[^A-Za-z0-9]+', '-', machine)[:60]}-{digest}.json"
