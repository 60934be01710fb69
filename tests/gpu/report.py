"""The JSON of the GPU check: what is known is in the file at once, whatever happens next.

    {"device": …, "versions": …, "source": …,            facts that earlier results must share
     "commands": {"A": {"state", "seconds", …}},
     "parts": {"kernels": {"test_rows": {"state", "seconds", "results": {name: {"state", …}}}}}}

States of tasks: `running`; `passed`; `failed` (a result failed, or the process crashed or hung);
`cut` (time ran out in it, and nothing had failed) and `dropped` (before it), which the next run
goes on with; `skipped` (nothing to check here, and `reason` says why); `not available` (this
machine refuses it, and the next one may not); `left` (not run).
Results are `passed`, `failed` or `skipped`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

DONE = ("passed", "skipped")
NOT_AVAILABLE = "not available"
# what has to be equal for a result to hold still
KEYS = ("source", "device", "versions")


class Report:
    """All that is known, and its file.

    Args:
        path: of the JSON file; its directory is made.
        facts: of the machine, its versions and the source; `KEYS` are among them.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.facts = dict(facts)
        self.commands: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, dict[str, dict[str, Any]]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def take_over(self, paths: Iterable[Path]) -> list[str]:
        """Take what earlier files of the same source, device and versions have.

        A task that is done is not run again; of the others, results that passed are kept.

        Returns:
            a line for each file that was looked at.
        """
        lines = []
        for path in dict.fromkeys(paths):
            try:
                earlier = json.loads(path.read_text(encoding="utf-8"))
                differ = [key for key in KEYS if earlier[key] != self.facts[key]]
                parts = earlier["parts"]
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                lines.append(f"{path}: not a report that can be read: {error!r}")
                continue
            if differ:
                lines.append(f"{path}: of another {', '.join(differ)}; nothing is taken from it")
                continue
            taken = sum(self._take(part, tasks) for part, tasks in parts.items())
            self.commands |= earlier.get("commands", {})
            lines.append(f"{path}: {taken} results that hold still")
        return lines

    def _take(self, part: str, tasks: Mapping[str, Mapping[str, Any]]) -> int:
        count = 0
        for name, found in tasks.items():
            if self.is_done(part, name):
                continue
            is_done = found["state"] in DONE
            kept = {
                key: value
                for key, value in found["results"].items()
                if is_done or value["state"] == "passed"
            }
            count += len(kept)
            # what was running or failed then is to be run again
            own = {**found, "results": kept} if is_done else {"state": "left", "results": kept}
            self.parts.setdefault(part, {})[name] = own
        return count

    def is_done(self, part: str, name: str) -> bool:
        return self.parts.get(part, {}).get(name, {}).get("state") in DONE

    def task(self, part: str, name: str) -> dict[str, Any]:
        """What is known of a task; changes to it are in the file after `write`."""
        empty: dict[str, Any] = {"state": "left", "results": {}}
        return self.parts.setdefault(part, {}).setdefault(name, empty)

    def keep_if(self, part: str, name: str, code: str) -> None:
        """Forget what is known of a task unless this code of the check found it."""
        if self.task(part, name).get("code", code) != code:
            del self.parts[part][name]
        self.task(part, name)["code"] = code

    def results(self) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
        """(part, task, name, result) of all that is known."""
        for part, tasks in self.parts.items():
            for task, found in tasks.items():
                for name, result in found["results"].items():
                    yield part, task, name, result

    def write(self) -> None:
        content = {**self.facts, "commands": self.commands, "parts": self.parts}
        # beside and renamed: a run that is killed while it writes leaves the file of before
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)
