"""The Dockerfile for NVIDIA's container says what pyproject.toml, constraints.txt and docs say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "examples" / "triton" / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCS = (ROOT / "docs" / "guide" / "triton-server.md").read_text(encoding="utf-8")


def instructions() -> list[str]:
    lines = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
    return "\n".join(lines).replace("\\\n", "").splitlines()


def argument(name: str) -> str:
    (value,) = re.findall(rf"^ARG {name}=(.+)$", TEXT, re.MULTILINE)
    return value


def test_python_is_one_that_specc_runs_on() -> None:
    low, high = re.fullmatch(
        r">=3\.(\d+),<3\.(\d+)", PROJECT["project"]["requires-python"]
    ).groups()
    minor = int(argument("PYTHON").removeprefix("3."))
    assert int(low) <= minor < int(high)


def test_the_tag_fits_the_numpy_of_the_constraints() -> None:
    """Python backends before 24.12 read tensors wrong with numpy 2."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (numpy,) = re.findall(r"^numpy==(\d+)\.", constraints, re.MULTILINE)
    year, month = map(int, argument("TRITON").split("."))
    assert int(numpy) < 2 or (year, month) >= (24, 12)
    assert re.search(r"^torch==", constraints, re.MULTILINE)
    assert f"tritonserver:{argument('TRITON')}-py3" in DOCS
    assert f"Python {argument('PYTHON')}" in DOCS


def test_everything_is_installed_with_the_constraints() -> None:
    installs = [line for line in instructions() if "pip install" in line]
    assert len(installs) == 2
    assert all("-c /opt/specc/constraints.txt" in line for line in installs)
    (extras,) = re.findall(r'"/opt/specc\[(.+)\]"', TEXT)
    assert (
        {"cuda", "structured"}
        <= set(extras.split(","))
        <= set(PROJECT["project"]["optional-dependencies"])
    )


def test_what_is_copied_is_the_whole_package() -> None:
    copied = [line.split()[1:-1] for line in instructions() if line.startswith("COPY")]
    names = {name for group in copied for name in group}
    assert all((ROOT / name).exists() for name in names)
    folders = set(PROJECT["tool"]["scikit-build"]["wheel"]["packages"].values())
    build = {"pyproject.toml", f"{PROJECT['build-system']['build-backend']}.py"}
    assert folders | build | {PROJECT["project"]["readme"]} <= names


def test_addresses_and_health() -> None:
    command = json.loads(re.search(r"^CMD (\[.*\])$", "\n".join(instructions()), re.M)[1])
    assert command[0] == "tritonserver"
    for service, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        assert f"--{service}-address=0.0.0.0" in command
        assert re.search(rf"^EXPOSE .*\b{port}\b", TEXT, re.MULTILINE)
        assert f"-p 127.0.0.1:{port}:{port}" in DOCS
    (check,) = [line for line in instructions() if line.startswith("HEALTHCHECK")]
    program = json.loads(check[check.index("[") :])
    compile(program[2], "health check", "exec")
    assert program[:2] == ["python3", "-c"]


@pytest.mark.parametrize("python", ["3.12", "3.10"])
def test_the_build_checks_its_python(python: str) -> None:
    """The program in the Dockerfile, with the version that it is told to find."""
    (line,) = [line for line in instructions() if "sys.version_info" in line]
    program = re.search(r'-c "(.*)"$', line)[1].replace("${PYTHON}", python)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    is_this = python == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (done.returncode == 0) is is_this
    assert is_this or f"needed: {python}" in done.stderr
