"""Tensors of the device that is told apart: what a GPU would refuse is refused, and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import tasks

ROOT = Path(__file__).resolve().parents[2]
SETUP = """
import torch
import triton
import triton.language as tl
from tests.gpu import told_apart

told_apart.prepare()


@triton.jit
def add_kernel(x, y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o) + tl.load(y + o))


device = torch.device("cuda")
a, b = torch.arange(8.0, device=device), torch.ones(8).to("cuda")
host = torch.full((8,), 2.0)
index = torch.tensor([1, 3])
"""
# what is right on a GPU, and the values that it leaves
RIGHT = {
    "operators": ("c = (a + b) * 2 + torch.tensor(1.0)", "c", "[3.0, 5.0, 7.0, 9.0]"),
    "in place": ("a.add_(b); a[2:] = 0; a[0].fill_(7)", "a", "[7.0, 2.0, 0.0, 0.0]"),
    "copies": ("a.copy_(host); host.copy_(b); a += host.cuda()", "a", "[3.0, 3.0, 3.0, 3.0]"),
    "slices": ("a[1:3] = host[:2]", "a", "[0.0, 2.0, 2.0, 3.0]"),
    "indices": ("c = a[index] + a[index.to(a.device)]", "c", "[2.0, 6.0]"),
    "to the host": ("c = a.cpu() + host; assert c.numpy()[0] == 2", "c", "[2.0, 3.0, 4.0, 5.0]"),
    "numbers": ("c = a * int(a.sum()) if a[1] == 1 and a.any() else a", "c", "[0.0, 28.0, 56.0"),
    "guards": (
        "c = torch.where(~(a > 2), a.new_tensor([2.0]), 0.0)[a[1].int() :]",
        "c",
        "[2.0, 2.0, 0.0",
    ),
    "operators of graphs": (
        "c = torch.ops.aten.where.ScalarOther(a > 5, a, 0.0)",
        "c",
        "[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 6.0",
    ),
    "views": ("c = a.view(2, 4).T.contiguous(); c[0] = 5", "c[:2, 0]", "[5.0, 1.0]"),
    "as another": ("c = torch.zeros_like(a) + a.new_ones(8) + host.to(a)", "c", "[3.0, 3.0, 3.0"),
    "kernels": ("add_kernel[(1,)](a, b, 8)", "b", "[1.0, 2.0, 3.0, 4.0]"),
}
WRONG = {
    "operators": ("a + host", "found at least two devices"),
    "the host's first": ("torch.cat([host, a])", "found at least two devices"),
    "in place": ("host.add_(a)", "found at least two devices"),
    "choices": ("torch.where(a > 2, host, a)", "found at least two devices"),
    "stacks": ("torch.stack([a, host])", "found at least two devices"),
    "the device's indices": ("host[index.cuda()]", "found at least two devices"),
    "values at indices": ("a[index] = host[:2]", "found at least two devices"),
    "kernels": ("add_kernel[(1,)](a, host, 8)", "cannot be accessed from Triton"),
    "numpy": ("a.numpy()", "can't convert cuda:0 device type tensor"),
}


def run(code: str, directory: Path, setup: str = SETUP) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which stays changed; Triton reads its kernels from a file."""
    (directory / "run.py").write_text(setup + code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, "-P", str(directory / "run.py")],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    """Lines of one process: a line for each that is right, and one for each that is wrong."""
    code = ""
    for work, value, _ in RIGHT.values():
        code += "a, b = torch.arange(8.0, device=device), torch.ones(8).to('cuda')\n"
        code += f"host = torch.full((8,), 2.0)\n{work}\nprint({value}.tolist())\n"
        code += "assert a.device == b.device == torch.device('cuda', 0)\n"
    code += "a, b = torch.arange(8.0, device=device), torch.ones(8).to('cuda')\n"
    code += "host = torch.full((8,), 2.0)\n"
    for work, _ in WRONG.values():
        code += f"try:\n    {work}\nexcept Exception as error:\n    print(error)\n"
        code += "else:\n    print('nothing')\n"
    done = run(code, tmp_path_factory.mktemp("told_apart"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(RIGHT) + len(WRONG)
    return lines


@pytest.mark.slow
def test_what_a_gpu_allows(printed):
    for line, (_, _, wanted) in zip(printed[: len(RIGHT)], RIGHT.values(), strict=True):
        assert line.startswith(wanted.rstrip("]"))


def test_what_a_gpu_refuses(printed):
    for line, (_, wanted) in zip(printed[len(RIGHT) :], WRONG.values(), strict=True):
        assert wanted in line


# every test of the kernels up to what it makes of its results; races need memory that is the
# interpreter's own
GIVEN = """
import inspect, json
import pytest
from tests.gpu import tasks, told_apart
from tests.gpu.importable import ROOT

told_apart.prepare(is_launched=False)
LARGE = tasks.large_cases()
VALUES = {"device": told_apart.PLACE, "watched_launches": "none"}
found, counts = {}, {}


class Plugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if (value := VALUES.get(fixturedef.argname)) is not None:
            fixturedef.cached_result = (value, fixturedef.cache_key(request), None)
        return value

    def pytest_collection_modifyitems(self, items):
        items[:] = [
            item for item in items
            if "device" in inspect.signature(item.function).parameters
            and item.name.partition("[")[2].rstrip("]") not in LARGE
        ]
        for item in items:
            counts[item.path.stem] = counts.get(item.path.stem, 0) + 1

    def pytest_runtest_logreport(self, report):
        if report.failed:
            found[report.nodeid] = report.longreprtext[-400:]


options = ["--import-mode=importlib", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
options += ["-c", str(ROOT / "pyproject.toml"), "--tb=short"]
pytest.main([*options, *map(str, tasks.kernel_files())], plugins=[Plugin()])
print(json.dumps([counts, found]))
"""
REFUSALS = ("same device", "cannot be accessed from Triton", "device type tensor")


@pytest.mark.slow
def test_kernels_are_given_tensors_of_the_device(tmp_path):
    """Nothing is computed, so that tests fail over values, and none over where its tensors lie."""
    done = run(GIVEN, tmp_path, "")
    assert done.returncode == 0, done.stderr
    counts, found = json.loads(done.stdout.splitlines()[-1])
    assert sum(counts.values()) > 500
    refused = {name: x for name, x in found.items() if any(word in x for word in REFUSALS)}
    assert refused == {}
    # what is right without a result: shapes, refusals of bad inputs
    assert 0 < len(found) < sum(counts.values())


@pytest.mark.slow
def test_parts_of_the_check_tell_the_device_from_the_host(tmp_path):
    """Steps, replays, kinds; without what computes with transformers, or needs a true replay."""
    command = [sys.executable, "-P", str(ROOT / "tests/gpu/rehearsal.py"), "A"]
    command += ["--device", "apart", "--output", str(tmp_path / "report.json")]
    # two cores take longer over interpreted kernels than a GPU over compiled ones
    command += ["--scale", "5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    planned: dict[str, set[str]] = {}
    for stage in tasks.commands()["A"]:
        for task in stage.tasks:
            planned.setdefault(task.part, set()).add(task.name)
    planned["replay"].remove("unsure-drafts")
    del planned["output"]
    assert {part: set(found) for part, found in parts.items()} == planned
