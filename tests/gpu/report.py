"""The JSON of a run on a GPU, written after every check: a run that is cut off leaves those."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Report:
    """What all parts found.

    Args:
        path: of the JSON file; its directory is made.
        facts: of the machine and its versions, in front of the parts.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.parts: dict[str, Part] = {}
        self._facts = dict(facts)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def has_failed(self) -> bool:
        return any(part.state == "failed" for part in self.parts.values())

    def write(self) -> None:
        parts = {name: part.to_json() for name, part in self.parts.items()}
        text = json.dumps(self._facts | parts, indent=1) + "\n"
        # beside and renamed: a run that is killed while it writes leaves the file of before
        beside = self.path.with_suffix(".part")
        beside.write_text(text, encoding="utf-8")
        beside.replace(self.path)

    def run(self, name: str, part: Callable[[Part], None]) -> None:
        """Run a part; what it does not catch itself fails it, and other parts go on."""
        found = self.parts[name] = Part(self)
        print(f"{name} …", flush=True)
        try:
            part(found)
        except Exception:
            found.fail("error", traceback.format_exc(limit=-6))
        found.end()
        print(f"{name}: {found.state} in {found.seconds} s", flush=True)


class Part:
    """What one part found: `running`, then `passed` unless a check failed or there was none."""

    def __init__(self, report: Report) -> None:
        self.state = "running"
        self._report = report
        self._begin = time.perf_counter()
        self._values: dict[str, Any] = {}
        self._has_failed = False
        self.seconds = 0.0

    def check(self, name: str, run: Callable[[], Any]) -> None:
        """Note what a check returns; one that raises is noted and fails the part, which goes on."""
        try:
            value = run()
        except Exception:
            self.fail(name, traceback.format_exc(limit=-6))
        else:
            self.note(name, value)

    def note(self, name: str, value: Any) -> None:
        """Add a value, or replace one."""
        self._values[name] = value
        self._write()

    def fail(self, name: str, value: Any) -> None:
        """Add what is wrong."""
        self._has_failed = True
        self.note(name, value)

    def skip(self, reason: str) -> None:
        """Say why there is nothing to check here."""
        self.state = "skipped"
        self.note("reason", reason)

    def end(self) -> None:
        if self._has_failed or not self._values:
            self.state = "failed"
        elif self.state == "running":
            self.state = "passed"
        self._write()

    def _write(self) -> None:
        self.seconds = round(time.perf_counter() - self._begin, 1)
        self._report.write()

    def to_json(self) -> dict[str, Any]:
        return {"state": self.state, "seconds": self.seconds} | self._values
