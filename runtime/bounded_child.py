"""A child process for work on data of strangers: what it may cost is bounded, and so is a crash."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc import errors
from specc.runtime import bounded_child_main

# of calls that work again when others are done
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)

# of the wall, for a second of the processor: a busy machine is not the job's fault
WALL_TO_CPU = 4.0
_SIGNALS = {
    signal.SIGSEGV: "it crashed (segmentation fault)",
    signal.SIGABRT: "it gave up, as native code does that gets no memory",
    signal.SIGKILL: "it was killed, maybe for its memory",
    signal.SIGBUS: "it crashed (bus error)",
}


class ChildError(Exception):
    """A job has no answer; its text says why."""


class ChildTimeout(ChildError):
    """It took too long."""


class ChildDied(ChildError):
    """The process has ended: a crash, or no memory."""


class AnswerTooLarge(ChildError):
    """The answer has more bytes than allowed."""


class JobFailed(ChildError):
    """The function raised something that is not a `SpeccError`.

    Args:
        kind: name of the exception's class.
        message: its text.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class ChildLimits:
    """What one job may cost.

    Args:
        cpu_seconds: of the processor; on the wall, `WALL_TO_CPU` times as many.
        memory_bytes: of address space, beside what the child has when it is ready; None for no
            limit.
        answer_bytes: of the answer as JSON.
        stack_bytes: of the thread that works.
        start_seconds: until the child is ready.
    """

    cpu_seconds: float = 5.0
    memory_bytes: int | None = 1 << 30
    answer_bytes: int = 1 << 20
    stack_bytes: int = 16 << 20
    start_seconds: float = 60.0


