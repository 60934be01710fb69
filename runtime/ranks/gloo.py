"""A group of ranks on several hosts, over gloo.

Only what calls `join_gloo` imports torch.distributed. The collectives are the same as those of
ranks that share memory, sums included, bit for bit; a call of one costs some hundred microseconds
(docs/sharding.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from specc.errors import RankError
from specc.kernels import ranks
from specc.runtime.ranks.group import TIME_LIMIT_S, SharedGroup


class GlooRankGroup(SharedGroup):
    """This process's rank in a group over gloo; `join_gloo` makes it.

    What `states` knows of others is what came with their last message.

    Args:
        rank: of this process.
        num_ranks: of the group.
        ticket: the address that all ranks join at.
        processes: the process group, which closing this one destroys.
    """

    def __init__(self, rank: int, num_ranks: int, ticket: str, processes: Any) -> None:
        super().__init__(rank, num_ranks, ticket, None)
        self._processes = processes

    def close(self) -> None:
        """Leave the group: others that wait for this rank fail. More than once is once."""
        super().close()
        if self._processes is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self._processes)
            self._processes = None


def join_gloo(
    address: str, rank: int, num_ranks: int, time_limit: float = TIME_LIMIT_S
) -> GlooRankGroup:
    """Meet the other ranks at an address; returns when all are there.

    A process that has torch.distributed running already, with as many ranks, gets a group of gloo
    beside what it has; all of its ranks have to call this then.

    Args:
        address: `tcp://HOST:PORT` of rank 0, or `env://` for MASTER_ADDR and MASTER_PORT, as
            torchrun sets them. Which network gloo takes is for GLOO_SOCKET_IFNAME to say.
        rank: of this process, 0 … num_ranks - 1.
        num_ranks: of the engine.
        time_limit: seconds to meet, and to wait for the others in a collective.
    Raises:
        RankError: not all came in time, torch has no gloo, or this process has a group.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise RankError(
            "a torch without gloo", "torch.distributed with gloo", "install another build of torch"
        )
    limit = timedelta(seconds=time_limit)
    try:
        if dist.is_initialized():
            processes = dist.new_group(backend="gloo", timeout=limit)
        else:
            where: dict[str, Any] = {"init_method": address}
            if address.startswith("tcp://"):
                where = {"store": _store(address, rank, limit)}
            dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=limit, **where)
            processes = dist.group.WORLD
    except (RuntimeError, ValueError, OSError) as error:
        raise RankError(
            f"rank {rank} of {num_ranks} did not meet the others at {address}:"
            f" {str(error).strip().splitlines()[0]}",
            f"all ranks at this address within {time_limit:g} s",
            "see that rank 0 runs and that its host and port can be reached",
        ) from error
    assert processes is not None
    try:
        if (processes.rank(), processes.size()) != (rank, num_ranks):
            raise RankError(
                f"torch.distributed with rank {processes.rank()} of {processes.size()}",
                f"rank {rank} of {num_ranks}",
                "start as many processes as the engine has ranks",
            )
        ranks.open_gloo(processes.group_name, time_limit)
    except BaseException:
        dist.destroy_process_group(processes)
        raise
    return GlooRankGroup(rank, num_ranks, address, processes)


def join_all(address: str, rank: int, num_ranks: int, limit: timedelta) -> None:
    """Meet all ranks of an engine, of which `new_processes` makes groups.

    Args:
        address: `tcp://HOST:PORT` of rank 0.
        rank: of this process.
        num_ranks: of the engine.
        limit: to meet.
    Raises:
        RankError: not all came in time, or torch has no gloo.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise RankError(
            "a torch without gloo", "torch.distributed with gloo", "install another build of torch"
        )
    try:
        store = _store(address, rank, limit)
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=limit, store=store)
    except (RuntimeError, ValueError, OSError) as error:
        raise RankError(
            f"rank {rank} of {num_ranks} did not meet the others at {address}:"
            f" {str(error).strip().splitlines()[0]}",
            f"all ranks at this address within {limit.total_seconds():g} s",
            "see that rank 0 runs and that its host and port can be reached",
        ) from error


def new_processes(members: Sequence[int], limit: timedelta) -> str:
    """Name of a new process group of some ranks, after `join_all`; all ranks have to call it."""
    import torch.distributed as dist

    made: Any = dist.new_group(sorted(members), timeout=limit, backend="gloo")
    return "" if made == dist.GroupMember.NON_GROUP_MEMBER else made.group_name


def leave_all() -> None:
    """Let go of what `join_all` has joined, and of its groups."""
    import torch.distributed as dist

    dist.destroy_process_group()


def _store(address: str, rank: int, limit: timedelta) -> Any:
    """The store at rank 0's address.

    torch would make it of `tcp://`, too, but under torchrun it takes every address for that of the
    launcher's own store, and starts none.
    """
    import torch.distributed as dist

    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return dist.TCPStore(
        host.strip("[]"),
        int(port),
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
    )
