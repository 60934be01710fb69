"""A rank that rank 0 has started: `python -P -m specc.runtime.ranks RANK PID ORDERS SIGNS`.

PID is rank 0, ORDERS and SIGNS are descriptors of connections to it. Before anything slow is
imported, the process sees to it that it does not outlive rank 0.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends, however that happens; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # it may have ended before that
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    rank, leader, orders, signs = map(int, sys.argv[1:])
    die_with(leader)
    from specc.runtime.ranks.follower import follow_descriptors

    sys.exit(follow_descriptors(rank, orders, signs))