class BoundedChild:
    """One child process, ready for jobs; for one thread at a time, but for `kill`.

    Args:
        target: `module:name` of what is called once in the child, with `setup`; it returns the
            function that is called with the data of each job. Neither may need torch: a child is
            small, and quick to replace.
        setup: plain data, as JSON.
        limits: of each job.
    Raises:
        FaultError: no interpreter, or the target cannot be set up.
        OverloadError: no files, processes or memory for another one at the moment.
    """

    def __init__(self, target: str, setup: bytes, limits: ChildLimits) -> None:
        self._limits = limits
        try:
            own, theirs = socket.socketpair()
        except OSError as error:
            raise _no_room(error) from error
        try:
            self._process = subprocess.Popen(
                [_interpreter(), "-P", "-S", bounded_child_main.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is for the parent
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            own.close()
            if error.errno in _NO_ROOM:
                raise _no_room(error) from error
            raise _start_error(str(error)) from error
        finally:
            theirs.close()
        self._connection = own
        try:
            self._start(target, setup)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, data: Any, cpu_seconds: float | None = None) -> Any:
        """The answer to one job. After a `ChildError` other than `JobFailed`, the child is dead.

        Args:
            data: plain data, of the job.
            cpu_seconds: of this job, instead of those of the limits.
        Raises:
            SpeccError: as the function raised it.
            ChildError: there is no answer.
        """
        if cpu_seconds is None:
            cpu_seconds = self._limits.cpu_seconds
        seconds = cpu_seconds * WALL_TO_CPU
        header = bounded_child_main.SECONDS.pack(cpu_seconds, seconds)
        payload = header + json.dumps(data).encode()
        try:
            reply = self._exchange(payload, seconds, self._limits.answer_bytes)
        except BaseException:
            # its answer, if it comes, must not be that of the next job
            self.close()
            raise
        if "answer" in reply:
            return reply["answer"]
        raise _error_of(reply)

    def kill(self) -> None:
        """End it now, from any thread; a `call` that waits raises `ChildDied`."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._connection.close()
        self._process.wait()

    def _start(self, target: str, setup: bytes) -> None:
        limits = self._limits
        first = {
            "target": target,
            "path": sys.path,
            "packages": _packages(),
            "memory_bytes": limits.memory_bytes,
            "stack_bytes": limits.stack_bytes,
        }
        try:
            reply = self._exchange(json.dumps(first).encode(), limits.start_seconds, None, setup)
        except ChildError as error:
            raise _start_error(str(error)) from error
        if "error" in reply:
            own = _error_of(reply)
            raise own if isinstance(own, errors.SpeccError) else _start_error(str(own))
        if reply["version"] != [*sys.version_info[:2]]:
            raise _start_error(f"its Python is {reply['version']}")

    def _exchange(
        self, payload: bytes, seconds: float, max_bytes: int | None, *more: bytes
    ) -> dict[str, Any]:
        end_s = time.monotonic() + seconds
        # a socket's timeout is for one read or write; this is for all of them
        watch = threading.Timer(seconds, self.kill)
        watch.daemon = True
        watch.start()
        try:
            for message in (payload, *more):
                bounded_child_main.write_message(self._connection, message)
            answer = bounded_child_main.read_message(self._connection, max_bytes)
        except ValueError as error:
            raise AnswerTooLarge(f"its answer is {error}; at most {max_bytes}") from error
        except OSError:
            answer = None
        finally:
            watch.cancel()
        if answer is not None:
            return json.loads(answer)
        code = self._wait()
        if -code == signal.SIGPROF:
            raise ChildTimeout(f"it took more than {seconds / WALL_TO_CPU:g} s of the processor")
        if time.monotonic() >= end_s or -code == signal.SIGALRM:
            raise ChildTimeout(f"it took more than {seconds:g} s")
        raise ChildDied(_SIGNALS.get(-code, f"its process ended with {code}"))  # type: ignore[call-overload]

    def _wait(self) -> int:
        """The exit code, of a process whose connection has ended."""
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@functools.cache
def _interpreter() -> str:
    """A Python of this version; where Python is embedded, `sys.executable` may be another program.

    Raises:
        FaultError: there is none.
    """
    major, minor = sys.version_info[:2]
    for path in _candidates():
        check = f"import sys; sys.exit(sys.version_info[:2] != ({major}, {minor}))"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [path, "-P", "-S", "-c", check]
            null = subprocess.DEVNULL
            done = subprocess.run(command, stdin=null, stdout=null, stderr=null, timeout=30)
            if done.returncode == 0:
                return path
    raise _start_error(f"no Python {major}.{minor} in {sys.prefix} or on the PATH")


def _candidates() -> Iterator[str]:
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # a host program that is none would take the options for its own
    if sys.executable and Path(sys.executable).name.startswith("python"):
        yield sys.executable
    for prefix in dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix)):
        yield from (str(Path(prefix) / "bin" / own) for own in (name, "python3"))
    yield from filter(None, (shutil.which(own) for own in (name, "python3")))


def _packages() -> list[tuple[str, str]]:
    files = {"specc": errors.__file__, "specc.runtime": bounded_child_main.__file__}
    return [(name, str(Path(file).resolve().parent)) for name, file in files.items()]


def _error_of(reply: dict[str, Any]) -> Exception:
    kind = getattr(errors, reply["error"], None)
    has_parts = reply["parts"] is not None
    if has_parts and isinstance(kind, type) and issubclass(kind, errors.SpeccError):
        return kind(*reply["parts"])
    return JobFailed(reply["error"], reply["message"])


def _no_room(error: OSError) -> errors.OverloadError:
    """Of a machine that has room again when others are done."""
    return errors.OverloadError(
        f"no room for a child process: {error.strerror}",
        "a free process, files and memory",
        "try again later; raise ulimit -n and ulimit -u where this happens often",
    )


def _start_error(reason: str) -> errors.FaultError:
    return errors.FaultError(
        f"a child process that does not start: {reason}",
        "a process for work that may not harm this one",
        "look at the machine's memory and number of processes, and at the installation of specc",
    )
