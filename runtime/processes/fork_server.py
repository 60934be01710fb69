"""A small process that is set up once and forks children, which cost little; their errors."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from specc import errors
from specc.runtime.processes import fork_server_main as main

# of calls that work again when others are done
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
# seconds until a fork, or the end of a killed child, has to be known
_ANSWER_S = 20.0


class ChildError(Exception):
    """A job has no answer; its text says why."""


class ChildTimeout(ChildError):
    """It took too much of the processor."""


class ChildStarved(ChildError):
    """It did not end in time, and not by its own fault: others had the processor."""


class ChildDied(ChildError):
    """The process has ended: a crash, or no memory."""


class AnswerTooLarge(ChildError):
    """The answer has more bytes than allowed."""


class JobFailed(ChildError):
    """The function raised something that is not a `SpeccError`.

    Args:
        kind: name of the exception's class.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


def error_of(reply: dict[str, Any]) -> Exception:
    """What was raised in the other process, as its main module tells it."""
    kind = getattr(errors, reply["error"], None)
    has_parts = reply["parts"] is not None
    if has_parts and isinstance(kind, type) and issubclass(kind, errors.SpeccError):
        return kind(*reply["parts"])
    return JobFailed(reply["error"], reply["message"])


class ForkServer:
    """One process that forks; for any thread.

    It ends when this process does, however that happens, and its children with it.

    Args:
        target: `module:name` of what is called once, with `setup`; it returns the function that
            children call with the data of each job. Neither may need torch, or start a thread: a
            fork has one thread.
        setup: plain data, as JSON.
        start_seconds: until it is ready.
        memory_bytes: of address space that a child may take beside what it begins with; None for no
            limit.
        stack_bytes: of the thread that works, in each child.
    Raises:
        FaultError: no interpreter, or the target cannot be set up.
        OverloadError: no files, processes or memory for it at the moment.
    """

    def __init__(
        self,
        target: str,
        setup: bytes,
        start_seconds: float,
        memory_bytes: int | None,
        stack_bytes: int,
    ) -> None:
        self._lock = threading.Lock()
        try:
            own, theirs = socket.socketpair()
        except OSError as error:
            raise _no_room(error) from error
        try:
            self._process = subprocess.Popen(
                [_own_interpreter(), "-P", "-S", main.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is for the parent. Not a session of its own: Linux shares the processor
                # out among sessions (autogroups), and niceness counts within one alone
                process_group=0,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            own.close()
            if error.errno in _NO_ROOM:
                raise _no_room(error) from error
            raise _start_error(str(error)) from error
        finally:
            theirs.close()
        self._control = own
        first = {
            "target": target,
            "path": sys.path,
            "packages": _packages(),
            "memory_bytes": memory_bytes,
            "stack_bytes": stack_bytes,
        }
        try:
            self._start(json.dumps(first).encode(), setup, start_seconds)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, niceness: int) -> tuple[int, socket.socket]:
        """A new child: its process id, and the connection to it, on which it ends when that does.

        Args:
            niceness: of the child, beside that of all.
        Raises:
            OverloadError: no files, processes or memory for it at the moment.
            FaultError: the server has died.
        """
        try:
            own, theirs = socket.socketpair()
        except OSError as error:
            raise _no_room(error) from error
        try:
            pid, code = self._ask(main.FORK, niceness, theirs)
        except BaseException:
            own.close()
            raise
        finally:
            theirs.close()
        if code:
            own.close()
            raise _no_room(OSError(code, os.strerror(code)))
        return pid, own

    def end(self, pid: int) -> int:
        """Kill a child that may live, and take its exit code: negative for a signal."""
        if self.is_alive:
            # until the server is told to forget it, no other process gets its id
            kill(pid)
            with contextlib.suppress(errors.SpeccError):
                return self._ask(main.FORGET, pid)[0]
        return -signal.SIGKILL

    def kill(self) -> None:
        """End it now, from any thread; its children follow."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._control.close()
        self._process.wait()

    def _start(self, first: bytes, setup: bytes, seconds: float) -> None:
        watch = threading.Timer(seconds, self.kill)
        watch.daemon = True
        watch.start()
        try:
            for message in (first, setup):
                main.write_message(self._control, message)
            answer = main.read_message(self._control)
        except OSError:
            answer = None
        finally:
            watch.cancel()
        if answer is None:
            raise _start_error(f"its process ended with {self._end_of_start()}")
        reply = json.loads(answer)
        if "error" in reply:
            own = error_of(reply)
            raise own if isinstance(own, errors.SpeccError) else _start_error(str(own))
        if reply["version"] != [*sys.version_info[:2]]:
            raise _start_error(f"its Python is {reply['version']}")
        self._control.settimeout(_ANSWER_S)

    def _end_of_start(self) -> int:
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def _ask(self, what: bytes, number: int, end: socket.socket | None = None) -> tuple[int, int]:
        message = main.COMMAND.pack(what, number)
        with self._lock:
            try:
                socket.send_fds(
                    self._control,
                    [message],
                    [end.fileno()] if end else [],
                    socket.MSG_NOSIGNAL,
                )
                answer = main.read_exactly(self._control, main.ANSWER.size)
            except OSError as error:
                self._fail(error)
        if answer is None:
            self._fail(EOFError("its connection has ended"))
        return main.ANSWER.unpack(answer)

    def _fail(self, error: Exception) -> NoReturn:
        # what it has not answered must not be the answer to the next question
        self.kill()
        raise errors.FaultError(
            f"a process that forks others and has died ({error})",
            "one that lives; the next request starts one",
            "try again; look at the machine's memory where this happens often",
        ) from error


def kill(pid: int) -> None:
    """End a child now, from any thread."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _own_interpreter() -> str:
    try:
        return interpreter()
    except OSError as error:
        raise _start_error(str(error)) from error


def _packages() -> list[tuple[str, str]]:
    own = Path(main.__file__).resolve()
    folders = {"specc": Path(errors.__file__).resolve().parent, "specc.runtime": own.parents[1]}
    return [(name, str(folder)) for name, folder in folders.items()]


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


@functools.cache
def interpreter() -> str:
    """A Python of this version; where Python is embedded, `sys.executable` may be another program.

    Raises:
        OSError: there is none.
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
    raise OSError(f"no Python {major}.{minor} in {sys.prefix} or on the PATH")


def _candidates() -> Iterator[str]:
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # a host program that is none would take the options for its own
    if sys.executable and Path(sys.executable).name.startswith("python"):
        yield sys.executable
    for prefix in dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix)):
        yield from (str(Path(prefix) / "bin" / own) for own in (name, "python3"))
    yield from filter(None, (shutil.which(own) for own in (name, "python3")))
