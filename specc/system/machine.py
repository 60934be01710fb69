"""Facts about this machine that a figure must be read with, and the threads that it offers."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

from specc.errors import ConfigError

# what -march=native may use of a processor, by the names of /proc/cpuinfo
_ISA_FLAGS = re.compile(
    r"(sse|ssse|avx|amx|fma|f16c|bmi|abm|movbe|aes|vaes|pclmul|vpclmul|gfni|sha_ni|adx|popcnt"
    r"|asimd|sve|bf16|i8mm|fphp|neon)"
)


def describe_machine() -> dict[str, Any]:
    """CPU, cores, memory and platform, for JSON."""
    import platform

    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": num_usable_cores(),
        "memory_bytes": memory_bytes(),
        "platform": platform.platform(),
    }


def cpu_model() -> str:
    """Marketing name of the CPU, else its architecture."""
    text = read_text("/proc/cpuinfo")
    for key in ("model name", "Model", "cpu model"):
        match = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
        if match:
            return match[1]
    import platform

    return platform.processor() or platform.machine()


@functools.cache
def isa_flags() -> tuple[str, ...]:
    """Instruction sets that compiled code may use here, sorted; empty where none is known."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    flags = match[1].split() if match else []
    return tuple(sorted({flag for flag in flags if _ISA_FLAGS.match(flag)}))


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cgroup_memory_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that the limit of this process's group leaves; None: there is no limit.

    Pages of files that nobody maps give way, and do not count.

    Args:
        root: where the system shows groups, of version 2.
    """
    text = read_text("/proc/self/cgroup")
    match = re.search(r"^0::/(.*)$", text, re.MULTILINE)
    group, found = root / (match[1] if match else ""), []
    for place in (group, *group.parents):
        if not place.is_relative_to(root):
            break
        limit, used = (
            read_text(str(place / "memory.max")),
            read_text(str(place / "memory.current")),
        )
        if limit.strip().isdigit() and used.strip().isdigit():
            inactive = re.search(
                r"^inactive_file (\d+)$", read_text(str(place / "memory.stat")), re.MULTILINE
            )
            found.append(int(limit) - int(used) + (int(inactive[1]) if inactive else 0))
    return max(0, min(found)) if found else None


def memory_bytes() -> int | None:
    match = re.search(r"^MemTotal:\s+(\d+) kB", read_text("/proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def check_threads(num_threads: int | None, name: str = "--threads") -> None:
    """Accept None (leave torch alone) and what the machine has.

    Raises:
        ConfigError: no thread, or more threads than cores that this process may use.
    """
    cores = num_usable_cores()
    if num_threads is not None and not 1 <= num_threads <= cores:
        raise ConfigError(
            f"{name} {num_threads}",
            f"1 … {cores}: this process may use {cores} {'core' if cores == 1 else 'cores'}",
            f"choose a number in this range, or leave {name} out",
        )


def read_text(path: str) -> str:
    """Text of a file of the system; empty where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
