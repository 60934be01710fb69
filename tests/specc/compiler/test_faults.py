"""Whatever ends `specc compile`: no half engine, the old one stays, and nothing else is left."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.specc.compiler.faults import Case, mounted

ROOT = Path(__file__).parents[3]
RUN = """
import json, sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.specc.compiler.faults import Case, Faults, all_cases, warm_up
warm_up()
faults = Faults(*map(Path, sys.argv[2:5]), sys.argv[5])
faults.prepare()
cases = [Case(**case) for case in json.loads(sys.argv[6])] or all_cases(faults.phases)
print(json.dumps([faults.phases, [asdict(faults.run(case)) for case in cases]]))
"""


def run_cases(tiny_models: Any, root: Path, backend: str, cases: list[Case]) -> tuple[list, list]:
    """Phases, and what came of each case; in a process that computes nothing before it forks."""
    models = [str(tiny_models.target), str(tiny_models.draft)]
    given = json.dumps([vars(case) for case in cases])
    command = [sys.executable, "-P", "-c", RUN, str(ROOT), *models, str(root), backend, given]
    result = subprocess.run(command, capture_output=True, text=True, timeout=7200)
    assert result.returncode == 0, result.stderr
    phases, outcomes = json.loads(result.stdout.splitlines()[-1])
    return phases, outcomes


def require_mounts() -> None:
    with tempfile.TemporaryDirectory() as place:
        try:
            with mounted(Path(place)):
                pass
        except OSError as error:
            pytest.skip(str(error))


def check(outcomes: list[dict]) -> None:
    assert outcomes
    assert [outcome for outcome in outcomes if outcome["problems"]] == []


@pytest.mark.slow
def test_sigkill(tiny_models: Any, tmp_path: Path) -> None:
    cases = [Case("write target weights", "kill", replaces=True)]
    phases, outcomes = run_cases(tiny_models, tmp_path, "eager", cases)
    assert {case.phase for case in cases} <= set(phases)
    check(outcomes)


@pytest.mark.slow
def test_a_full_disk(tiny_models: Any, tmp_path: Path) -> None:
    require_mounts()
    case = Case("write target weights", "full", "output", replaces=True)
    _, outcomes = run_cases(tiny_models, tmp_path, "eager", [case])
    check(outcomes)
    assert outcomes[0]["exit_code"] == 2


@pytest.mark.slow  # an hour on two cores
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_every_fault_in_every_phase(tiny_models: Any, tmp_path: Path, backend: str) -> None:
    require_mounts()
    phases, outcomes = run_cases(tiny_models, tmp_path, backend, [])
    assert len(phases) >= 9
    check(outcomes)
    assert len(outcomes) >= 6 * len(phases)
    ends = {(o["case"]["fault"], o["case"]["place"], o["exit_code"]) for o in outcomes}
    assert ("full", "output", 2) in ends
    assert backend == "eager" or ("full", "cache", 2) in ends
