"""Files of tests in the order in which workers take them: those that take longest come first.

    python -P tests/longest_first.py junit.xml [more.xml]

writes `tests/file_seconds.json` anew from reports of pytest (`--junitxml`). A file is the unit that
`make test` gives to a worker: begun last, a long one would run alone while the other workers wait.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("file_seconds.json")
# shorter ones come in any order, after the others
LEAST_S = 2.0


class Test(Protocol):
    nodeid: str


def read_table(path: Path = TABLE) -> dict[str, float]:
    """File, relative to the checkout → seconds of its tests of the default tier."""
    table: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return table


def longest_first(tests: Sequence[Any], seconds: dict[str, float]) -> list[Any]:
    """The same tests, those of a file together and in their order; unknown files come last."""
    files = list(dict.fromkeys(_file(test) for test in tests))
    files.sort(key=lambda file: -seconds.get(file, 0.0))
    rank = {file: i for i, file in enumerate(files)}
    return sorted(tests, key=lambda test: rank[_file(test)])


def measured(reports: Sequence[Path]) -> dict[str, float]:
    """The table that reports of pytest give."""
    seconds: Counter[str] = Counter()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            parts = case.attrib["classname"].split(".")
            # a class of tests stands after its file
            while parts and not (ROOT / "/".join(parts)).with_suffix(".py").is_file():
                parts.pop()
            if parts:
                seconds["/".join(parts) + ".py"] += float(case.attrib["time"])
    return {file: round(s, 1) for file, s in seconds.most_common() if s >= LEAST_S}


def _file(test: Test) -> str:
    return test.nodeid.partition("::")[0]


if __name__ == "__main__":
    TABLE.write_text(json.dumps(measured([*map(Path, sys.argv[1:])]), indent=1) + "\n")
