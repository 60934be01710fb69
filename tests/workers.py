"""How many processes of pytest `make test` starts: as many as the machine has cores and memory for.

    python -P tests/workers.py

Two at least, for what waits for others; eight at most, as each of them collects all tests first.
"""

from __future__ import annotations

from specc.system.machine import memory_bytes, num_usable_cores

LEAST, MOST = 2, 8
# of one worker with the processes that its tests start; 2.7 GB were seen at most
BYTES = 3 << 30


def num_workers(cores: int, memory: int | None) -> int:
    """Workers for so many cores and bytes; memory that nobody tells is enough."""
    room = MOST if memory is None else memory // BYTES
    return max(LEAST, min(cores, room, MOST))


if __name__ == "__main__":
    print(num_workers(num_usable_cores(), memory_bytes()))
