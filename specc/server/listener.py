"""The socket that the server listens at, and the files that the process may have open."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
from dataclasses import replace
from typing import Any

from specc.errors import ConfigError, SpeccError
from specc.server.config import ConnectionLimits
from specc.server.connections import EXTRA_CONNECTIONS

# what is asked for, where the system allows more; there is nothing to gain beyond
_WANTED_FILES = 1 << 16
# for the engine and the log
_SPARE_FILES = 64
_log = logging.getLogger("specc.serve")


class Listener(socket.socket):
    """A listening socket that stays quiet where the process has no more file descriptors.

    asyncio logs each attempt, thousands a second, and clients wait for nothing. This one keeps a
    descriptor in reserve, with which it takes such connections and closes them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reserve = _open_null()

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError: nobody is there any more."""
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self._reserve is None:
                raise
            _log.error("no more open files (%s): connections are closed", error.strerror)
            self._turn_away()
            raise BlockingIOError(errno.EAGAIN, "no more open files") from error

    def close(self) -> None:
        super().close()
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            os.close(reserve)

    def _turn_away(self) -> None:
        """Close one connection; as long as there are others, the event loop comes again."""
        assert self._reserve is not None
        os.close(self._reserve)
        self._reserve = None
        try:
            super().accept()[0].close()
        except OSError:
            pass  # it has gone, or another thread was quicker
        finally:
            self._reserve = _open_null()


def bind(host: str, port: int) -> Listener:
    """A socket that does not listen yet.

    Raises:
        ConfigError: another process has the address, or it is none of this machine's.
    """
    listener = None
    try:
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"port {port}", "0 … 65535", "choose another --port")
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = info[0]
        listener = Listener(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        raise address_error(host, port, error) from error
    return listener


def address_error(host: str, port: int, error: Exception) -> SpeccError:
    where = f"{host} port {port}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{where} is in use by another process",
            "a port that is free",
            "choose another --port, or end the other process",
        )
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        return ConfigError(
            f"{where} is not for this user", "a port of 1024 or more", "choose another --port"
        )
    reason = getattr(error, "strerror", None) or error
    return ConfigError(
        f"{where}: {reason}", "an address of this machine", "choose another --host or --port"
    )


def raise_file_limit() -> int:
    """Let the process have as many open files as it may, within reason; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        return soft
    return most


def fit(limits: ConnectionLimits, num_files: int) -> ConnectionLimits:
    """Limits that the open files allow: connections that nobody can accept are of no use.

    Args:
        limits: wanted.
        num_files: that the process may have open.
    """
    room = num_files - _count_open_files() - _SPARE_FILES - EXTRA_CONNECTIONS
    if room >= limits.max_connections:
        return limits
    _log.warning(
        "%d connections at most instead of %d: the limit of open files is %d (ulimit -Hn)",
        max(room, 1), limits.max_connections, num_files,
    )  # fmt: skip
    return replace(limits, max_connections=max(room, 1))


def _count_open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return _SPARE_FILES


def _open_null() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
