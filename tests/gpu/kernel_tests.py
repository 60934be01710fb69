"""One file of kernel tests in a process, by pytest.

Every test ends with a wait for the device, so that what fails there fails the test that did it.
Once the device is lost the process ends, and another one goes on with the tests that are left.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.count_compiles import count_compiles
from tests.gpu.importable import ROOT
from tests.gpu.results import APART, LONGEST, Device, Results

IMPORT = "import of the file"


def run(
    results: Results,
    device: Device,
    path: str,
    shard: Sequence[int] = (0, 1),
    left_out: Sequence[str] = (),
) -> None:
    """Run the tests of a file.

    Args:
        results: get a result for each test, under its name in pytest without the file.
        device: that is waited for after each test.
        shard: (index, count): every count-th test alone.
        left_out: tests of these names, and those whose parameters have one, are not run.
    """
    if device.kind == APART:
        # before the tests ask where they run
        device.prepare()
    count = count_compiles(device)
    results.note(path=Path(path).name)
    choice = Choice(results, shard, left_out)
    _run_pytest(results, device, Path(path), choice)
    results.note(num_tests=choice.num_tests, compiles=count())


class Choice:
    """Which tests of a file are run here; they are asked for in the order of the file."""

    def __init__(self, results: Results, shard: Sequence[int], left_out: Sequence[str]) -> None:
        self.num_tests = 0
        self._results = results
        self._index, self._count = shard
        self._left_out = left_out

    def takes(self, name: str) -> bool:
        function, _, label = name.partition("[")
        if function in self._left_out or label.rstrip("]") in self._left_out:
            return False
        self.num_tests += 1
        is_mine = (self.num_tests - 1) % self._count == self._index
        return is_mine and name not in self._results.known


def _run_pytest(results: Results, device: Device, path: Path, choice: Choice) -> None:
    import pytest

    plugin = _Plugin(results, device, choice)
    options = ["--import-mode=importlib", "-q", "-s", "-p", "no:cacheprovider"]
    options += ["-o", "addopts=", "-c", str(ROOT / "pyproject.toml"), "--tb=short"]
    status = pytest.main([*options, str(path)], plugins=[plugin])
    # nothing collected is what is left when all is known
    if status not in (0, 1, 5) and not plugin.has_failed:
        raise RuntimeError(f"pytest ended with status {int(status)}")


class _Plugin:
    """Tells results of pytest as they come."""

    def __init__(self, results: Results, device: Device, choice: Choice) -> None:
        self.has_failed = False
        self._results = results
        self._device = device
        self._choice = choice
        self._worst: Any = None
        self._seconds = 0.0

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.has_failed = True
            self._results.end(IMPORT, "failed", str(report.longrepr)[-LONGEST:])

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        items[:] = [item for item in items if self._choice.takes(item.name)]
        for item in items:
            item.obj = _waiting(item.obj, self._device)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._worst, self._seconds = None, 0.0
        self._results.begin(nodeid.partition("::")[2])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds += report.duration
        if self._worst is None or (report.failed and not self._worst.failed) or report.skipped:
            self._worst = report

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        name, worst = nodeid.partition("::")[2], self._worst
        if worst.failed:
            self._results.end(name, "failed", worst.longreprtext[-LONGEST:], self._seconds)
            if self._device.is_lost():
                self._results.lose()
        elif worst.skipped:
            reason = worst.longrepr[2] if isinstance(worst.longrepr, tuple) else worst.longrepr
            self._results.end(name, "skipped", str(reason), self._seconds)
        else:
            self._results.end(name, "passed", seconds=self._seconds)


def _waiting(function: Any, device: Device) -> Any:
    """A test that waits for the device at its end."""

    @functools.wraps(function)
    def test(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        device.synchronize()

    return test
