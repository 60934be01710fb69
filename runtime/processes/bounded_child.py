"""A child process for work on data of strangers: what it may cost is bounded, and so is a crash."""

from __future__ import annotations

import json
import select
import signal
import threading
from dataclasses import dataclass
from typing import Any

from specc.runtime.processes import fork_server_main as main
from specc.runtime.processes.fork_server import (
    AnswerTooLarge,
    ChildDied,
    ChildError,
    ChildStarved,
    ChildTimeout,
    ForkServer,
    error_of,
    kill,
)

# of the wall, for a second of the processor: a busy machine is not the job's fault, and large jobs
# get the rest that others leave
WALL_TO_CPU = 15.0
_SIGNALS = {
    signal.SIGSEGV: "it crashed (segmentation fault)",
    signal.SIGABRT: "it gave up, as native code does that gets no memory",
    signal.SIGKILL: "it was killed, maybe for its memory",
    signal.SIGBUS: "it crashed (bus error)",
}


@dataclass(frozen=True)
class ChildLimits:
    """What one job may cost.

    Args:
        cpu_seconds: of the processor; on the wall, `WALL_TO_CPU` times as many.
        memory_bytes: of address space, beside what the child has when it is ready; None for no
            limit.
        answer_bytes: of the answer as JSON.
        stack_bytes: of the thread that works.
        start_seconds: until the process that forks children is ready.
    """

    cpu_seconds: float = 5.0
    memory_bytes: int | None = 1 << 30
    answer_bytes: int = 1 << 20
    stack_bytes: int = 16 << 20
    start_seconds: float = 60.0


class BoundedChild:
    """One child process, ready for jobs; for one thread at a time, but for `kill`.

    Args:
        niceness: of the child, beside that of all children.
    Raises:
        FaultError: the server has died.
        OverloadError: no files, processes or memory for another one at the moment.
    """

    def __init__(self, server: ForkServer, limits: ChildLimits, niceness: int = 0) -> None:
        self._limits = limits
        self._server = server
        self.pid, self._connection = server.fork(niceness)
        self._lock = threading.Lock()
        # negative for a signal; None while nobody has seen it end
        self._exit_code: int | None = None
        self._is_killed = False

    @property
    def is_alive(self) -> bool:
        """While it has no job: whether it waits for one."""
        if self._is_killed or self._exit_code is not None:
            return False
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return not poll.poll(0)  # an idle child says nothing but that it has ended

    def call(
        self, data: Any, cpu_seconds: float | None = None, seconds: float | None = None
    ) -> Any:
        """The answer to one job. After a `ChildError` other than `JobFailed`, the child is dead.

        Args:
            cpu_seconds: of this job, instead of those of the limits.
            seconds: of this job on the wall, instead of `WALL_TO_CPU` times those.
        Raises:
            SpeccError: as the function raised it.
            ChildError: there is no answer.
        """
        if cpu_seconds is None:
            cpu_seconds = self._limits.cpu_seconds
        if seconds is None:
            seconds = cpu_seconds * WALL_TO_CPU
        header = main.SECONDS.pack(cpu_seconds, seconds)
        payload = header + json.dumps(data).encode()
        try:
            reply = self._exchange(payload, cpu_seconds, seconds)
        except BaseException:
            # its answer, if it comes, must not be that of the next job
            self.close()
            raise
        if "answer" in reply:
            return reply["answer"]
        raise error_of(reply)

    def kill(self) -> None:
        """End it now, from any thread; a `call` that waits raises `ChildDied`."""
        with self._lock:
            self._is_killed = True
            if self._exit_code is None and self._server.is_alive:
                kill(self.pid)

    def close(self) -> None:
        """End it, and wait for its end."""
        self.end()
        self._connection.close()

    def end(self) -> int:
        """The same, for any thread; returns the exit code, which is negative for a signal."""
        with self._lock:
            self._is_killed = True
            if self._exit_code is None:
                self._exit_code = self._server.end(self.pid)
            return self._exit_code

    def _exchange(self, payload: bytes, cpu_seconds: float, seconds: float) -> dict[str, Any]:
        max_bytes = self._limits.answer_bytes
        is_late = threading.Event()

        def end_late() -> None:
            is_late.set()
            self.kill()

        # a socket's timeout is for one read or write; this is for all of them
        watch = threading.Timer(seconds, end_late)
        watch.daemon = True
        watch.start()
        try:
            main.write_message(self._connection, payload)
            answer = main.read_message(self._connection, max_bytes)
        except ValueError as error:
            raise AnswerTooLarge(f"its answer is {error}; at most {max_bytes}") from error
        except OSError:
            answer = None
        finally:
            watch.cancel()
        if answer is not None:
            return json.loads(answer)
        raise self._error_of_end(cpu_seconds, seconds, is_late.is_set())

    def _error_of_end(self, cpu_seconds: float, seconds: float, is_late: bool) -> ChildError:
        code = self.end()
        if -code == signal.SIGPROF:
            return ChildTimeout(f"it took more than {cpu_seconds:g} s of the processor")
        if is_late or -code == signal.SIGALRM:
            return ChildStarved(f"it did not end within {seconds:g} s")
        return ChildDied(_SIGNALS.get(-code, f"its process ended with {code}"))  # type: ignore[call-overload]
