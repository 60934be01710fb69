"""Processes that are the ranks of a group: each is forked, opens the group, and runs a function.

The functions are those of a test file; what they return or raise comes back to the test. The
library of the operators is loaded before.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from multiprocessing.connection import Connection
from typing import Any

import torch

from specc.kernels import ranks
from specc.runtime.ranks.group import TIME_LIMIT_S, SharedGroup

_FORK = multiprocessing.get_context("fork")
# of a test as a whole: what hangs is a failure, not a wait
PATIENCE_S = 30.0


class RankProcesses:
    """Ranks that run `body(group, *arguments)`.

    Args:
        transport: `shared` or `sockets`.
        options: of `SharedGroup.create` and `join_sockets`.
    """

    def __init__(
        self,
        num_ranks: int,
        body: Callable[..., Any],
        *arguments: Any,
        transport: str = "shared",
        **options: Any,
    ) -> None:
        self.processes: list[Any] = []
        self._ends: list[Connection] = []
        options.setdefault("time_limit", PATIENCE_S)
        tickets = [_FORK.Pipe() for _ in range(num_ranks)]
        pairs = connected_pairs(num_ranks) if transport == "sockets" else {}
        for rank in range(num_ranks):
            mine, theirs = _FORK.Pipe()
            process = _FORK.Process(
                target=_run,
                args=(pairs, rank, tickets, theirs, body, arguments, options),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(mine)
        for one in pairs.values():
            one.close()

    def result(self, rank: int, patience: float = PATIENCE_S) -> Any:
        """What the rank returned; its exception is raised."""
        if not self._ends[rank].poll(patience):
            raise AssertionError(f"rank {rank} said nothing for {patience} s")
        value = self._ends[rank].recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def results(self) -> list[Any]:
        return [self.result(rank) for rank in range(len(self.processes))]

    def errors(self, ranks: list[int] | None = None) -> list[str]:
        """Texts of the exceptions in which these ranks end."""
        texts = []
        for rank in range(len(self.processes)) if ranks is None else ranks:
            try:
                value = self.result(rank)
            except Exception as error:
                texts.append(str(error))
            else:
                raise AssertionError(f"rank {rank} returned {value!r}")
        return texts

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self) -> None:
        """Kill those that are left, stopped ones too."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            assert not process.is_alive()


@contextmanager
def rank_processes(*arguments: Any, **options: Any) -> Iterator[RankProcesses]:
    """See `RankProcesses`; nothing is left of them."""
    started = RankProcesses(*arguments, **options)
    try:
        yield started
    finally:
        started.end()


def run_ranks(*arguments: Any, **options: Any) -> list[Any]:
    """What each rank's body returns."""
    with rank_processes(*arguments, **options) as started:
        return started.results()


def timed_error(function: Callable[..., Any], *arguments: Any) -> tuple[str, float]:
    """Text of what a call raises, and the seconds until it does."""
    begin = time.monotonic()
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("no error")


def connected_pairs(num_ranks: int) -> dict[tuple[int, int], socket.socket]:
    """Rank and rank of the other end → a connection over TCP, of each two ranks."""
    found = {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for first, second in combinations(range(num_ranks), 2):
            found[second, first] = socket.create_connection(listener.getsockname())
            found[first, second] = listener.accept()[0]
    return found


def _run(
    pairs: dict[tuple[int, int], socket.socket],
    rank: int,
    tickets: list[tuple[Any, Any]],
    answer: Any,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    try:
        group = _open(pairs, rank, tickets, options)
        try:
            value = body(group, *arguments)
        finally:
            group.close()
    except BaseException as error:
        value = error if isinstance(error, Exception) else AssertionError(repr(error))
    answer.send(value)
    answer.close()


def _open(
    pairs: dict[tuple[int, int], socket.socket],
    rank: int,
    tickets: list[tuple[Any, Any]],
    options: dict[str, Any],
) -> SharedGroup:
    num_ranks = len(tickets)
    if pairs:
        for (of, _), one in pairs.items():
            if of != rank:
                one.close()
        sockets = [pairs[rank, r].detach() if r != rank else -1 for r in range(num_ranks)]
        ranks.open_sockets(sockets, rank, options.get("time_limit", TIME_LIMIT_S))
        return SharedGroup(rank, num_ranks, "", None)
    if rank == 0:
        group = SharedGroup.create(num_ranks, **options)
        for _, theirs in tickets[1:]:
            theirs.send(group.ticket)
    else:
        group = SharedGroup.open(tickets[rank][0].recv(), rank, num_ranks)
    group.wait_for_all(PATIENCE_S)
    return group
