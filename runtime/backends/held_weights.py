"""Weights in memory of their own, in huge pages, in place of a mapped file.

Where a mapped file's pages are of 4 KB, which is so on most file systems and Linux kernels, a pass
reads its weights at half of the speed of memory. Nor does what is held change with the file. What
is mapped is shared by the processes that map it, and gives way where memory is short.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.safetensors_io import SafetensorsReader, read_exactly, tensor_bytes
from specc.errors import ConfigError, EngineError, ModelNotFoundError, WeightError
from specc.runtime.backends.base import LoadLimits
from specc.runtime.backends.offload_budget import free_bytes
from specc.runtime.backends.program_files import MappedWeights
from specc.system.huge_pages import are_huge_pages_given, huge_buffer

# a line of the caches: no row of a vector register lies in two
_ALIGNMENT = 64
# what has to stay free beside weights that nobody asked to hold
_SPARE_BYTES = 256 << 20


class HeldWeights(dict[str, Tensor]):
    """Tensors of a safetensors file, by key, in one buffer of huge pages.

    Args:
        path: the file.
    Raises:
        EngineError: the file is absent, cut, or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            with SafetensorsReader(path, reads_float8=True) as file, open(path, "rb", 0) as data:
                sizes = {key: file.place(key)[1] for key in file.keys()}  # noqa: SIM118
                buffer = huge_buffer(sum(map(_aligned, sizes.values())))
                begin = 0
                for key, size in sizes.items():
                    part = buffer[begin : begin + size]
                    cut = partial(_cut, path)
                    read_exactly(data, tensor_bytes(part), file.place(key)[0], cut)
                    self[key] = part.view(file.dtype(key)).view(file.shape(key))
                    begin += _aligned(size)
        except (OSError, ModelNotFoundError, WeightError) as error:
            found = str(error) if isinstance(error, OSError) else error.found
            raise EngineError(found, "a safetensors file", "compile the engine again") from error


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


def load_weights(files: Mapping[str, Path], limits: LoadLimits) -> dict[str, Mapping[str, Tensor]]:
    """Weights of models whose programs read them in every pass.

    Args:
        files: model → its file.
        limits: `mmap` says whether they stay in the mapped files; None: they do where nothing is
            gained, and where there is no room for them.
    Raises:
        EngineError: a file is absent or no safetensors file.
    """
    maps = limits.mmap
    if maps is None:
        maps = not (are_huge_pages_given() and _have_room(files, limits))
    return {name: (MappedWeights if maps else HeldWeights)(file) for name, file in files.items()}


def _have_room(files: Mapping[str, Path], limits: LoadLimits) -> bool:
    """Whether all weights fit into what is free, an eighth more, and some."""
    if limits.offload_weights is not None:
        return False
    free = free_bytes()
    # one that is absent is said by what loads it
    needed = sum(file.stat().st_size for file in files.values() if file.is_file())
    # the other ranks of this machine hold theirs, and none sees what the others are about to take
    return free is not None and limits.num_local * needed * 9 // 8 + _SPARE_BYTES <= free


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _cut(path: Path, reason: str) -> WeightError:
    return WeightError(f"{path}: {reason}", "a safetensors file", "compile the engine again")
