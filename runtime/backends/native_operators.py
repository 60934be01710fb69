"""The C++ operators that an engine brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specc.artifact.manifest import Manifest
from specc.kernels import native


def load_operators(path: Path, manifest: Manifest) -> Any:
    """Namespace of the `specc::` operators on the host: the engine's own, where it has a library.

    Args:
        path: the engine directory.
        manifest: its manifest.
    Raises:
        EngineError: the library is absent or was altered, or does not load.
    """
    if manifest.native is None:
        return torch.ops.specc
    library = manifest.native.library
    native.load(path / library, manifest.files[library].sha256)
    return torch.ops.specc_cpu
