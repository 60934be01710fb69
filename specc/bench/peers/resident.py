"""A contender whose process stays from before the rounds to their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from specc.bench.peers.peer import Job, NotAvailableError
from specc.bench.rounds import Measurement
from specc.errors import EngineError

_GRACE_S = 10
# of its standard error, what is looked through for the last line that says something
_TAIL_BYTES = 4096


class ResidentContender:
    """Loads in a process of its own; `run` has it generate, which it times itself.

    Raises:
        NotAvailableError: the peer cannot do this.
    """

    plan: str | None = None

    def __init__(self, name: str, module: str, job: Job) -> None:
        self.name = name
        self.setting = ""
        self.model_bytes = sum(map(_num_bytes, filter(None, (job.target, job.draft))))
        self.settings: Mapping[str, Mapping[str, Any]] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "specc.bench.peers.worker"],
            env={**os.environ, **environment(job.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # Ctrl-C is for the process that measures, which ends this one
            start_new_session=True,
        )
        try:
            self.settings = self._ask({"module": module, "job": asdict(job)})["settings"]
            self.setting = next(iter(self.settings))
        except BaseException:
            self.close(at_once=True)
            raise

    def run(self) -> Measurement:
        """Raises EngineError: it ran before, and now its process failed."""
        try:
            return self.run_with(self.setting)
        except NotAvailableError as error:
            raise EngineError(
                f"{self.name} ended within the rounds: {error}",
                "a peer that goes on to the last round",
                "measure again, without it or with less memory in use",
            ) from error

    def run_with(self, setting: str) -> Measurement:
        """Generate with one of the settings.

        Raises:
            NotAvailableError: it failed.
        """
        return Measurement(**self._ask({"run": setting}))

    def close(self, at_once: bool = False) -> None:
        """End the process: when it has nothing to do, or whatever it does."""
        if at_once:
            self._kill()
        stdin, stdout = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # it ended first
            stdin.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        stdout.close()
        self._errors.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._pipes()
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise NotAvailableError(self._last_words())
        reply = json.loads(line)
        if "not_available" in reply:
            raise NotAvailableError(reply["not_available"])
        return reply

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "the process was started with pipes"
        assert stdout is not None
        return stdin, stdout

    def _last_words(self) -> str:
        """How a process ended that gave no reply."""
        code = self._process.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _TAIL_BYTES))
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        return f"its process ended with code {code} ({last})"


def _num_bytes(model: str) -> int:
    """Of a model's file, or of all files of its directory."""
    path = Path(model)
    files = [path] if path.is_file() else path.iterdir()
    return sum(file.stat().st_size for file in files if file.is_file())


def environment(threads: int) -> dict[str, str]:
    """Variables of a peer's process: threads of whatever reads these, and no look at a hub."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
