"""Break the code on purpose and see that tests notice: `make mutants`.

    python -m tests.mutants [--only NAME]… [--jobs N] [--resume] [--seconds S] [--json FILE]

The exit status is 0 if every mutant is caught, 1 if one is not, 2 if some were not begun in time.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.mutant import MutantError, check_mutant, read_mutants
from tests.mutants.results import Results
from tests.mutants.runner import LIMIT_S, PRELOADED, Options, run_mutants
from tests.mutants.tree_copy import commit_of, sources_digest
from tests.mutants.verdict import CAUGHT

ROOT = Path(__file__).parents[2]


def main(
    arguments: Sequence[str], root: Path = ROOT, preloaded: tuple[str, ...] = PRELOADED
) -> int:
    """Run mutants of a repository; returns the exit status."""
    given = _parser().parse_args(arguments)
    directory = root / "tests" / "mutants"
    try:
        every = read_mutants(directory)
    except MutantError as error:
        print(error, file=sys.stderr)
        return 1
    chosen = [
        mutant
        for mutant in every
        if not given.only or any(fnmatch.fnmatch(mutant.name, name) for name in given.only)
    ]
    if not chosen:
        print(f"no mutant is called {' or '.join(given.only)}", file=sys.stderr)
        return 1
    problems = []
    for mutant in chosen:
        try:
            check_mutant(mutant, root)
        except MutantError as error:
            problems.append(str(error))
    # what does not apply is an error of whoever changed the file, and known within a second
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    path = given.json and root / given.json
    results = Results(path, sources_digest(root), given.resume, commit_of(root))
    if results.put_aside is not None:
        print(f"begins anew: results of other sources are in {results.put_aside}")
    results.keep(every)
    options = Options(
        root=root,
        scratch=root / "build" / "mutants",
        jobs=given.jobs,
        limit_s=given.limit_s,
        seconds=given.seconds,
        preloaded=preloaded,
        say=functools.partial(print, flush=True),
    )
    left = run_mutants(chosen, results, options)
    results.write()
    found = [results.mutants[mutant.name] for mutant in chosen if mutant.name in results.mutants]
    others = [entry for entry in found if entry["outcome"] != CAUGHT]
    print(f"caught: {len(found) - len(others)} of {len(chosen)}; not begun: {left}")
    for entry in others:
        print(f"{entry['outcome']}: {entry['name']} ({entry['breaks']}): {' '.join(entry['by'])}")
    return 1 if others else 2 if left else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="name, or pattern like step/*")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are worked in at once")
    parser.add_argument("--json", type=Path, default=None, help="file of results")
    parser.add_argument(
        "--resume", action="store_true", help="skip what the file says of the same sources"
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for each test")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin none after these"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
