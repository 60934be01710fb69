"""Who is the last of several programs to be done with what they share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last(p_arrived, num_programs):
    """Whether all others have come here before; what they stored before that is then visible.

    The barrier orders the stores of a program's threads before the addition, which one of them
    makes: it releases them, and acquires those of all who added before, whatever multiprocessor
    they ran on. The second barrier hands that on to the other threads. The counter is 0 again
    afterwards, so that a replay of the launch finds it as the first one did.

    Nobody waits for anybody, so programs may run in any order and one at a time, as an interpreter
    runs them: the last to come finds the work of all.
    """
    tl.debug_barrier()
    before = tl.atomic_add(p_arrived, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if before == num_programs - 1:
        tl.atomic_xchg(p_arrived, 0, sem="relaxed", scope="gpu")
    return before == num_programs - 1
