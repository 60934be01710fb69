"""Whether this installation can run what is compiled for the CPU."""

from __future__ import annotations

from specc.errors import SpeccError
from specc.kernels.library_files import library_path


def missing_library() -> SpeccError | None:
    """Why this process has no library of CPU operators; None where it has one."""
    try:
        library_path()
    except SpeccError as error:
        return error
    return None
