"""What a result of the GPU check depends on: the machine, its versions, and the source."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.gpu.importable import ROOT

LIMIT_S = 90.0
FOLDERS = ("specc", "passes", "runtime", "kernels", "tests/kernels", "examples/pair")
FILES = (
    "tests/conftest.py", "tests/mixed_sampling.py", "tests/models.py", "tests/near_ties.py",
    "tests/measure/attention_cuda.py",
)  # fmt: skip
SUFFIXES = (".py", ".json", ".jsonl", ".safetensors")
SANITIZER = "compute-sanitizer"


class NoDevice(Exception):
    """There is no GPU that torch can use; the message says what was found."""


def device_facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """Name, capability, memory and versions, found by a process of its own: it may hang or crash.

    Raises:
        NoDevice: there is none.
    """
    command = [sys.executable, "-P", "-m", "tests.gpu.facts"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=dict(environment)
        )
    except subprocess.TimeoutExpired as error:
        raise NoDevice(f"torch did not answer within {LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        raise NoDevice(done.stderr.strip()[-500:] or f"exit status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found.pop("reason", None):
        raise NoDevice("no GPU that torch can use")
    return found


def source_facts() -> dict[str, Any]:
    """The commit where git knows it, and a digest of what is checked."""
    done = None
    if shutil.which("git"):
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True)
    commit = done.stdout.strip() if done is not None and done.returncode == 0 else None
    files = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts
    ]
    files += [ROOT / name for name in FILES]
    return {"commit": commit, "source": digest(files)}


def digest(files: Iterable[Path]) -> str:
    """Of the names and the content of files in this repository."""
    found = hashlib.sha256()
    for path in sorted(files):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
    return found.hexdigest()


def sanitizer() -> str | None:
    """Where compute-sanitizer is; CUDA's folders are often not on the path."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [f"{home}/{name}" for home in homes if home for name in ("bin", "compute-sanitizer")]
    path = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    return shutil.which(SANITIZER, path=path)


def main() -> None:
    import torch

    if not torch.cuda.is_available():
        print(json.dumps({"reason": "none"}))
        return
    properties = torch.cuda.get_device_properties(0)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["cuda"] = torch.version.cuda
    for name in ("triton", "transformers", "pytest"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    found = {
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cores": os.cpu_count(),
        "versions": versions,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
