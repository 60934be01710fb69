"""Processes of ranks as tests see them: by their ids, from outside."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

SCRIPT = Path(__file__).with_name("led_process.py")
# until a rank that is lost has to have ended the job, beside the time limit
ENDS_S = 10.0
_STARTS_S = 60.0


def is_gone(pid: int) -> bool:
    """Whether there is no such process any more, or only its exit code."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state == "Z"


def wait_gone(pids: list[int], seconds: float) -> list[int]:
    """Wait until these processes are gone; returns those that are left."""
    end_s = time.monotonic() + seconds
    while (left := [pid for pid in pids if not is_gone(pid)]) and time.monotonic() < end_s:
        time.sleep(0.02)
    return left


def children_of(pid: int) -> list[int]:
    """Processes that a process has started, in whichever of its threads."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return sorted(found)


class LedProcess:
    """`led_process.py` in a process, and the ranks that it starts.

    Args:
        ranks: fields of `RankOptions`.
    """

    def __init__(
        self,
        engine: Path,
        ranks: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._text = b""
        self.pids: list[int] = []
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(SCRIPT),
                str(engine),
                json.dumps(options | {"ranks": ranks}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )

    def __enter__(self) -> LedProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        for pid in self.pids[1:]:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def expect(self, key: str, seconds: float = _STARTS_S) -> Any:
        """Wait until it says something, and return that."""
        assert self.process.stdout is not None
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            line, found, rest = self._text.partition(b"\n")
            if found:
                self._text = rest
                said = json.loads(line)
                if "pids" in said:
                    self.pids = said["pids"]
                if key in said:
                    return said[key] if len(said) == 1 else said
                continue
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                assert data, f"it ended before {key}: {self.errors()}"
                self._text += data
        raise AssertionError(f"no {key} within {seconds} s")

    def said(self, key: str) -> list[dict[str, Any]]:
        """All with this key that it said before it ended, and that was not expected."""
        assert self.process.stdout is not None
        lines = (self._text + self.process.stdout.read()).splitlines()
        return [told for line in lines if key in (told := json.loads(line))]

    def answer(self, text: str = "") -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which is looked at next

    def errors(self) -> str:
        """What all ranks wrote, when the last has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def ends(self, seconds: float) -> int:
        """Wait for all processes; returns the exit code of rank 0."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank 0 goes on after {seconds} s") from None
        left = wait_gone(self.pids, 2.0)
        assert not left, f"ranks {[self.pids.index(pid) for pid in left]} are left"
        return code
