"""A fork server: a process that has imported a module once, and forks for each job of it.

What takes seconds to import, as Inductor does, is imported once for all jobs. A job is a call of
the module's `main(arguments)` in a fork, with an environment and an output of its own: as if the
module had been run with `python -m`, whose exit codes it has, too.

    parent ── one socket ──→ server         ends when the parent does, however that happens
    parent ── one socket a job ──→ server   says the exit code; closed by the parent: kill the job
    parent ←── one pipe a job ── the job    its output and that of all that it starts
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specc.system.child_processes import ChildProcesses, die_with_parent

_SIZE, _CODE = struct.Struct(">Q"), struct.Struct(">i")


class WarmProcess:
    """Starts with the first job; for any thread.

    Args:
        module: its name; `main(arguments)` is a job. A fork has one thread, so importing it may
            start none.
        environment: variables of the server besides those of this process; what the module reads
            when it is imported.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.module = module
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        children: ChildProcesses,
    ) -> subprocess.CompletedProcess[str]:
        """Run a job and wait for it; its output is text, that of both streams in `stdout`.

        Args:
            arguments: of the module's `main`.
            environment: variables besides those that this process has now.
            children: what may end the job.
        Raises:
            OSError: no process or file for it.
        """
        own, theirs = socket.socketpair()
        output, job_output = os.pipe()
        with own, open(output, errors="replace") as stream:
            try:
                with theirs:
                    job = {
                        "arguments": list(arguments),
                        "environment": {**os.environ, **environment},
                    }
                    self._send(json.dumps(job).encode(), theirs.fileno(), job_output)
            finally:
                os.close(job_output)

            def kill() -> None:
                with contextlib.suppress(OSError):
                    own.shutdown(socket.SHUT_RDWR)

            with children.killing(kill):
                try:
                    text = stream.read()
                    code = _read(own, _CODE.size)
                except BaseException:
                    kill()
                    raise
        returncode = _CODE.unpack(code)[0] if code else -signal.SIGKILL
        return subprocess.CompletedProcess([self.module, *arguments], returncode, text, "")

    def close(self) -> None:
        """End the server, and with it all jobs."""
        with self._lock:
            process, control = self._process, self._control
            self._process = self._control = None
        if control is not None and process is not None:
            control.close()
            process.wait()

    def _send(self, job: bytes, *ends: int) -> None:
        with self._lock:
            if self._control is None:
                self._start()
            try:
                self._write(job, ends)
            except OSError:
                # it has been killed, for want of memory perhaps: its jobs have ended
                self._start()
                self._write(job, ends)

    def _write(self, job: bytes, ends: Sequence[int]) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [_SIZE.pack(len(job))], ends, socket.MSG_NOSIGNAL)
        self._control.sendall(job, socket.MSG_NOSIGNAL)

    def _start(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()
        own, theirs = socket.socketpair()
        with theirs:
            # -P: the working directory may hold folders called kernels or passes
            command = [sys.executable, "-P", "-m", __name__, self.module, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is for the parent
                start_new_session=True,
            )
        self._control = own


def _read(connection: socket.socket, size: int) -> bytes | None:
    """As many bytes; None where the other side has gone."""
    data = b""
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return data


class _Server:
    """The loop of the process that forks."""

    def __init__(self, module: str, control: socket.socket) -> None:
        self.control = control
        self.failure: str | None = None
        try:
            self.main = importlib.import_module(module).main
        except BaseException:
            # of every job the answer
            self.failure = traceback.format_exc()
        # process → the socket on which its end is said
        self.jobs: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, self.begin)

    def serve(self) -> None:
        """Until the parent has gone."""
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.selector.register(woken, selectors.EVENT_READ, lambda: self.reap(woken))
        try:
            while True:
                for key, _ in self.selector.select():
                    if key.data() is False:
                        return
        finally:
            for pid in self.jobs:
                _kill(pid)

    def begin(self) -> bool:
        """Fork for the next job; False where the parent has gone."""
        data, ends, _, _ = socket.recv_fds(self.control, _SIZE.size, 2)
        rest = _read(self.control, _SIZE.size - len(data)) if data else None
        message = None if rest is None else _read(self.control, *_SIZE.unpack(data + rest))
        if message is None:
            return False
        job, status = json.loads(message), socket.socket(fileno=ends[0])
        pid = os.fork()
        if not pid:
            status.close()
            self.be_job(job, ends[1])
        os.close(ends[1])
        self.jobs[pid] = status
        # the parent says nothing on it: it is readable once the parent has closed it
        self.selector.register(status, selectors.EVENT_READ, lambda: self.kill(pid))
        return True

    def kill(self, pid: int) -> None:
        self.selector.unregister(self.jobs[pid])
        _kill(pid)

    def reap(self, woken: int) -> None:
        """Say of what has ended how it did."""
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        for pid, status in list(self.jobs.items()):
            found, how = os.waitpid(pid, os.WNOHANG)
            if found:
                with contextlib.suppress(KeyError):  # one that was killed
                    self.selector.unregister(status)
                with contextlib.suppress(OSError):
                    status.send(_CODE.pack(os.waitstatus_to_exitcode(how)), socket.MSG_NOSIGNAL)
                status.close()
                del self.jobs[pid]

    def be_job(self, job: dict[str, Any], output: int) -> NoReturn:
        """In the fork: what `python -m` does."""
        code = 1
        try:
            os.setsid()
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.close(output)
            # the server sees that the parent has gone when no fork holds these
            self.selector.close()
            for end in (self.control, *self.jobs.values()):
                end.close()
            os.environ.clear()
            os.environ.update(job["environment"])
            # where temporary files go was looked up with the server's own environment
            tempfile.tempdir = None
            code = self.call(job["arguments"])
        finally:
            # no handler that an import has registered for the end of the server
            os._exit(code)

    def call(self, arguments: list[str]) -> int:
        try:
            if self.failure is not None:
                sys.stderr.write(self.failure)
                return 1
            self.main(arguments)
            return 0
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def _kill(pid: int) -> None:
    # with what it has started; and itself, before it has a session of its own
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _Server(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))).serve()
