"""The process that `fork_server.py` starts: it is set up once, and forks what works on plain data.

Run by its path, with nothing imported but the standard library; what else the function needs comes
from the paths of the parent. Messages are a length and then JSON. The process ends when its socket
does, which is when its parent ends, however that happens; and so does each fork, with its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

_HEADER = struct.Struct(">Q")
# what the parent asks for, with a niceness or a process id; and the answer: process id or exit
# code, and error number
COMMAND, ANSWER = struct.Struct(">ci"), struct.Struct(">ii")
FORK, FORGET = b"F", b"E"
# seconds of the processor and on the wall, ahead of each job
SECONDS = struct.Struct(">dd")
_MAX_REASON = 2000


def read_message(connection: socket.socket, max_bytes: int | None = None) -> bytes | None:
    """The next message; None where the other side has gone.

    Raises:
        ValueError: it is longer than `max_bytes`, and was not read.
        TimeoutError: it does not come within the socket's timeout.
    """
    header = read_exactly(connection, _HEADER.size)
    if header is None:
        return None
    (size,) = _HEADER.unpack(header)
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"a message of {size} bytes")
    return read_exactly(connection, size)


def write_message(connection: socket.socket, payload: bytes) -> None:
    """Send a message; OSError where the other side has gone."""
    # never a signal: not every host of this code ignores SIGPIPE
    connection.sendall(_HEADER.pack(len(payload)), socket.MSG_NOSIGNAL)
    connection.sendall(payload, socket.MSG_NOSIGNAL)


def read_exactly(connection: socket.socket, size: int) -> bytes | None:
    """As many bytes; None where the other side has gone."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        count = connection.recv_into(view[have:])
        if not count:
            return None
        have += count
    return bytes(data)


def main(control: socket.socket) -> None:
    """Set up, and fork until the parent has gone."""
    with contextlib.suppress(ValueError, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # of what the machine runs, this is the least important, and the first to go without memory
        os.nice(5)
        Path("/proc/self/oom_score_adj").write_text("800")
    first, data = read_message(control), read_message(control)
    if first is None or data is None:
        return
    setup = json.loads(first)
    reply = _attempt(lambda: _prepare(setup, json.loads(data)))
    work: Callable[[Any], Any] = reply.pop("answer", None)
    if "error" not in reply and (count := _num_threads()) != 1:
        # a lock that another thread holds would be held for ever in a fork
        reply = {"error": "RuntimeError", "parts": None, "message": f"{count} threads, to fork"}
    write_message(control, json.dumps(reply | {"version": sys.version_info[:2]}).encode())
    # pages that all forks share
    gc.collect()
    gc.freeze()
    while (found := _next_command(control)) is not None:
        (what, number), ends = found
        answer = _forget(number) if what == FORGET else _fork(control, ends[0], number, setup, work)
        control.sendall(answer, socket.MSG_NOSIGNAL)


def _next_command(control: socket.socket) -> tuple[tuple[bytes, int], list[int]] | None:
    data, ends, _, _ = socket.recv_fds(control, COMMAND.size, 1)
    while data and len(data) < COMMAND.size:
        rest = control.recv(COMMAND.size - len(data))
        data = data + rest if rest else b""
    return (COMMAND.unpack(data), ends) if data else None


def _fork(
    control: socket.socket, end: int, niceness: int, setup: dict[str, Any], work: Any
) -> bytes:
    try:
        pid = os.fork()
    except OSError as error:
        os.close(end)
        return ANSWER.pack(0, error.errno or 0)
    if pid:
        os.close(end)
        return ANSWER.pack(pid, 0)
    try:
        control.close()
        with contextlib.suppress(OSError):
            os.nice(niceness)
        _be_child(socket.socket(fileno=end), setup, work)
    finally:
        _leave()


def _forget(pid: int) -> bytes:
    """The exit code of a child that ends, as subprocess has it; its id is free from here on."""
    try:
        return ANSWER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)
    except OSError as error:
        return ANSWER.pack(0, error.errno or 0)


def _be_child(connection: socket.socket, setup: dict[str, Any], work: Callable[[Any], Any]) -> None:
    """Read what is to be done, in the first thread, which also sees that the parent has gone."""
    jobs: SimpleQueue[bytes] = SimpleQueue()
    threading.stack_size(setup["stack_bytes"])
    args = (connection, setup["memory_bytes"], work, jobs)
    threading.Thread(target=_work, args=args, daemon=True).start()
    while (message := read_message(connection)) is not None:
        jobs.put(message)


def _work(
    connection: socket.socket,
    memory_bytes: int | None,
    work: Callable[[Any], Any],
    jobs: SimpleQueue[bytes],
) -> None:
    if memory_bytes is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        message = jobs.get()
        cpu_seconds, seconds = SECONDS.unpack_from(message)
        # the kernel's own: it ends this process although native code holds the interpreter
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        payload = _payload(work, message[SECONDS.size :])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(connection, payload)


def _payload(work: Callable[[Any], Any], message: bytes) -> bytes:
    reply = _attempt(lambda: json.dumps({"answer": work(json.loads(message))}).encode())
    payload = reply.get("answer")
    return payload if payload is not None else json.dumps(reply).encode()


def _prepare(setup: dict[str, Any], data: Any) -> Callable[[Any], Any]:
    sys.path[:] = setup["path"]
    for name, directory in setup["packages"]:
        _load_package(name, Path(directory))
    module, _, name = setup["target"].partition(":")
    return getattr(importlib.import_module(module), name)(data)


def _load_package(name: str, directory: Path) -> None:
    """The parent's own, wherever it has it from."""
    file = directory / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(directory)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package at {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


def _num_threads() -> int:
    """Native ones included; 1 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """The answer; or the error, in plain data."""
    try:
        return {"answer": call()}
    except BaseException as error:
        parts = [getattr(error, part, None) for part in ("found", "needed", "do")]
        is_own = type(error).__module__ == "specc.errors"
        return {
            "error": type(error).__name__,
            "message": str(error)[:_MAX_REASON],
            "parts": [str(part)[:_MAX_REASON] for part in parts] if is_own else None,
        }


def _leave() -> NoReturn:
    # whatever another thread is at: nobody waits for it any more
    os._exit(0)


if __name__ == "__main__":
    try:
        main(socket.socket(fileno=int(sys.argv[1])))
    finally:
        _leave()
