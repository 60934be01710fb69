"""Bytes that were checked, under a path: what opens it gets these bytes and no others."""

from __future__ import annotations

import fcntl
import os
import tempfile


def sealed_copy(data: bytes, name: str) -> tuple[str, int]:
    """Put bytes where nobody can change them.

    Args:
        data: content.
        name: for people who look at the process's mappings.
    Returns:
        a path of this process, and the descriptor that keeps it: close it when nothing is going to
        open the path any more.
    Raises:
        OSError: no memory, or no room in the temporary directory.
    """
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        # another system, or one that lets nobody run code from such files: a file without a name
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            descriptor = os.dup(file.fileno())
        return f"/proc/self/fd/{descriptor}", descriptor
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return f"/proc/self/fd/{descriptor}", descriptor
