"""Files of tests that something has changed for since all their tests last passed, on this machine.

    python -P tests/changed.py            their names, for pytest
    pytest --record …                     notes the files whose tests all pass

A note holds a hash of all that the file depends on (`tests/closure.py`), and modules beyond that
which a run imported. Files that were chosen from, or changed while tests ran, are not noted.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

import pytest

from tests.closure import Closures
from tests.kept import ROOT

NOTES = ROOT / "build" / "passed.json"
_CACHE = ROOT / "build" / "closures.json"
# of pytest, which leave tests of a file out
_CHOICES = ("keyword", "lf", "last_failed", "part", "deselect", "stepwise")


class Note(TypedDict):
    hash: str
    more: list[str]


def read_notes(path: Path) -> dict[str, Note]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def changed(closures: Closures, notes: dict[str, Note]) -> list[str]:
    """Files of tests that are not known to pass as everything is now."""
    return [
        file
        for file in closures.tests()
        if file not in notes or notes[file]["hash"] != closures.hash(file, notes[file]["more"])
    ]


class Recorder:
    """Notes the files whose tests all pass, in the process that hears of all of them."""

    def __init__(self, root: Path, notes: Path, cache: Path | None) -> None:
        self._root, self._notes, self._cache = root, notes, cache
        closures = Closures(root, cache)
        self._begun = {file: closures.hash(file) for file in closures.tests()}
        self._tests: dict[str, set[str]] = defaultdict(set)
        self._passed: dict[str, set[str]] = defaultdict(set)
        self._failed: set[str] = set()
        self._imported: dict[str, set[str]] = defaultdict(set)

    def _collected(self, ids: Iterable[str]) -> None:
        for test in ids:
            self._tests[test.partition("::")[0]].add(test)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected(item.nodeid for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.failed:
            self._failed.add(file)
        if report.when == "teardown":
            self._passed[file].add(report.nodeid)
            for key, value in report.user_properties:
                if key == "imported":
                    self._imported[file] |= {*value}

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        options = session.config.option
        chosen = any(getattr(options, name, None) for name in _CHOICES)
        # 5: files that have slow tests alone
        if exitstatus not in (0, 1, 5) or chosen or options.markexpr not in ("", "not slow"):
            return
        words = session.config.args
        if any("::" in word for word in words):
            return
        closures, notes = Closures(self._root, self._cache), read_notes(self._notes)
        for file in closures.tests():
            path = self._root / file
            asked = any(path.is_relative_to(Path(self._root, word).resolve()) for word in words)
            passed = self._tests[file] == self._passed[file]
            if file in self._failed:
                notes.pop(file, None)
            elif asked and passed and closures.hash(file) == self._begun.get(file):
                seen = self._imported[file] | {*notes.get(file, {"more": []})["more"]}
                more = sorted(seen - closures.modules(file))
                notes[file] = Note(hash=closures.hash(file, more), more=more)
        notes = {file: notes[file] for file in sorted(notes) if (self._root / file).is_file()}
        self._notes.parent.mkdir(parents=True, exist_ok=True)
        self._notes.write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")


class Imports:
    """Tells the recorder which modules tests import, in the process that runs them."""

    def pytest_collection_finish(self) -> None:
        # what files of tests import themselves can be read in them
        self._known = set(sys.modules)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if len(sys.modules) != len(self._known):
            new = set(sys.modules) - self._known
            self._known |= new
            named = sorted(name for name in new if name.startswith(("specc.", "tests.")))
            if named:
                item.user_properties.append(("imported", named))


def register(config: Any) -> None:
    """Add to pytest what `--record` asks for."""
    config.pluginmanager.register(Imports())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(ROOT, NOTES, _CACHE))


if __name__ == "__main__":
    print(*changed(Closures(cache=_CACHE), read_notes(NOTES)), sep="\n")
