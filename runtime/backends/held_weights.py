"""Weights in memory of their own, in huge pages, in place of a mapped file.

Where a mapped file's pages are of 4 KB, which is so on most file systems and Linux kernels, a pass
reads its weights at half of the speed of memory. Nor does what is held change with the file. What
is mapped is shared by the processes that map it, and gives way where memory is short.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.block_sums import read_in_blocks
from specc.artifact.safetensors_io import SafetensorsReader, tensor_bytes
from specc.errors import ConfigError, EngineError, ModelNotFoundError, WeightError
from specc.runtime.backends.base import LoadLimits
from specc.runtime.backends.offload_budget import free_bytes
from specc.runtime.backends.program_files import MappedWeights, StoredWeights
from specc.system.dropped_pages import drop_pages
from specc.system.files import format_bytes
from specc.system.huge_pages import are_huge_pages_given, huge_buffer

# a line of the caches: no row of a vector register lies in two
_ALIGNMENT = 64
# what has to stay free beside weights that nobody asked to hold
_SPARE_BYTES = 256 << 20


class HeldWeights(StoredWeights):
    """Tensors of a safetensors file, by key, in one buffer of huge pages.

    Args:
        crc32: `BlockSums.hex` of it, compared while it is read; empty where nobody knows.
    Raises:
        EngineError: the file is absent, cut, no safetensors file, or was altered.
    """

    def __init__(self, path: Path, crc32: str = "") -> None:
        try:
            super().__init__(path, crc32)
            with SafetensorsReader(path, reads_float8=True) as file:
                places = {key: file.place(key) for key in file.keys()}  # noqa: SIM118
                buffer = huge_buffer(sum(_aligned(size) for _, size in places.values()))
                self._buffer, begin = buffer, 0
                self._places: list[tuple[int, Tensor]] = []
                for key, (offset, size) in places.items():
                    part = buffer[begin : begin + size]
                    self._places.append((offset, part))
                    self[key] = part.view(file.dtype(key)).view(file.shape(key))
                    begin += _aligned(size)
            self._places.sort(key=lambda item: item[0])
            self._read(path)
        except (OSError, ModelNotFoundError, WeightError) as error:
            found = str(error) if isinstance(error, OSError) else error.found
            raise EngineError(found, "a safetensors file", "compile the engine again") from error

    def drop(self) -> int:
        """See `StoredWeights`."""
        return drop_pages([self._buffer])

    def restore(self) -> None:
        """See `StoredWeights`."""
        self._read(self._opened)

    def _read(self, path: Path) -> None:
        parts = [(offset, tensor_bytes(part)) for offset, part in self._places]
        read_in_blocks(path, self._crc32, parts)


def check_mmap(backend: str, mmap: bool | None, offload_weights: int | str | None) -> None:
    """Refuse what says nothing to a backend, before anything is loaded.

    Raises:
        ConfigError: a backend that has no choice, or weights that shall not be in memory at all.
    """
    if mmap is None:
        return
    found = "--mmap" if mmap else "--no-mmap"
    if not facts_of(backend).holds_weights:
        takers = [name for name in backend_names() if facts_of(name).holds_weights]
        raise ConfigError(
            f"{found} with backend {backend}",
            f"backend {' or '.join(takers)}, which reads weights from memory of its own or from"
            " mapped files",
            "leave it out",
        )
    if offload_weights is not None and not mmap:
        raise ConfigError(
            f"{found} with --offload-weights",
            "one of them: weights are all in memory, or some of them are read in every pass",
            "leave one out",
        )


def load_weights(
    files: Mapping[str, Path], limits: LoadLimits, sums: Mapping[str, str] | None = None
) -> dict[str, MappedWeights | HeldWeights]:
    """Weights of models whose programs read them in every pass.

    Args:
        files: model → its file.
        limits: see `choose_mmap`.
        sums: model → `BlockSums.hex` of its file, where somebody knows.
    Raises:
        EngineError: a file is absent, no safetensors file, or was altered; or there is no room.
    """
    with _one_at_a_time(files.values()):
        kind = MappedWeights if choose_mmap(files.values(), limits) else HeldWeights
        return {name: kind(file, (sums or {}).get(name, "")) for name, file in files.items()}


def choose_mmap(files: Iterable[Path], limits: LoadLimits) -> bool:
    """Whether weights stay in the mapped files.

    Args:
        files: of all that is about to be read here; twice where two processes read it.
        limits: `mmap` is what was asked for; None: they stay where nothing is gained, and where
            there is no room for them.
    Raises:
        EngineError: they shall not stay there, and there is no room.
    """
    if limits.mmap or limits.offload_weights is not None:
        return True
    # one that is absent is said by what loads it
    needed, free = sum(file.stat().st_size for file in files if file.is_file()), free_bytes()
    if limits.mmap is None:
        has_room = free is not None and needed * 9 // 8 + _SPARE_BYTES <= free
        return not (are_huge_pages_given() and has_room)
    if free is not None and needed > free:
        raise EngineError(
            f"weights of {format_bytes(needed)} with --no-mmap, and {format_bytes(free)} free",
            "memory for all of them",
            "leave --no-mmap out, or free some memory",
        )
    return False


@contextlib.contextmanager
def _one_at_a_time(files: Iterable[Path]) -> Iterator[None]:
    """Of several processes that load an engine, each sees what those before it have taken."""
    with contextlib.ExitStack() as stack:
        # where files cannot be locked, or are not there, nobody waits
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(next(iter(files)), "rb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
