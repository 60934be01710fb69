"""Where a process of the GPU check leaves what it finds, and the device that it finds it on."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

# exit status of a process whose device is lost: whatever it would do next would fail, too
LOST = 75
LONGEST = 2000
# kinds of devices that stand for a GPU in rehearsals
SIMULATED, APART = "simulated", "apart"


class Skipped(Exception):
    """Nothing to check here; the message says why."""


class Results:
    """Where a task leaves what it finds.

    Args:
        known: values of what processes before this one have found, by name.
    """

    def __init__(self, path: Path, known: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.known = known
        self._file = path.open("a", encoding="utf-8")
        self._begin_s = time.perf_counter()

    def begin(self, name: str) -> None:
        """Say what comes next: if the process dies or hangs, that is where."""
        self._begin_s = time.perf_counter()
        self._write({"begin": name})

    def end(self, name: str, state: str, value: Any = None, seconds: float | None = None) -> None:
        """Say how it went; `state` is passed, failed or skipped."""
        if seconds is None:
            seconds = time.perf_counter() - self._begin_s
        line = {"name": name, "state": state, "seconds": round(seconds, 3), "value": value}
        self._write(line)

    def check(self, name: str, run: Callable[[], Any]) -> None:
        """Do one thing unless it is known; one that raises has failed, and the task goes on."""
        if name in self.known:
            return
        self.begin(name)
        try:
            value = run()
        except Skipped as reason:
            self.end(name, "skipped", str(reason))
        except Exception:
            self.end(name, "failed", traceback.format_exc(limit=-6)[-LONGEST:])
        else:
            self.end(name, "passed", value)

    def note(self, **values: Any) -> None:
        """Facts about the task itself."""
        self._write({"note": values})

    def lose(self) -> None:
        """The device is lost: end here, so that another process goes on with the rest."""
        self._write({"lost": True})
        os._exit(LOST)

    def finish(self) -> None:
        self._write({"done": True})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class Device:
    """The GPU of this process (`cuda`), or what stands for one in a rehearsal."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def prepare(self) -> None:
        """Make what the check needs of torch work on this device."""
        if self.kind != "cuda":
            from tests.gpu import simulated

            simulated.prepare(self.kind)

    @property
    def place(self) -> str:
        """Where its tensors lie, as torch says it."""
        return "cpu" if self.kind == SIMULATED else "cuda"

    def synchronize(self) -> None:
        """Wait for all that is queued: what went wrong there is raised here."""
        if self.kind != "cuda":
            from tests.gpu import faults

            faults.synchronize()
            return
        import torch

        torch.cuda.synchronize()

    def is_lost(self) -> bool:
        """Whether everything fails from now on, as after an illegal access."""
        try:
            self.synchronize()
        except Exception:
            return True
        return False
