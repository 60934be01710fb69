"""The file of results: what became of each mutant, for readers and for the next run."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.mutants.mutant import Mutant
from tests.mutants.verdict import CAUGHT


class Results:
    """Results by name of the mutant, written after every one of them.

    Args:
        path: of the JSON file; None writes nothing.
        sources: `sources_digest` of the working tree.
        resume: whether what the file holds for the same sources is taken over. Those of other
            sources are hours of work: they are put aside, as `put_aside`.
        commit: that the working tree was made of, for people.
    """

    def __init__(
        self, path: Path | None, sources: str, resume: bool, commit: str | None = None
    ) -> None:
        self._path, self._sources, self._commit = path, sources, commit
        self._names: set[str] = set()
        self.put_aside: Path | None = None
        self.mutants: dict[str, dict[str, Any]] = {}
        self.sound: dict[str, float] = {}
        if resume and path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["sources"] == sources:
                self.mutants = {entry["name"]: entry for entry in found["mutants"]}
                self.sound = found["sound"]
            else:
                aside = path.with_name(f"{path.stem}-{found['sources']}{path.suffix}")
                self.put_aside = path.replace(aside)

    def is_known(self, mutant: Mutant) -> bool:
        """Whether this very mutant was caught, in these very sources."""
        entry = self.mutants.get(mutant.name)
        known = entry is not None and entry["digest"] == mutant.digest()
        return known and entry is not None and entry["outcome"] == CAUGHT

    def keep(self, mutants: Iterable[Mutant]) -> None:
        """Forget mutants that are no more, and tests that nobody names."""
        kept = {mutant.name: mutant for mutant in mutants}
        self._names = set(kept)
        tests = {test for mutant in kept.values() for test in mutant.tests}
        self.sound = {test: seconds for test, seconds in self.sound.items() if test in tests}
        self.mutants = {
            name: entry
            for name, entry in self.mutants.items()
            if name in kept and entry["digest"] == kept[name].digest()
        }

    def add(self, mutant: Mutant, outcome: str, by: list[str], seconds: float) -> None:
        """Note what became of a mutant: the cases that failed, or what there is to say."""
        self.mutants[mutant.name] = {
            "name": mutant.name,
            "file": mutant.file,
            "breaks": mutant.breaks,
            "outcome": outcome,
            "by": by,
            "seconds": round(seconds, 2),
            "digest": mutant.digest(),
        }
        self.write()

    def write(self) -> None:
        """Replace the file."""
        if self._path is None:
            return
        entries = [self.mutants[name] for name in sorted(self.mutants)]
        data = {
            "command": "make mutants",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {"python": platform.python_version(), "cpus": os.cpu_count()},
            "sources": self._sources,
            "commit": self._commit,
            # 0 of a whole run, which may have had several parts
            "not_run": len(self._names - set(self.mutants)),
            "outcomes": dict(Counter(entry["outcome"] for entry in entries)),
            "seconds": round(sum(entry["seconds"] for entry in entries), 1),
            "seconds_without_mutants": round(sum(self.sound.values()), 1),
            "mutants": entries,
            "sound": dict(sorted(self.sound.items())),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".part")
        draft.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        draft.replace(self._path)
