"""What a run of a mutant's test means."""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.worker import Answer, Case

CAUGHT = "caught"
SURVIVED = "survived"
# what can also become of a mutant: none of these counts as caught
NO_MATCH = "does not apply"
UNSOUND = "test fails without it"
NOT_RUN = "test did not run"
BROKEN = "broken elsewhere"
CRASHED = "crashed"
HUNG = "hung"
# such a test has not looked at anything: the mutant took away what the test, or a file, stands on
_NO_FAILURE = {"ImportError", "SyntaxError", "NameError"}


def is_of(case: Case, test: str) -> bool:
    """Whether a case belongs to a test, which may be named with its parameters or without."""
    return case["test"] == test or case["test"].startswith((f"{test}[", f"{test}::"))


def sound(answer: Answer, test: str) -> bool:
    """Whether a test passed, at least one case of it, without a mutant."""
    cases = [case for case in answer["cases"] if is_of(case, test)]
    outcomes = {case["outcome"] for case in cases}
    return not answer["collection"] and "passed" in outcomes and "failed" not in outcomes


def judge(mutant: Mutant, answer: Answer) -> tuple[str, str]:
    """What became of a mutant in a run of one of its tests, and the case that says so."""
    failed = [case for case in answer["cases"] if case["outcome"] == "failed"]
    if failed:
        first = failed[0]
        if first["phase"] == "call" and not _NO_FAILURE & set(first["kinds"]):
            return CAUGHT, first["test"]
        return BROKEN, f"{first['test']} ({first['phase']}: {', '.join(first['kinds'][:1])})"
    if answer["status"] is None:
        return (CAUGHT if mutant.ends == "hang" else HUNG), "time limit"
    if answer["collection"]:
        return BROKEN, f"{answer['collection'][0]} (collection)"
    if answer["status"] not in range(6):
        return (CAUGHT if mutant.ends == "crash" else CRASHED), f"exit status {answer['status']}"
    if not any(case["outcome"] == "passed" for case in answer["cases"]):
        return NOT_RUN, ""
    return SURVIVED, ""
