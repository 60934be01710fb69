"""What Linux says of the memory of this process."""

from __future__ import annotations

import re
from pathlib import Path


def mapping_flags(address: int) -> list[str]:
    """`VmFlags` of the mapping that an address of this process lies in; `hg`: huge pages asked."""
    is_in = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if first := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(part, 16) for part in first.groups())
            is_in = low <= address < high
        elif is_in and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:x}")
