"""The little of pytest that kernel tests use, for machines that have none of it."""

from __future__ import annotations

import contextlib
import importlib.machinery
import inspect
import math
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """Raised by `pytest.skip`."""


class Failed(AssertionError):
    """Raised by `pytest.fail`, and where an expected exception does not come."""


@dataclass(frozen=True)
class Mark:
    """What `pytest.mark.name` is, and makes of a function."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):
            return _decorate(args[0], self)
        made = Mark(self.name, args, kwargs)

        def decorate(function: Any) -> Any:
            return _decorate(function, made)

        decorate.mark = made  # type: ignore[attr-defined]
        return decorate


def _decorate(function: Any, mark: Mark) -> Any:
    function.marks = [*getattr(function, "marks", []), mark]
    return function


class _Marks:
    def __getattr__(self, name: str) -> Mark:
        return Mark(name)


@dataclass(frozen=True)
class Param:
    """`pytest.param`."""

    values: tuple[Any, ...]
    id: str | None = None
    marks: tuple[Mark, ...] = ()


def _param(*values: Any, id: str | None = None, marks: Any = ()) -> Param:
    marks = marks if isinstance(marks, list | tuple) else (marks,)
    # what has arguments is ready to decorate a function
    return Param(values, id, tuple(getattr(mark, "mark", mark) for mark in marks))


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
    def __init__(self, value: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.value = value
        self.rel = 1e-6 if rel is None and abs is None else rel or 0.0
        self.abs = 1e-12 if abs is None else abs

    def __eq__(self, other: Any) -> bool:
        if isinstance(self.value, list | tuple):
            pairs = zip(self.value, other, strict=False)
            return len(self.value) == len(other) and all(self._is_close(a, b) for a, b in pairs)
        return self._is_close(self.value, other)

    def _is_close(self, wanted: float, found: Any) -> bool:
        # of what is wanted, not of the larger: as pytest does
        return wanted == found or math.isclose(
            wanted, found, rel_tol=0.0, abs_tol=max(self.rel * abs(wanted), self.abs)
        )

    __hash__ = None  # type: ignore[assignment]


class MonkeyPatch:
    """Changes that `undo` takes back, the last one first."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    @classmethod
    @contextlib.contextmanager
    def context(cls) -> Iterator[MonkeyPatch]:
        patch = cls()
        try:
            yield patch
        finally:
            patch.undo()

    def setattr(self, target: Any, name: Any, value: Any = None, raising: bool = True) -> None:
        """With an object and a name, or with a dotted name and the value in place of the name."""
        if isinstance(target, str):
            path, _, attribute = target.rpartition(".")
            target, name, value = importlib.import_module(path), attribute, name
        if raising and not hasattr(target, name):
            raise AttributeError(f"{target!r} has no attribute {name!r}")
        own = inspect.getattr_static(target, name, _ABSENT)
        if name not in getattr(target, "__dict__", {name: own}):
            # inherited: taking it back leaves nothing behind
            own = _ABSENT
        self._stack.callback(_restore_attribute, target, name, own)
        setattr(target, name, value)

    def delattr(self, target: Any, name: str, raising: bool = True) -> None:
        if not hasattr(target, name):
            if raising:
                raise AttributeError(name)
            return
        self._stack.callback(setattr, target, name, inspect.getattr_static(target, name))
        delattr(target, name)

    def setitem(self, mapping: Any, name: Any, value: Any) -> None:
        self._stack.callback(_restore_item, mapping, name, mapping.get(name, _ABSENT))
        mapping[name] = value

    def delitem(self, mapping: Any, name: Any, raising: bool = True) -> None:
        if name not in mapping and not raising:
            return
        self._stack.callback(_restore_item, mapping, name, mapping[name])
        del mapping[name]

    def setenv(self, name: str, value: str, prepend: str | None = None) -> None:
        if prepend is not None and name in os.environ:
            value = value + prepend + os.environ[name]
        self.setitem(os.environ, name, value)

    def delenv(self, name: str, raising: bool = True) -> None:
        self.delitem(os.environ, name, raising)

    def syspath_prepend(self, path: Any) -> None:
        self._stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
        sys.path.insert(0, str(path))

    def chdir(self, path: Any) -> None:
        self._stack.callback(os.chdir, Path.cwd())
        os.chdir(path)

    def undo(self) -> None:
        self._stack.close()


_ABSENT = object()


def _restore_attribute(target: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(target, name)
    else:
        setattr(target, name, value)


def _restore_item(mapping: Any, name: Any, value: Any) -> None:
    if value is _ABSENT:
        mapping.pop(name, None)
    else:
        mapping[name] = value


class TempPathFactory:
    """Folders that live as long as the process's other temporary files."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._count = 0

    def mktemp(self, name: str, numbered: bool = True) -> Path:
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="specc-tests-"))
        self._count += 1
        path = self._root / (f"{name}{self._count}" if numbered else name)
        path.mkdir()
        return path


def _fixture(function: Any = None, **options: Any) -> Any:
    def decorate(inner: Any) -> Any:
        inner.fixture = options
        return inner

    return decorate(function) if function is not None else decorate


def _skip(reason: str = "", **_: Any) -> None:
    raise Skipped(reason)


def _fail(reason: str = "", **_: Any) -> None:
    raise Failed(reason)


def _importorskip(name: str, **_: Any) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(str(error)) from error


@_fixture
def monkeypatch() -> Iterator[MonkeyPatch]:
    with MonkeyPatch.context() as patch:
        yield patch


@_fixture(scope="session")
def tmp_path_factory() -> TempPathFactory:
    return TempPathFactory()


@_fixture
def tmp_path(tmp_path_factory: TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("test")


BUILT_IN = {f.__name__: f for f in (monkeypatch, tmp_path_factory, tmp_path)}


@dataclass(frozen=True)
class Node:
    """A test, as fixtures know it."""

    nodeid: str


@dataclass(frozen=True)
class Request:
    """What asks for a fixture: of pytest's, the test alone."""

    node: Node


def install() -> None:
    """Make `import pytest` give what is here; call it before any test file is imported."""
    module: Any = types.ModuleType("pytest")
    module.mark = _Marks()
    module.param = _param
    module.raises = _Raises
    module.fixture = _fixture
    module.skip = _skip
    module.fail = _fail
    module.importorskip = _importorskip
    module.approx = _Approx
    module.MonkeyPatch = MonkeyPatch
    module.TempPathFactory = TempPathFactory
    module.FixtureRequest = Request
    # libraries ask whether pytest is there
    module.__spec__ = importlib.machinery.ModuleSpec("pytest", None)
    sys.modules["pytest"] = module
