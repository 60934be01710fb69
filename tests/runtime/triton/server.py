"""Starts the Triton Inference Server of `environment.py`, and asks it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.runtime.triton.environment import environment, site_packages

ROOT = Path(__file__).resolve().parents[3] / "build" / "triton-server"
_START_S, _STOP_S = 60.0, 25.0
_SHARED = Path("/dev/shm")


class TritonServer:
    """A server on free ports of 127.0.0.1, whose models are loaded by name.

    Args:
        backends: directory that holds the backend `python`, and others.
    Raises:
        RuntimeError: it is not ready in time; with its log.
    """

    def __init__(
        self, repository: Path, backends: Path, directory: Path, models: tuple[str, ...]
    ) -> None:
        self.repository = repository
        self.http, self.grpc, self.metrics_port = _free_ports(3)
        self._log = directory / "server.log"
        # what this server, and no other, leaves in shared memory
        self._prefix = f"specc_test_{os.getpid()}_{self.http}_"
        command = [
            str(
                site_packages(ROOT / "venv") / "pytriton" / "tritonserver" / "bin" / "tritonserver"
            ),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in models),
            *(f"--{service}-address=127.0.0.1" for service in ("http", "grpc", "metrics")),
            f"--http-port={self.http}",
            f"--grpc-port={self.grpc}",
            f"--metrics-port={self.metrics_port}",
            # one port, one server: a second one must not share it unnoticed
            "--reuse-http-port=false",
            "--allow-gpu-metrics=false",
            "--pinned-memory-pool-byte-size=0",
            "--exit-timeout-secs=2",
        ]
        env = environment(ROOT) | {"OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=env,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_until_ready()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> int:
        """Stop it, and clear what a stub that was killed left behind; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                # its own session: the server and its stubs
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        for path in _SHARED.glob(f"{self._prefix}*"):
            path.unlink(missing_ok=True)
        return self.process.returncode

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of an answer; the text where it is no JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        try:
            with self.open(path, data) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())

    def open(self, path: str, data: bytes) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/v2/{path}", data)
        return urllib.request.urlopen(request, timeout=60)

    def generate(self, model: str = "specc", **body: Any) -> tuple[int, Any]:
        return self.post(f"models/{model}/generate", body)

    def generate_stream(self, model: str = "specc", **body: Any) -> Iterator[dict[str, Any]]:
        with self.open(f"models/{model}/generate_stream", json.dumps(body).encode()) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def is_ready(self, model: str) -> bool:
        try:
            url = f"http://127.0.0.1:{self.http}/v2/models/{model}/ready"
            return urllib.request.urlopen(url, timeout=10).status == 200
        except urllib.error.HTTPError:
            return False

    def metrics(self, model: str = "specc") -> dict[str, float]:
        """Values of specc's metrics by name, with labels other than the model's own after it."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            text = response.read().decode()
        values = {}
        for name, labels, value in re.findall(r"^specc:(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if found.pop("model") == model:
                rest = [f"{k}={v}" for k, v in found.items() if k in ("position", "plan")]
                values[" ".join([name, *rest])] = float(value)
        return values

    def wait_for(self, condition: Any, timeout_s: float = 10.0) -> bool:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.02)
        return bool(condition())

    def stubs(self) -> list[int]:
        """Process ids of the model's Python processes."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, rest = path.read_text().rsplit(")", 1)
            except OSError:
                continue
            if "triton_python" in name and int(rest.split()[1]) == self.process.pid:
                pids.append(int(path.parent.name))
        return pids

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/health/ready", timeout=2)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        self.close()
        raise RuntimeError(f"the server is not ready\n{self.log}")


def import_client() -> Any:
    """`tritonclient.grpc`, from a directory that is no part of the environment."""
    path = str(ROOT / "client")
    sys.path.append(path)
    try:
        import tritonclient.grpc

        return tritonclient.grpc
    finally:
        sys.path.remove(path)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()
