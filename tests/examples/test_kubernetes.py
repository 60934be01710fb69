"""The Kubernetes manifest: its command runs here, and is probed and ended as a kubelet would."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.specc.server.serving import wait_for

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
MAIN = [sys.executable, "-P", "-c", "from specc.cli.main import main; main()"]


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """Kind → object."""
    text = (FOLDER / "specc.yaml").read_text(encoding="utf-8")
    return {item["kind"]: item for item in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


def seconds_of(option: str, args: list[str]) -> float:
    (value,) = [arg.partition("=")[2] for arg in args if arg.startswith(f"{option}=")]
    return float(value)


def test_names_meet(manifest: dict[str, Any], pod: dict[str, Any], container: Any) -> None:
    deployment, service = manifest["Deployment"]["spec"], manifest["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels == service["selector"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports.keys()
    probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["httpGet"]["port"] for probe in probes} <= ports.keys()
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    (claim,) = [v["persistentVolumeClaim"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claim["claimName"] == manifest["PersistentVolumeClaim"]["metadata"]["name"]


def test_there_is_time_to_drain(pod: dict[str, Any], container: Any) -> None:
    """A kubelet that kills before the drain ends would cut answers off."""
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = seconds_of("--drain-timeout", container["args"])
    assert pause + drain + 5 < pod["terminationGracePeriodSeconds"]


def test_cores_are_as_many_as_threads(container: Any) -> None:
    threads = seconds_of("--threads", container["args"])
    resources = container["resources"]
    assert float(resources["requests"]["cpu"]) == float(resources["limits"]["cpu"]) == threads


def test_the_image_has_what_the_command_needs(container: Any) -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r'"/opt/specc\[(.+)\]"', text)
    assert {"serve", "structured"} <= set(extras.split(","))
    # without torch of another version, and with the folders that the package is made of
    assert text.count("-c /opt/specc/constraints.txt") == 2
    assert re.findall(r"^COPY (\w+) /opt", text, re.MULTILINE) == [
        "specc",
        "passes",
        "runtime",
        "kernels",
    ]
    assert f"-t {container['image']} ." in text


@contextlib.contextmanager
def served(container: Any, engine: Path, cache: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """The container's process with its arguments, but for the engine, the port and the threads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = {"/engine": str(engine), "--host=0.0.0.0": "--host=127.0.0.1"}
    here |= {"--port=8000": f"--port={port}", "--threads=8": "--threads=1"}
    assert here.keys() <= set(container["args"])
    process = subprocess.Popen(
        [*MAIN, *(here.get(arg, arg) for arg in container["args"])],
        env={"SPECC_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_replica_starts_serves_drains_and_ends(
    container: Any, tiny_engine: Path, tmp_path: Path
) -> None:
    """What follows is a kubelet's life of a pod, probe by probe."""
    with (
        served(container, tiny_engine, tmp_path / "cache") as (process, base),
        httpx.Client(timeout=30, trust_env=False) as http,
    ):

        def status(probe: str) -> int:
            with contextlib.suppress(httpx.TransportError):
                return http.get(base + container[probe]["httpGet"]["path"]).status_code
            return 0

        startup = container["startupProbe"]
        most_s = startup["periodSeconds"] * startup["failureThreshold"]
        wait_for(lambda: status("startupProbe") == 200, "it does not start", min(most_s, 120))
        assert status("readinessProbe") == status("livenessProbe") == 200

        (name,) = [a.partition("=")[2] for a in container["args"] if "served-model-name" in a]
        body = {"model": name, "prompt": [1, 2, 3], "max_tokens": 90, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True, "temperature": 0}
        received: list[int] = []
        begun = threading.Event()

        def read() -> None:
            with http.stream("POST", f"{base}/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        received.extend(choice.get("token_ids") or ())
                        begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(30)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: status("readinessProbe") in (503, 0), "it stays ready")
        # what was begun is answered to its end
        reader.join(60)
        assert not reader.is_alive()
        assert len(received) == body["max_tokens"]
        assert process.wait(30) == 0
