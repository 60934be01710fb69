"""Which is the last of several programs to be done with what they share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# counters that are made at a time
_FEWEST = 4096
# (device, address of the memory that launches share, number) → counters
_kept: dict[tuple[torch.device, int, int], Tensor] = {}


def counters(shared: Tensor, count: int) -> Tensor:
    """At least `count` int32 zeros that every launch leaves zeros: none has to write them first.

    Launches over the memory of one tensor, say a cache, run one after another, so they can have
    the same. They are made at the first launch of a size, which is before a capture, and are kept:
    graphs know their address.

    Args:
        shared: whose memory tells launches that may run at the same time apart.
        count: counters that the launch needs.
    """
    if shared.device.type == "meta":
        return torch.empty(count, dtype=torch.int32, device=shared.device)
    size = max(_FEWEST, triton.next_power_of_2(count))
    key = (shared.device, shared.untyped_storage().data_ptr(), size)
    if key not in _kept:
        # not part of what is being recorded or traced
        with _disable_current_modes(), torch.inference_mode(False):
            _kept[key] = torch.zeros(size, dtype=torch.int32, device=shared.device)
    return _kept[key]


@triton.jit
def is_last(p_arrived, num_programs):
    """Whether all others have come here before; what they stored before that is then visible.

    The barrier orders the stores of a program's threads before the addition, which one of them
    makes: it releases them, and acquires those of all that added before, whatever multiprocessor
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
