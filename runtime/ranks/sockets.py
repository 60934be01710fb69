"""Ranks on several hosts: all of them meet at an address of rank 0, and connect in pairs over TCP.

Every rank connects to rank 0 and says where it listens; when all have come, rank 0 tells each where
the others are. Of two ranks the later one connects to the earlier one. Whoever connects shows a
secret, which is a part of the address; nothing is encrypted (docs/design/ranks.md). The sockets
then belong to the operators' library, whose collectives are those of ranks that share memory, sums
included, bit for bit.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence

from specc.errors import RankError
from specc.kernels import ranks
from specc.runtime.ranks.group import TIME_LIMIT_S, SharedGroup

_SECRET_BYTES = 16
# magic, what the connection is for, rank, number of ranks, port, secret
_GREETING = struct.Struct(f"<4sIIIH{_SECRET_BYTES}s")
_LENGTH = struct.Struct("<I")
_MAGIC = b"spcG"
# a connection to rank 0 that says where this rank listens; greater numbers are those of groups
_JOIN = 0
# for a stranger to say what it is
_GREETING_S = 5.0
_LOOK_S = 0.2
_MAX_TABLE_BYTES = 1 << 20


def with_secret(address: str) -> str:
    """An address at which only those who know this text are taken for ranks."""
    return f"{address}#{secrets.token_hex(_SECRET_BYTES)}"


class Meeting:
    """This process among all ranks of an engine; returns when all are there.

    Args:
        address: `tcp://HOST:PORT` of rank 0, followed by `#SECRET` where `with_secret` made it.
        limit_s: seconds to meet, and to connect later.
    Raises:
        RankError: not all came in time, or the address is none.
    """

    def __init__(self, address: str, rank: int, num_ranks: int, limit_s: float) -> None:
        self._where, self._host, self._port, self._secret = _parts_of(address)
        self._rank, self._size, self._limit_s = rank, num_ranks, limit_s
        self._came: dict[tuple[int, int], socket.socket] = {}
        self._ports: dict[int, int] = {}
        self._end_s = time.monotonic() + limit_s
        self._table: list[tuple[str, int]] = []
        self._listener: socket.socket | None = None
        try:
            self._table = self._gather() if rank == 0 else self._join()
        except (OSError, ValueError) as error:
            self.close()
            raise self._absent(str(error)) from error
        except BaseException:
            self.close()
            raise

    def connect(self, members: Sequence[int], number: int) -> list[int]:
        """Connect to some ranks, all of which call this.

        Args:
            members: ranks, of which this one is one.
            number: 1 or more; of all that this engine's ranks connect, it names these.
        Returns:
            descriptors of sockets in the order of members, -1 in this rank's place; the caller's.
        Raises:
            RankError: not all came in time.
        """
        self._end_s = time.monotonic() + self._limit_s
        made: dict[int, socket.socket] = {}
        try:
            for other in members:
                if other < self._rank:
                    made[other] = self._call(self._table[other], number)
            later = [rank for rank in members if rank > self._rank]
            while missing := [rank for rank in later if rank not in made]:
                for rank in missing:
                    if (number, rank) in self._came:
                        made[rank] = self._came.pop((number, rank))
                        break
                else:
                    self._take(missing)
        except OSError as error:
            _close(made.values())
            raise self._absent(str(error)) from error
        except BaseException:
            _close(made.values())
            raise
        return [made[rank].detach() if rank in made else -1 for rank in members]

    def close(self) -> None:
        """Nobody is to connect any more; what is connected stays."""
        _close(self._came.values())
        self._came.clear()
        if self._listener is not None:
            self._listener.close()

    def _gather(self) -> list[tuple[str, int]]:
        """Wait for all ranks, and tell each where the others are; of rank 0."""
        info = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        self._listen((self._host, self._port), info[0])
        table = {0: (self._host, self._port)}
        came: dict[int, socket.socket] = {}
        try:
            while missing := [rank for rank in range(1, self._size) if rank not in came]:
                for rank in missing:
                    if (_JOIN, rank) in self._came:
                        came[rank] = self._came.pop((_JOIN, rank))
                        table[rank] = (came[rank].getpeername()[0], self._ports[rank])
                        break
                else:
                    self._take(missing)
            found = [table[rank] for rank in range(self._size)]
            data = json.dumps(found).encode()
            for one in came.values():
                one.sendall(_LENGTH.pack(len(data)) + data)
        finally:
            _close(came.values())
        return found

    def _join(self) -> list[tuple[str, int]]:
        """Say to rank 0 where this rank listens; it tells where the others do."""
        while True:
            try:
                connection = socket.create_connection((self._host, self._port), self._left_s())
                break
            except OSError:
                # it may be about to listen
                if self._left_s() <= _LOOK_S:
                    raise
                time.sleep(_LOOK_S / 4)
        with connection:
            self._listen((connection.getsockname()[0], 0), connection.family)
            assert self._listener is not None
            port = self._listener.getsockname()[1]
            connection.sendall(self._greeting(_JOIN, port))
            connection.settimeout(self._left_s())
            (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
            if length > _MAX_TABLE_BYTES:
                raise ValueError("it is no rank 0")
            table = json.loads(_read(connection, length))
        found = [(str(host), int(port)) for host, port in table]
        if len(found) != self._size:
            raise ValueError(f"rank 0 has {len(found)} ranks")
        # as this rank has reached it
        return [(self._host, self._port), *found[1:]]

    def _listen(self, address: tuple[str, int], family: int) -> None:
        self._listener = socket.create_server(address, family=family, backlog=128)
        self._listener.settimeout(_LOOK_S)

    def _call(self, address: tuple[str, int], number: int) -> socket.socket:
        made = socket.create_connection(address, self._left_s())
        try:
            made.sendall(self._greeting(number))
        except BaseException:
            made.close()
            raise
        made.settimeout(None)
        return made

    def _take(self, missing: Sequence[int]) -> None:
        """Take one connection, if one comes soon.

        Raises:
            RankError: the time is over.
        """
        if time.monotonic() > self._end_s:
            names = ", ".join(f"rank {rank}" for rank in missing)
            raise self._absent(f"{names} absent after {self._limit_s:g} s")
        assert self._listener is not None
        with contextlib.suppress(TimeoutError):
            connection, _ = self._listener.accept()
            greeted = self._greeted(connection)
            if greeted is None or greeted in self._came:
                connection.close()
            else:
                self._came[greeted] = connection

    def _greeted(self, connection: socket.socket) -> tuple[int, int] | None:
        """Purpose and rank of a connection; None of a stranger's."""
        connection.settimeout(_GREETING_S)
        try:
            data = _read(connection, _GREETING.size)
        except (OSError, ValueError):
            return None
        magic, number, rank, size, port, secret = _GREETING.unpack(data)
        if magic != _MAGIC or not hmac.compare_digest(secret, self._secret):
            return None
        if size != self._size or not rank < size:
            return None
        if number == _JOIN:
            self._ports.setdefault(rank, port)
        connection.settimeout(None)
        return number, rank

    def _greeting(self, number: int, port: int = 0) -> bytes:
        return _GREETING.pack(_MAGIC, number, self._rank, self._size, port, self._secret)

    def _left_s(self) -> float:
        return max(self._end_s - time.monotonic(), 0.01)

    def _absent(self, why: str) -> RankError:
        return RankError(
            f"rank {self._rank} of {self._size} did not meet the others at {self._where}: {why}",
            f"all ranks at this address within {self._limit_s:g} s",
            "see that rank 0 runs and that its host and port can be reached",
        )


