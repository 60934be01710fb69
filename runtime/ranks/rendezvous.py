"""Ranks that a launcher has started find each other: `torchrun`, or whoever sets its variables.

RANK and WORLD_SIZE say which they are, MASTER_ADDR and MASTER_PORT where torch's store is. There
rank 0 leaves its address, and a secret that a connection has to show.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from specc.errors import ConfigError, EngineError
from specc.runtime.ranks.channel import Channel
from specc.runtime.ranks.job import Follower, Job
from specc.runtime.ranks.rank_options import RankOptions

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SECRET_BYTES = 16
# magic, which connection, rank, secret
_GREETING = struct.Struct(f"<4sII{_SECRET_BYTES}s")
_MAGIC = b"spcH"
_ORDERS, _SIGNS = 0, 1
# for a stranger to say what it is
_GREETING_S = 5.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class Launched:
    """What a launcher says of this process.

    Args:
        size: processes.
        num_local: of these on this machine, which have consecutive ranks.
        local_rank: of this process among those.
        port: of the store.
        has_store: the launcher runs the store; else rank 0 does.
        attempt: of the launcher, which may start all ranks again.
    """

    rank: int
    size: int
    num_local: int
    local_rank: int
    address: str
    port: int
    has_store: bool
    attempt: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Launched | None:
        """None where nobody has launched several processes.

        Raises:
            ConfigError: a variable is absent, or no number in its range.
        """
        if "RANK" not in environment or environment.get("WORLD_SIZE", "1") == "1":
            return None
        if absent := [name for name in _NAMES if name not in environment]:
            raise ConfigError(
                f"RANK without {absent[0]}",
                f"{', '.join(_NAMES)}, as torchrun sets them",
                "start the ranks with torchrun, or unset RANK",
            )

        def number(name: str, least: int, most: int, default: int | None = None) -> int:
            text = environment.get(name, str(default))
            if not text.isdecimal() or not least <= int(text) <= most:
                raise ConfigError(
                    f"{name}={text}", f"{least} … {most}", "start the ranks with torchrun"
                )
            return int(text)

        size = number("WORLD_SIZE", 2, 1 << 16)
        rank = number("RANK", 0, size - 1)
        num_local = number("LOCAL_WORLD_SIZE", 1, size, default=1)
        local_rank = number("LOCAL_RANK", 0, min(rank, num_local - 1), default=rank % num_local)
        run = environment.get("TORCHELASTIC_RUN_ID", "none")
        return cls(
            rank,
            size,
            num_local,
            local_rank,
            environment["MASTER_ADDR"],
            number("MASTER_PORT", 1, 65535),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            f"{run}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        )

    @property
    def local_ranks(self) -> range:
        """Of this machine."""
        first = self.rank - self.local_rank
        return range(first, first + self.num_local)

    def free_address(self) -> str:
        """`tcp://HOST:PORT` of this machine, towards the store's, where nobody listens yet.

        Raises:
            EngineError: there is no way to the store's machine.
        """
        with listen_towards(self) as listener:
            host, port = listener.getsockname()[:2]
        return f"tcp://{host}:{port}"

    def check(self, num_ranks: int) -> None:
        """Raises ConfigError: the engine is for another number of ranks."""
        if self.size != num_ranks:
            raise ConfigError(
                f"a launch of {self.size} processes (WORLD_SIZE), and an engine of {num_ranks}",
                f"{num_ranks} processes",
                f"start {num_ranks}, or make an engine for {self.size} ranks",
            )


class Rendezvous:
    """Where launched ranks meet."""

    def __init__(self, launched: Launched, options: RankOptions) -> None:
        self._launched = launched
        self._limit_s = options.start_timeout_s
        self._key = f"specc/ranks/{launched.attempt}/rank-0"
        self._store: Any = None

    def accept(self, job: Job) -> Iterator[Follower]:
        """The other ranks, in order, when all of them are there; of rank 0.

        Raises:
            EngineError: they do not come in time, or the store cannot be reached.
        """
        end_s = time.monotonic() + self._limit_s
        secret = secrets.token_bytes(_SECRET_BYTES)
        store = self._open_store()
        found: dict[tuple[int, int], socket.socket] = {}
        wanted = {(rank, kind) for rank in range(1, self._launched.size) for kind in (0, 1)}
        try:
            with listen_towards(self._launched) as listener:
                host, port = listener.getsockname()[:2]
                where = {"host": host, "port": port, "secret": secret.hex()}
                store.set(self._key, json.dumps(where))
                while wanted - found.keys():
                    if job.is_closing:
                        raise _absent("the engine was closed", self._launched)
                    if time.monotonic() > end_s:
                        ranks = sorted({rank for rank, _ in wanted - found.keys()})
                        names = ", ".join(f"rank {rank}" for rank in ranks)
                        raise _absent(f"{names}: absent after {self._limit_s:g} s", self._launched)
                    with contextlib.suppress(TimeoutError):
                        connection, _ = listener.accept()
                        greeted = _greeted(connection, secret)
                        if greeted in wanted - found.keys():
                            found[greeted] = connection
                        else:
                            connection.close()
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        for rank in range(1, self._launched.size):
            yield Follower(rank, Channel(found[rank, _ORDERS]), Channel(found[rank, _SIGNS]))

    def connect(self) -> tuple[Channel, Channel]:
        """Connections to rank 0 for orders and for signs.

        Raises:
            EngineError: it does not answer in time, or the store cannot be reached.
        """
        store = self._open_store()
        try:
            where = json.loads(store.get(self._key))
        except RuntimeError as error:  # of torch.distributed: its wait has ended
            raise _absent("rank 0 has not come", self._launched) from error
        secret, made = bytes.fromhex(where["secret"]), []
        for kind in (_ORDERS, _SIGNS):
            try:
                one = socket.create_connection((where["host"], where["port"]), self._limit_s)
                one.sendall(_GREETING.pack(_MAGIC, kind, self._launched.rank, secret))
            except OSError as error:
                found = f"rank 0 at {where['host']}:{where['port']}: {error}"
                raise _absent(found, self._launched) from error
            made.append(Channel(_tuned(one)))
        return made[0], made[1]

    def _open_store(self) -> Any:
        launched = self._launched
        # loaded nowhere else: an engine of one rank needs no part of it
        from torch.distributed import TCPStore

        try:
            self._store = TCPStore(
                launched.address,
                launched.port,
                launched.size,
                is_master=launched.rank == 0 and not launched.has_store,
                timeout=timedelta(seconds=self._limit_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            where = f"{launched.address}:{launched.port}"
            reason = str(error).strip().splitlines()[0]
            found = f"no store at {where} (MASTER_ADDR, MASTER_PORT): {reason}"
            raise _absent(found, launched) from error
        return self._store


def listen_towards(launched: Launched) -> socket.socket:
    """Listen on the address that this machine has towards the store's.

    Raises:
        EngineError: there is no way to it.
    """
    address = launched.address, launched.port
    try:
        info = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])
            host = probe.getsockname()[0]
        listener = socket.create_server((host, 0), family=info[0])
    except OSError as error:
        raise _absent(f"no way to {address[0]}: {error}", launched) from error
    listener.settimeout(_LOOK_S)
    return listener


def _greeted(connection: socket.socket, secret: bytes) -> tuple[int, int] | None:
    """Rank and kind of a connection; None of a stranger's."""
    connection.settimeout(_GREETING_S)
    try:
        data = connection.recv(_GREETING.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(data) != _GREETING.size:
        return None
    magic, kind, rank, shown = _GREETING.unpack(data)
    if magic != _MAGIC or not hmac.compare_digest(shown, secret):
        return None
    _tuned(connection)
    return rank, kind


def _tuned(connection: socket.socket) -> socket.socket:
    """Small messages go at once."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _absent(found: str, launched: Launched) -> EngineError:
    return EngineError(
        found,
        f"{launched.size} ranks that reach {launched.address}:{launched.port}, and rank 0",
        "see that all are started, with the same MASTER_ADDR and MASTER_PORT, and that no"
        " firewall is between them",
    )
