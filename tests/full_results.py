"""The result of a whole run of the tests as JSON: machine, versions, counts, seconds, failures.

    PYTHONPATH=. python -P -m tests.full_results junit.xml results.json [--workers N] [--part K/N]

`make test-full` does it after pytest, whether tests have failed or not; with
`RESULTS=docs/results/test_full.json` it writes the file that is committed. Of a run in parts
(`make test-full PART=2/8`, tests/parts.py), results are added to those that the file holds of other
parts of the same commit and versions; results of another run are put aside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from specc.system.machine import describe_machine
from tests.parts import parse_part

ROOT = Path(__file__).resolve().parents[1]
# what results depend on, beside specc itself
PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "numpy", "safetensors", "onnx", "onnxruntime",
    "llguidance", "fastapi", "pytest", "pytest-xdist", "hypothesis",
)  # fmt: skip
_LONGEST = 20


def summary(report: Path) -> dict[str, Any]:
    """What a report of pytest (`--junitxml`) says.

    Returns:
        `started` and `seconds` of the whole run; `counts` of tests by outcome, `passed`,
        `failed`, `errors` (before or after a test), `skipped` or `xfailed`; `failures`, a test and
        the first line of its message each; `skips`, reason → tests; `longest_files`, file →
        seconds of its tests.
    Raises:
        ValueError: there is no such report, or it holds no test: pytest did not come that far.
    """
    try:
        root = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ValueError(f"no report of pytest in {report}: {error}") from error
    outcomes: dict[str, str] = {}
    failures: list[dict[str, str]] = []
    skips: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for case in root.iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        files[_file_of(case.get("classname", ""))] += float(case.get("time", 0))
        outcome, found = _outcome(case)
        # an error after a test is a case of its own
        if _SEVERITY.index(outcome) >= _SEVERITY.index(outcomes.get(test, "passed")):
            outcomes[test] = outcome
        if outcome in ("failed", "errors"):
            assert found is not None
            message = (found.get("message") or found.text or "").strip().splitlines()
            failures.append({"test": test, "outcome": outcome, "message": (message or [""])[0]})
        elif outcome == "skipped":
            assert found is not None
            skips[found.get("message", "")] += 1
    if not outcomes:
        raise ValueError(f"no test in {report}")
    suites = list(root.iter("testsuite"))
    counts = Counter(outcomes.values())
    return {
        "started": min(suite.get("timestamp", "") for suite in suites),
        "seconds": round(sum(float(suite.get("time", 0)) for suite in suites), 1),
        "counts": {name: counts[name] for name in _SEVERITY},
        "failures": sorted(failures, key=lambda failure: failure["test"]),
        "skips": dict(sorted(skips.items())),
        "longest_files": {file: round(s, 1) for file, s in files.most_common(_LONGEST)},
    }


def versions() -> dict[str, str | None]:
    """Of Python and the packages that are installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit(output: Path, root: Path = ROOT) -> dict[str, Any]:
    """The commit that was tested, and whether files but `output` differ from it; None without git.

    Args:
        output: file of results, which may be one of the checkout.
        root: the checkout.
    """

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    files = ["."]
    if output.resolve().is_relative_to(root):
        files.append(f":(exclude,literal){output.resolve().relative_to(root)}")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *files)
    return {"commit": git("rev-parse", "HEAD"), "is_changed": bool(changed)}


# from the least to the most that can come of a test
_SEVERITY = ("passed", "xfailed", "skipped", "errors", "failed")


def _outcome(case: ElementTree.Element) -> tuple[str, ElementTree.Element | None]:
    for tag, outcome in (("failure", "failed"), ("error", "errors"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            is_expected = found.get("type") == "pytest.xfail"
            return ("xfailed" if is_expected else outcome), found
    return "passed", None


def _file_of(name: str) -> str:
    parts = name.split(".")
    # a class of tests stands after its file
    while len(parts) > 1 and not (ROOT / "/".join(parts)).with_suffix(".py").is_file():
        parts.pop()
    return "/".join(parts) + ".py"


def united(parts: dict[str, dict[str, Any]], num_parts: int) -> dict[str, Any]:
    """One summary of the summaries of parts, which have no test in common.

    Returns:
        What `summary` returns; `parts` as they are; `missing_parts` of 1 to `num_parts`.
    """
    runs = list(parts.values())
    files: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    for run in runs:
        files.update(run["longest_files"])
        skips.update(run["skips"])
    return {
        "started": min(run["started"] for run in runs),
        "seconds": round(sum(run["seconds"] for run in runs), 1),
        "counts": {name: sum(run["counts"][name] for run in runs) for name in _SEVERITY},
        "failures": sorted(
            (failure for run in runs for failure in run["failures"]), key=lambda x: x["test"]
        ),
        "skips": dict(sorted(skips.items())),
        "longest_files": dict(files.most_common(_LONGEST)),
        "missing_parts": [k for k in range(1, num_parts + 1) if f"{k}/{num_parts}" not in parts],
        "parts": {name: parts[name] for name in sorted(parts, key=lambda x: parse_part(x)[0])},
    }


# what parts of one run have in common
_RUN = ("command", "commit", "is_changed", "versions")


def earlier_parts(path: Path, head: dict[str, Any], num_parts: int) -> dict[str, dict[str, Any]]:
    """Parts that the file holds of the same run: commit, command, versions and number of parts.

    Args:
        path: of results; what they are does not matter where they are no such parts.
        head: of the result that is to be written.
        num_parts: N.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        parts: dict[str, dict[str, Any]] = held["parts"]
        if any(parse_part(name)[1] != num_parts for name in parts):
            return {}
        is_same = all(held[name] == head[name] for name in _RUN)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return {}
    return parts if is_same and head["commit"] is not None and not head["is_changed"] else {}


def put_aside(path: Path) -> Path | None:
    """Move a file out of the way, to a name that is free; None where there is nothing in it."""
    if not path.exists() or not path.stat().st_size:
        return None
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    return path.rename(aside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--part", metavar="K/N")
    options = parser.parse_args()
    try:
        num_parts = parse_part(options.part)[1] if options.part else None
        found = summary(options.report)
    except ValueError as error:
        sys.exit(str(error))
    # make passes on what its command line says
    given = os.environ.get("PYTEST_ARGS")
    command = "make test-full" + (f" PYTEST_ARGS={shlex.quote(given)}" if given else "")
    head = {"command": command, "workers": options.workers, **commit(options.output)}
    head |= {"machine": describe_machine(), "versions": versions()}
    if num_parts is not None:
        parts = earlier_parts(options.output, head, num_parts)
        found = united(parts | {options.part: found}, num_parts)
        if not parts and (aside := put_aside(options.output)):
            print(f"specc: begins anew: results of another run are in {aside}")
    result = head | found
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    counts = ", ".join(f"{count} {name}" for name, count in found["counts"].items() if count)
    if missing := found.get("missing_parts"):
        counts += f", parts to run: {', '.join(map(str, missing))}"
    print(f"specc: {counts} in {found['seconds'] / 60:.1f} min; {options.output}")


if __name__ == "__main__":
    main()
