"""This process's rank in a group of ranks that have a GPU each, over NCCL.

Its collectives are queued on the current stream, and captured with it: a graph of a step holds
them as nodes. Sums are NCCL's: the same bits on every rank, but not in the order of ranks, and of
half types rounded at every addition.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from specc.errors import RankError
from specc.kernels.reference.ranks import LockstepGroup, use_group

# until a communicator that nobody needs any more is left to the end of the process
CLOSE_S = 5.0


class NcclRankGroup:
    """This process's rank in a group over NCCL, see `RankGroup`; `join_nccl` makes it.

    Args:
        processes: torch's backend object.
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
        f"a collective of rank {rank} failed: {first_line(error)}",
        "all ranks at work",
        "start the ranks again",
    )


def first_line(error: Exception) -> str:
    """Of what torch says."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