def join_sockets(
    address: str,
    rank: int,
    num_ranks: int,
    time_limit: float = TIME_LIMIT_S,
    limit_s: float | None = None,
) -> SharedGroup:
    """Meet the other ranks at an address; returns when all are there.

    Args:
        address: see `Meeting`.
        rank: of this process, 0 … num_ranks - 1.
        time_limit: seconds to wait for the others in a collective.
        limit_s: seconds to meet; None: as many.
    Raises:
        RankError: not all came in time, or this process has a group.
    """
    meeting = Meeting(address, rank, num_ranks, time_limit if limit_s is None else limit_s)
    with contextlib.closing(meeting):
        sockets = meeting.connect(range(num_ranks), 1)
    ranks.open_sockets(sockets, rank, time_limit)
    return SharedGroup(rank, num_ranks, address, None)


def _parts_of(address: str) -> tuple[str, str, int, bytes]:
    """The address without its secret, its host and port, and the secret.

    Raises:
        RankError: it is no address.
    """
    where, _, text = address.partition("#")
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    try:
        secret = bytes.fromhex(text)
        if not where.startswith("tcp://") or not host or not 0 < int(port) < 1 << 16:
            raise ValueError(where)
    except ValueError as error:
        raise RankError(
            f"the address {where}", "tcp://HOST:PORT", "start the ranks again"
        ) from error
    return where, host.strip("[]"), int(port), secret.ljust(_SECRET_BYTES, b"\0")[:_SECRET_BYTES]


def _read(connection: socket.socket, size: int) -> bytes:
    """Raises ValueError: it ends before."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ValueError("a connection that was ended")
        data += more
    return data


def _close(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()
