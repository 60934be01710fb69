"""Runs test files where there is no pytest, with the little of it that kernel tests use.

A machine with a GPU may have torch and Triton and nothing else. `install` puts a module `pytest`
in place; `load` and `run` run the tests of a file with the fixtures of the conftest files above
it. Tests have the names that pytest gives them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.stub_pytest import BUILT_IN, Mark, Node, Param, Request, Skipped, install

__all__ = ["Outcome", "Test", "install", "load", "run", "text_of"]


@dataclass(frozen=True)
class Outcome:
    """One test: `state` is passed, failed or skipped; `message` says why."""

    name: str
    state: str
    seconds: float
    message: str = ""


@dataclass(frozen=True)
class Test:
    """A function with values for its parameters."""

    name: str
    function: Any
    values: dict[str, Any]
    marks: Sequence[Mark]


@dataclass(frozen=True)
class File:
    tests: Sequence[Test]
    fixtures: dict[str, Any]


def load(path: Path, root: Path) -> File:
    """Import a file, and list its tests.

    Args:
        path: of the file.
        root: directory that `tests` lies in; conftest files between the two are read. A file that
            lies elsewhere is imported by itself, with the conftest of `tests`.
    """
    fixtures: dict[str, Any] = dict(BUILT_IN)
    if path.is_relative_to(root):
        parts = path.relative_to(root).with_suffix("").parts
        names = [".".join([*parts[:i], "conftest"]) for i in range(1, len(parts))]
        for name in names:
            if (root / Path(*name.split("."))).with_suffix(".py").is_file():
                fixtures |= _fixtures_of(importlib.import_module(name))
        module = importlib.import_module(".".join(parts))
    else:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    fixtures |= _fixtures_of(module)
    common = getattr(module, "pytestmark", [])
    common = [
        getattr(item, "mark", item) for item in (common if isinstance(common, list) else [common])
    ]
    tests = []
    for name, function in vars(module).items():
        if not name.startswith("test_") or not inspect.isfunction(function):
            continue
        marks = [*getattr(function, "marks", []), *common]
        for label, values, more in _cases(marks):
            tests.append(Test(f"{name}{label}", function, values, [*marks, *more]))
    return File(tests, fixtures)


def run(
    file: File,
    report: Callable[[Outcome], object],
    takes: Callable[[str], bool] = lambda name: True,
    synchronize: Callable[[], object] = lambda: None,
) -> None:
    """Run the tests of a file.

    Args:
        file: loaded.
        report: called with each outcome.
        takes: called with the name of each test before it runs; where it says no, it does not.
        synchronize: called at the end of each test, as a part of it.
    """
    session: dict[str, Any] = {}
    with contextlib.ExitStack() as last:
        for test in file.tests:
            if takes(test.name):
                report(_run(test, file.fixtures, session, last, synchronize))


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-6))


def _fixtures_of(module: Any) -> dict[str, Any]:
    found = vars(module).items()
    return {name: f for name, f in found if inspect.isfunction(f) and hasattr(f, "fixture")}


def _cases(marks: Sequence[Mark]) -> Iterator[tuple[str, dict[str, Any], list[Mark]]]:
    """Every combination of the parametrizations: its label, its values, and marks of its own."""
    axes = []
    for mark in marks:
        if mark.name == "parametrize":
            axes.append(_axis(*mark.args, **mark.kwargs))
    for combination in itertools.product(*axes):
        labels = "-".join(label for label, _, _ in combination)
        values = {key: value for _, row, _ in combination for key, value in row.items()}
        more = [item for _, _, own in combination for item in own]
        yield (f"[{labels}]" if labels else ""), values, more


def _axis(
    argnames: Any, argvalues: Iterable[Any], ids: Any = None, **_: Any
) -> list[tuple[str, dict[str, Any], list[Mark]]]:
    """(label, values by name, marks) of one parametrization."""
    names = [n.strip() for n in argnames.split(",")] if isinstance(argnames, str) else argnames
    listed = None if ids is None or callable(ids) else list(ids)
    axis, labels = [], []
    for index, value in enumerate(argvalues):
        given = value if isinstance(value, Param) else None
        row = given.values if given else (value if len(names) > 1 else (value,))
        if given and given.id is not None:
            label = _escaped(given.id)
        elif listed is not None and listed[index] is not None:
            label = _escaped(str(listed[index]))
        else:
            function = ids if callable(ids) else lambda value: None
            label = "-".join(
                _label(value, name, index, function) for name, value in zip(names, row, strict=True)
            )
        labels.append(label)
        marks = [] if given is None else list(given.marks)
        axis.append((dict(zip(names, row, strict=True)), marks))
    return [(label, *rest) for label, rest in zip(_unique(labels), axis, strict=True)]


def _label(value: Any, name: str, index: int, function: Callable[[Any], Any]) -> str:
    """As pytest does."""
    own = function(value)
    for found in (own, value):
        if isinstance(found, str):
            return _escaped(found)
        if found is None and found is own and value is not None:
            continue
        if found is None or isinstance(found, bool | int | float | complex):
            return str(found)
        if isinstance(getattr(found, "__name__", None), str):
            return found.__name__
    return f"{name}{index}"


def _escaped(label: str) -> str:
    return label.encode("unicode_escape").decode("ascii")


def _unique(labels: list[str]) -> list[str]:
    counts, seen = Counter(labels), Counter[str]()
    made = []
    for label in labels:
        if counts[label] > 1:
            separator = "_" if label[-1:].isdigit() else ""
            made.append(f"{label}{separator}{seen[label]}")
            seen[label] += 1
        else:
            made.append(label)
    return made


def _run(
    test: Test,
    fixtures: dict[str, Any],
    session: dict[str, Any],
    last: contextlib.ExitStack,
    synchronize: Callable[[], object],
) -> Outcome:
    begin = time.perf_counter()
    state, message = "passed", ""
    try:
        for mark in test.marks:
            if mark.name == "skip" or (mark.name == "skipif" and mark.args[0]):
                raise Skipped(mark.kwargs.get("reason", ""))
        with contextlib.ExitStack() as stack:
            made: dict[str, Any] = dict(test.values)
            wanted = [key for key, item in fixtures.items() if item.fixture.get("autouse")]
            wanted += [n for mark in test.marks if mark.name == "usefixtures" for n in mark.args]
            parameters = inspect.signature(test.function).parameters
            made["request"] = Request(Node(test.name))
            for key in [*wanted, *parameters]:
                _make(key, made, fixtures, session, stack, last)
            test.function(**{key: made[key] for key in parameters})
            synchronize()
    except Skipped as reason:
        state, message = "skipped", str(reason)
    except Exception as error:
        state, message = "failed", text_of(error)
    return Outcome(test.name, state, time.perf_counter() - begin, message)


def _make(
    key: str,
    made: dict[str, Any],
    fixtures: dict[str, Any],
    session: dict[str, Any],
    stack: contextlib.ExitStack,
    last: contextlib.ExitStack,
) -> None:
    if key in made:
        return
    if key in session:
        made[key] = session[key]
        return
    if key not in fixtures:
        raise LookupError(f"no fixture {key}")
    function = fixtures[key]
    if "params" in function.fixture:
        raise LookupError(f"fixture {key} has params, which only pytest knows")
    parameters = inspect.signature(function).parameters
    for other in parameters:
        _make(other, made, fixtures, session, stack, last)
    given = {other: made[other] for other in parameters}
    is_lasting = function.fixture.get("scope") in ("session", "module", "package")
    if inspect.isgeneratorfunction(function):
        generator = function(**given)
        made[key] = next(generator)
        # torn down as after a test that passed: a failure is not the fixture's business
        (last if is_lasting else stack).callback(next, generator, None)
    else:
        made[key] = function(**given)
    if is_lasting:
        session[key] = made[key]
