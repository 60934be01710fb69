"""Weights in memory-mapped files: nothing is read before it is used, and processes share it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specc.errors import EngineError


class MappedWeights(dict[str, Tensor]):
    """Tensors of a safetensors file, by key; they lie in the mapped file.

    Args:
        path: the file.
    Raises:
        EngineError: the file is absent or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                super().__init__((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
            self._descriptor = os.open(path, os.O_RDONLY)
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"{path}: {error}", "a safetensors file", "compile the engine again"
            ) from error
        weakref.finalize(self, os.close, self._descriptor)
        self._path = path
        self._num_bytes = os.fstat(self._descriptor).st_size

    def check(self) -> None:
        """Find out whether the file still holds what is mapped; a microsecond.

        Reading after the end of a mapped file kills the process, whatever cut it.

        Raises:
            EngineError: the file has become shorter.
        """
        size = os.fstat(self._descriptor).st_size
        if size < self._num_bytes:
            raise EngineError(
                f"{self._path} was cut to {size} bytes while the engine was using it",
                f"{self._num_bytes} bytes, unchanged while the engine runs",
                "copy the engine again; replace engines by renaming, never in place",
            )
