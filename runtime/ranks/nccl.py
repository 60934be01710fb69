"""How ranks that have a GPU each meet, over NCCL; `nccl_group.py` is what they have then.

A group is a backend object of torch's alone: torch.distributed itself is not initialized, so that a
program which uses it is not disturbed, and another engine can be loaded after this one.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from specc.errors import RankError
from specc.runtime.ranks.group import TIME_LIMIT_S
from specc.runtime.ranks.nccl_group import NcclRankGroup, first_line
from specc.runtime.ranks.nccl_stages import join_stages
from specc.runtime.ranks.rank_group import NCCL, Gathering, RankGroup
from specc.runtime.ranks.stage_groups import StagePlace

# ranks that hang are found by rank 0's watch, which names them; NCCL's own limit is a last resort
_LEAST_LIMIT_S = 300.0
_STORE = "/proc/{pid}/fd/{descriptor}"


class NcclGathering(Gathering):
    """Stands for a group over NCCL while rank 0 waits for the others, see `Gathering`.

    Args:
        address: `tcp://HOST:PORT` of rank 0, where ranks of several hosts meet; None: all are on
            this host, and meet in a file without a name.
        size: ranks.
        place: of rank 0, where the target has stages.
    """

    def __init__(self, address: str | None, size: int, place: StagePlace | None = None) -> None:
        self._descriptor = os.memfd_create("specc-nccl") if address is None else None
        if address is None:
            address = _STORE.format(pid=os.getpid(), descriptor=self._descriptor)
        self._address, self._place = address, place
        super().__init__(NCCL + address, size, self._meet)

    def _meet(self, timeout_s: float) -> RankGroup:
        group = join_nccl(self._address, 0, self.size, timeout_s, self._place)
        group.descriptor, self._descriptor = self._descriptor, None
        return group

    def close(self) -> None:
        """See `RankGroup.close`."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def join_nccl(
    address: str,
    rank: int,
    num_ranks: int,
    time_limit: float = TIME_LIMIT_S,
    place: StagePlace | None = None,
) -> NcclRankGroup:
    """Meet the other ranks; returns when all are there, with every kind of connection made.

    Args:
        address: `tcp://HOST:PORT` of rank 0, or a file that all ranks of this host can open.
        rank: of this process, 0 … num_ranks - 1.
        time_limit: seconds to meet.
        place: of this rank, where the target has stages: then it has groups and links of these.
    Raises:
        RankError: not all came in time, or torch has no NCCL.
    """
    import torch.distributed as dist

    limit = timedelta(seconds=max(time_limit, _LEAST_LIMIT_S))
    device = group_device()
    try:
        store: Any
        if address.startswith("tcp://"):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            store = dist.TCPStore(
                host.strip("[]"), int(port), num_ranks, is_master=rank == 0, timeout=limit
            )
        else:
            store = dist.FileStore(address, num_ranks)
            store.set_timeout(limit)

        def make(name: str, rank: int, count: int) -> Any:
            own = dist.PrefixStore(name, store) if name else store
            return make_processes(own, rank, count, limit, device)

        processes = make("", rank, num_ranks)
        if place is not None:
            return join_stages(place, NCCL + address, processes, make, device)
        return NcclRankGroup(rank, num_ranks, NCCL + address, processes, device)
    except (RuntimeError, ValueError, OSError) as error:
        raise RankError(
            f"rank {rank} of {num_ranks} did not meet the others at {address}: {first_line(error)}",
            f"all ranks at this address within {limit.total_seconds():g} s, and NCCL between their"
            " GPUs",
            "see what the other ranks wrote; NCCL_DEBUG=INFO makes NCCL say what it does",
        ) from error


def group_device() -> torch.device:
    """The GPU of this process, which `choose_gpu` has chosen."""
    return torch.device("cuda", torch.cuda.current_device())


def make_processes(
    store: Any, rank: int, num_ranks: int, limit: timedelta, device: torch.device
) -> Any:
    """Torch's backend object over NCCL.

    Raises:
        RankError: this torch has none.
    """
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise RankError(
            "a torch without NCCL", "a build of torch for CUDA, on Linux", "install one"
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, num_ranks, options)
