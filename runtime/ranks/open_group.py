"""The group of an engine's ranks, of whatever kind: made by rank 0, and opened by the others.

What only one kind needs is loaded for that kind: an engine on one host needs no network.
"""

from __future__ import annotations

from functools import partial

from specc.errors import FaultError
from specc.runtime.ranks.rank_group import NCCL, Copies, Gathering, RankGroup
from specc.runtime.ranks.stage_groups import StagePlace


def make_group(
    size: int,
    timeout_s: float,
    address: str | None = None,
    is_on_gpu: bool = False,
    place: StagePlace | None = None,
) -> RankGroup:
    """A group of ranks that share a cut model, as its rank 0; the operators' library is loaded.

    Args:
        size: ranks.
        timeout_s: that a rank waits for the others in a collective.
        address: where ranks of several hosts meet; None: all are on this host, and share memory.
        is_on_gpu: what they add up is in the memory of GPUs, one for each.
        place: of rank 0, where a target on GPUs has stages.
    Raises:
        RankError: no memory, or a torch that cannot.
    """
    if is_on_gpu:
        from specc.runtime.ranks.nccl import NcclGathering

        return NcclGathering(address, size, place)
    if address is not None:
        return Gathering(address, size, partial(_join, address, 0, size, timeout_s))
    from specc.runtime.ranks.group import SharedGroup

    return SharedGroup.create(size, timeout_s)


def open_group(
    ticket: str, rank: int, size: int, timeout_s: float, place: StagePlace | None = None
) -> RankGroup:
    """The group that rank 0 has made.

    Args:
        ticket: rank 0's.
        rank: of this process.
        size: ranks.
        timeout_s: see `make_group`.
        place: of this rank, where a target on GPUs has stages.
    Raises:
        FaultError: a group of a kind that is not known here.
        RankError: rank 0 is gone, or the group has another size.
    """
    if ticket == Copies.ticket:
        return Copies(rank, size)
    if ticket.startswith(NCCL):
        from specc.runtime.ranks.nccl import join_nccl

        return join_nccl(ticket.removeprefix(NCCL), rank, size, timeout_s, place)
    if ticket.startswith("tcp://"):
        return _join(ticket, rank, size, timeout_s, None)
    if not ticket.startswith("/proc/"):
        raise FaultError(
            f"a group {ticket!r}", "a group of this specc", "start all ranks with one installation"
        )
    from specc.runtime.ranks.group import SharedGroup

    return SharedGroup.open(ticket, rank, size)


def _join(address: str, rank: int, size: int, timeout_s: float, limit_s: float | None) -> RankGroup:
    # loaded nowhere else: engines on one host need no network
    from specc.runtime.ranks.sockets import join_sockets

    return join_sockets(address, rank, size, timeout_s, limit_s)
