"""Runs test files where there is no pytest, with the little of it that kernel tests use.

A machine with a GPU may have torch and Triton and nothing else. `install` puts a module `pytest`
in place; `run_file` runs the tests of a file with the fixtures of the conftest files above it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import inspect
import itertools
import math
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """Raised by `pytest.skip`."""


class Failed(AssertionError):
    """Raised where an expected exception does not come."""


@dataclass(frozen=True)
class Outcome:
    """One test: `state` is passed, failed or skipped; `message` says why."""

    name: str
    state: str
    seconds: float
    message: str = ""


@dataclass(frozen=True)
class _Mark:
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):
            return _decorate(args[0], self)
        made = _Mark(self.name, args, kwargs)

        def decorate(function: Any) -> Any:
            return _decorate(function, made)

        decorate.mark = made  # type: ignore[attr-defined]
        return decorate


def _decorate(function: Any, mark: _Mark) -> Any:
    function.marks = [*getattr(function, "marks", []), mark]
    return function


class _Marks:
    def __getattr__(self, name: str) -> _Mark:
        return _Mark(name)


@dataclass(frozen=True)
class _Param:
    values: tuple[Any, ...]
    id: str | None = None
    marks: Any = ()


class _Raises(contextlib.AbstractContextManager):
    def __init__(self, kind: Any, match: str | None = None) -> None:
        self.kind, self.match = kind, match
        self.value: Any = None

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        if value is None:
            raise Failed(f"no {self.kind} was raised")
        if not isinstance(value, self.kind):
            return False
        if self.match is not None and not re.search(self.match, str(value)):
            raise Failed(f"{value!s} does not match {self.match}") from value
        self.value = value
        return True


class _Approx:
    def __init__(self, value: float, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.value, self.rel, self.abs = value, rel, abs

    def __eq__(self, other: Any) -> bool:
        return math.isclose(self.value, other, rel_tol=self.rel, abs_tol=self.abs)

    __hash__ = None  # type: ignore[assignment]


def _fixture(function: Any = None, **options: Any) -> Any:
    def decorate(inner: Any) -> Any:
        inner.fixture = options
        return inner

    return decorate(function) if function is not None else decorate


def _skip(reason: str = "", **_: Any) -> None:
    raise Skipped(reason)


def install() -> None:
    """Make `import pytest` give what is here; call it before any test file is imported."""
    module: Any = types.ModuleType("pytest")
    module.mark = _Marks()
    module.param = lambda *values, id=None, marks=(): _Param(values, id, marks)
    module.raises = _Raises
    module.fixture = _fixture
    module.skip = _skip
    module.approx = _Approx
    module.FixtureRequest = module.TempPathFactory = module.MonkeyPatch = object
    # libraries ask whether pytest is there
    module.__spec__ = importlib.machinery.ModuleSpec("pytest", None)
    sys.modules["pytest"] = module


def run_file(
    path: Path, root: Path, report: Callable[[Outcome], object] = lambda outcome: None
) -> list[Outcome]:
    """Run the tests of a file.

    Args:
        path: of the file.
        root: directory that `tests` lies in; conftest files between the two are read.
        report: called with each outcome.
    """
    parts = path.relative_to(root).with_suffix("").parts
    names = [".".join([*parts[:i], "conftest"]) for i in range(1, len(parts))]
    fixtures: dict[str, Any] = {}
    for name in names:
        if (root / Path(*name.split("."))).with_suffix(".py").is_file():
            fixtures |= _fixtures_of(importlib.import_module(name))
    module = importlib.import_module(".".join(parts))
    fixtures |= _fixtures_of(module)
    common = getattr(module, "pytestmark", [])
    common = [item.mark for item in (common if isinstance(common, list) else [common])]
    outcomes = []
    session: dict[str, Any] = {}
    for name, function in vars(module).items():
        if not name.startswith("test_") or not inspect.isfunction(function):
            continue
        marks = [*common, *getattr(function, "marks", [])]
        for label, values in _cases(marks):
            full = f"{path.stem}::{name}{label}"
            outcome = _run(full, function, values, marks, fixtures, session)
            outcomes.append(outcome)
            report(outcome)
    return outcomes


def _fixtures_of(module: Any) -> dict[str, Any]:
    found = vars(module).items()
    return {name: f for name, f in found if inspect.isfunction(f) and hasattr(f, "fixture")}


def _cases(marks: Sequence[_Mark]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every combination of the parametrizations, with its label."""
    axes = []
    for mark in marks:
        if mark.name != "parametrize":
            continue
        names, values = mark.args[:2]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        axis = []
        for index, value in enumerate(values):
            given = value if isinstance(value, _Param) else None
            row = given.values if given else (value if len(names) > 1 else (value,))
            label = given.id if given and given.id else str(index)
            axis.append((label, dict(zip(names, row, strict=True))))
        axes.append(axis)
    for combination in itertools.product(*axes):
        labels = "-".join(label for label, _ in combination)
        values = {key: value for _, row in combination for key, value in row.items()}
        yield (f"[{labels}]" if labels else ""), values


def _run(
    name: str,
    function: Any,
    values: dict[str, Any],
    marks: Sequence[_Mark],
    fixtures: dict[str, Any],
    session: dict[str, Any],
) -> Outcome:
    begin = time.perf_counter()
    state, message = "passed", ""
    try:
        for mark in marks:
            if mark.name == "skipif" and mark.args[0]:
                raise Skipped(mark.kwargs.get("reason", ""))
        with contextlib.ExitStack() as stack:
            made: dict[str, Any] = dict(values)
            wanted = [key for key, item in fixtures.items() if item.fixture.get("autouse")]
            wanted += [key for mark in marks if mark.name == "usefixtures" for key in mark.args]
            for key in [*wanted, *inspect.signature(function).parameters]:
                _make(key, made, fixtures, session, stack)
            function(**{key: made[key] for key in inspect.signature(function).parameters})
    except Skipped as reason:
        state, message = "skipped", str(reason)
    except Exception:
        state, message = "failed", traceback.format_exc(limit=-4)
    return Outcome(name, state, time.perf_counter() - begin, message)


def _make(
    key: str,
    made: dict[str, Any],
    fixtures: dict[str, Any],
    session: dict[str, Any],
    stack: contextlib.ExitStack,
) -> None:
    if key in made:
        return
    if key in session:
        made[key] = session[key]
        return
    if key not in fixtures:
        raise LookupError(f"no fixture {key}")
    function = fixtures[key]
    parameters = inspect.signature(function).parameters
    for other in parameters:
        _make(other, made, fixtures, session, stack)
    given = {other: made[other] for other in parameters}
    if inspect.isgeneratorfunction(function):
        generator = function(**given)
        made[key] = next(generator)
        # torn down as after a test that passed: a failure is not the fixture's business
        stack.callback(next, generator, None)
    else:
        made[key] = function(**given)
        if function.fixture.get("scope") in ("session", "module"):
            session[key] = made[key]
