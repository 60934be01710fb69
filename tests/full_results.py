"""The result of a whole run of the tests as JSON: machine, versions, counts, seconds, failures.

    PYTHONPATH=. python -P -m tests.full_results junit.xml results.json [--workers N] [--part K/N]
    PYTHONPATH=. python -P -m tests.full_results junit.xml results.json --again
    PYTHONPATH=. python -P -m tests.full_results --failed results.json

`make test-full` does it after pytest, whether tests have failed or not. Of a run in parts
(`make test-full PART=2/8`, tests/parts.py), results are added to those that the file holds of other
parts of the same commit and versions; results of another run are put aside.

A run of hours finds tests that fail, and their repair is another commit. `make test-full AGAIN=1`
runs the files in which a test failed (`--failed` names them) and adds what came of that under
`again`, with its commit, beside the failures of the run itself.
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
    root = _read(report)
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
        elif outcome == SKIPPED:
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


def _read(report: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ValueError(f"no report of pytest in {report}: {error}") from error


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
SKIPPED = "skipped"
_SEVERITY = ("passed", "xfailed", SKIPPED, "errors", "failed")


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


def with_earlier(
    path: Path, head: dict[str, Any], part: str, found: dict[str, Any]
) -> dict[str, Any]:
    """The summary `found` of a part with what the file holds of the same run."""
    num_parts = parse_part(part)[1]
    parts = earlier_parts(path, head, num_parts)
    whole = united(parts | {part: found}, num_parts)
    # of files in which tests of earlier parts failed; of this part, they are of a run before it
    again = _held(path).get("again", []) if parts and part not in parts else []
    return whole | ({"again": again} if again else {})


def _held(path: Path) -> dict[str, Any]:
    try:
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        held["failures"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"no result of `make test-full` in {path}: {error!r}") from error
    return held


def failed_files(result: dict[str, Any]) -> list[str]:
    """Files in which a test failed when they last ran, of a result with its later runs.

    Raises:
        ValueError: such a file is no more.
    """
    failed: set[str] = set()
    for run in _runs(result):
        failed -= set(run.get("files", ()))
        failed |= {_file_of_test(failure["test"]) for failure in run["failures"]}
    if gone := [file for file in failed if not (ROOT / file).is_file()]:
        raise ValueError(f"tests failed in {', '.join(sorted(gone))}: there are no such files")
    return sorted(failed)


def _runs(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [result, *result.get("again", [])]


def _file_of_test(test: str) -> str:
    """What could not be collected has no class, and its module for a name."""
    module, _, name = test.partition("::")
    return _file_of(module or name)


def run_again(report: Path, output: Path) -> dict[str, Any]:
    """The result in `output` with a later run of files that failed in it.

    Raises:
        ValueError: `output` holds no result; the report is not of all its failed files, or of a
            choice of their tests, or what failed was skipped.
    """
    if os.environ.get("PYTEST_ARGS"):
        raise ValueError("PYTEST_ARGS may choose tests: files run again whole, without it")
    result = _held(output)
    due, found = failed_files(result), summary(report)
    cases = list(_read(report).iter("testcase"))
    files = sorted({_file_of(case.get("classname", "")) for case in cases})
    if left := set(due) - set(files):
        raise ValueError(f"{report} has no test of {', '.join(sorted(left))}, where one failed")
    # by now a test that failed may have another name, or be no more
    skipped = {f"{c.get('classname')}::{c.get('name')}" for c in cases if _outcome(c)[0] == SKIPPED}
    if left := skipped & {x["test"] for run in _runs(result) for x in run["failures"]}:
        raise ValueError(f"skipped in {report}, and failed before: {', '.join(sorted(left))}")
    kept = ("started", "seconds", "counts", "failures")
    again = {**commit(output), "versions": versions(), "files": files}
    result.setdefault("again", []).append(again | {name: found[name] for name in kept})
    return result


def put_aside(path: Path) -> Path | None:
    """Move a file out of the way, to a name that is free; None where there is nothing in it."""
    if not path.exists() or not path.stat().st_size:
        return None
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    return path.rename(aside)


def _write(result: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--part", metavar="K/N")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--failed", type=Path, metavar="results.json")
    options = parser.parse_args()
    if options.failed is None and options.output is None:
        parser.error("a report and a file of results, or --failed and one")
    if options.again and options.part is not None:
        parser.error("--again is of files, whatever their part")
    try:
        if options.failed is not None:
            return print(*failed_files(_held(options.failed)))
        if options.again:
            result = run_again(options.report, options.output)
            _write(result, options.output)
            left = failed_files(result) or ["none"]
            return print(f"specc: files in which a test fails: {', '.join(left)}; {options.output}")
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
        is_first = not earlier_parts(options.output, head, num_parts)
        found = with_earlier(options.output, head, options.part, found)
        if is_first and (aside := put_aside(options.output)):
            print(f"specc: begins anew: results of another run are in {aside}")
    _write(head | found, options.output)
    counts = ", ".join(f"{count} {name}" for name, count in found["counts"].items() if count)
    if missing := found.get("missing_parts"):
        counts += f", parts to run: {', '.join(map(str, missing))}"
    print(f"specc: {counts} in {found['seconds'] / 60:.1f} min; {options.output}")


if __name__ == "__main__":
    main()
