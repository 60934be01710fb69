"""A group of ranks that have a GPU each, over NCCL.

Its collectives are queued on the current stream, and captured with it: a graph of a step holds
them as nodes. Sums are NCCL's: the same bits on every rank, but not in the order of ranks, and of
half types rounded at every addition. Nothing else of specc imports torch.distributed for GPUs.

The group is a backend object of torch's alone: torch.distributed itself is not initialized, so
that a program which uses it is not disturbed, and another engine can be loaded after this one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor

from specc.errors import RankError
from specc.kernels.reference.ranks import LockstepGroup, use_group
from specc.runtime.ranks.group import TIME_LIMIT_S
from specc.runtime.ranks.rank_group import NCCL, Gathering, RankGroup
from specc.runtime.ranks.stage_groups import StagePlace

# ranks that hang are found by rank 0's watch, which names them; NCCL's own limit is a last resort
_LEAST_LIMIT_S = 300.0
# until a communicator that nobody needs any more is left to the end of the process
CLOSE_S = 5.0
_STORE = "/proc/{pid}/fd/{descriptor}"


class NcclRankGroup:
    """This process's rank in a group over NCCL, see `RankGroup`; `join_nccl` makes it.

    Args:
        rank: of this process.
        num_ranks: of the group.
        ticket: what the others join.
        processes: torch's backend object.
        device: that tensors are on.
    """

    # whether collectives of programs are its own; else it is a part of another one
    is_of_programs: ClassVar[bool] = True

    def __init__(
        self, rank: int, num_ranks: int, ticket: str, processes: Any, device: torch.device
    ) -> None:
        self.rank = rank
        self.size = num_ranks
        self.ticket = ticket
        self.position = 0
        # of the file that ranks of this host meet in; torch looks into it later on, too
        self.descriptor: int | None = None
        self._pid = os.getpid()
        self._processes = processes
        # what aborts, by whichever thread it was asked for; all of them are waited for at the end
        self._aborting: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._warm_up(device)
        if self.is_of_programs:
            use_group(self)
            atexit.register(self.close)

    def gather(self, logits: Tensor) -> Tensor:
        """See `RankGroup.gather`; as an operator, which a capture sees."""
        return torch.ops.specc.gather_rows(logits)

    def best(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """See `RankGroup.best`."""
        return torch.ops.specc.best_of_ranks(scores, tokens)

    def add(self, values: Tensor) -> Tensor:
        """See `RankGroup.add`."""
        return torch.ops.specc.all_reduce(values)

    def abort(self, reason: str) -> None:
        """Wake all ranks that wait in a collective: they end without a result."""
        with self._lock:
            if self._processes is not None:
                self._aborting.append(in_background(self._processes.abort))

    def close(self) -> None:
        """Leave the group. More than once is once, and each waits until the group is left.

        The thread that watches the ranks may be about to do so while the main thread exits.
        """
        if self._pid != os.getpid():
            atexit.unregister(self.close)
            return
        with self._lock:
            if self._processes is not None:
                if self.is_of_programs:
                    use_group(None)
                if self.descriptor is not None:
                    os.close(self.descriptor)
                # In a thread: it waits for graphs that hold collectives, which may live as long as
                # the process. That thread has the last reference, so that what torch does when it
                # destroys the object is over, too, when the thread is.
                self._aborting.append(in_background(self._processes.abort))
                self._processes = None
        end_s = time.monotonic() + CLOSE_S
        for thread in self._aborting:
            # one that outlives the interpreter, within torch, may end the process with SIGABRT
            thread.join(max(end_s - time.monotonic(), 0.0))
        atexit.unregister(self.close)

    # what follows is `Ranks`, of which this process is one

    def all_reduce(self, xs: Sequence[Tensor]) -> list[Tensor]:
        (x,) = xs
        out = x.clone(memory_format=torch.contiguous_format)
        self._reduce(out)
        return [out]

    def gather_rows(self, xs: Sequence[Tensor]) -> list[Tensor]:
        (x,) = xs
        rows, columns = x.shape
        if x.numel() == 0:
            return [x.new_empty(rows, columns * self.size if self.rank == 0 else 0)]
        out = x.new_empty(self.size * rows, columns)
        self._collect(out, x.contiguous())
        if self.rank > 0:
            return [x.new_empty(rows, 0)]
        parts = out.view(self.size, rows, columns)
        return [parts.transpose(0, 1).reshape(rows, self.size * columns)]

    def from_first(self, xs: Sequence[Tensor]) -> list[Tensor]:
        (x,) = xs
        out = x.clone(memory_format=torch.contiguous_format)
        self._send(out)
        return [out]

    def best_of_ranks(self, scores: Sequence[Tensor], tokens: Sequence[Tensor]) -> list[Tensor]:
        (score,), (token,) = scores, tokens
        found = []
        for x in (score, token):
            out = x.new_empty(self.size, x.numel())
            self._collect(out, x.flatten())
            found.append([part.view(x.shape) for part in out])
        return LockstepGroup(self.size).best_of_ranks(*found)[:1]

    def _reduce(self, x: Tensor) -> None:
        import torch.distributed as dist

        options = dist.AllreduceOptions()
        options.asyncOp = False
        self._wait(self._processes.allreduce, [x], options)

    def _collect(self, out: Tensor, x: Tensor) -> None:
        from torch.distributed.distributed_c10d import AllgatherOptions

        options = AllgatherOptions()
        options.asyncOp = False
        # torch has no public name for it
        self._wait(self._processes._allgather_base, out, x, options)

    def _send(self, x: Tensor) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        self._wait(self._processes.broadcast, [x], options)

    def _wait(self, start: Callable[..., Any], *arguments: Any) -> None:
        """Queue a collective; on a GPU it is the stream that waits."""
        self.position += 1
        try:
            work = start(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise _lost(self.rank, error) from error

    def _warm_up(self, device: torch.device) -> None:
        """Each kind once: connections are made at a first call, which cannot be captured."""
        x = torch.zeros(self.size, device=device)
        self._reduce(x)
        self._send(x)
        self._collect(x, x[:1].clone())
        if device.type == "cuda":
            torch.cuda.synchronize(device)


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
        num_ranks: of the engine.
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
            from specc.runtime.ranks.nccl_stages import join_stages

            return join_stages(place, NCCL + address, processes, make, device)
        return NcclRankGroup(rank, num_ranks, NCCL + address, processes, device)
    except (RuntimeError, ValueError, OSError) as error:
        raise RankError(
            f"rank {rank} of {num_ranks} did not meet the others at {address}:"
            f" {_first_line(error)}",
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


def in_background(run: Callable[[], object]) -> threading.Thread:
    """Run it in a thread; that it fails is for nobody."""

    def quietly() -> None:
        # of a group that is given up nobody needs to know more
        with contextlib.suppress(RuntimeError):
            run()

    thread = threading.Thread(target=quietly, name="specc-nccl-abort", daemon=True)
    thread.start()
    return thread


def _lost(rank: int, error: Exception) -> RankError:
    return RankError(
        f"a collective of rank {rank} failed: {_first_line(error)}",
        "all ranks at work",
        "start the ranks again",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
