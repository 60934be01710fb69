"""Configurations of published models: greedy output is transformers', or they are refused by name.

What came of each is recorded (`python -m tests.real_configurations`), and drawn in
`docs/guide/architectures.md`. The default tier has all that are refused, which takes no tracing,
and a few of the others; the slow tier has them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_configurations import configurations, outcome, read_results
from tests.tiers import only

ROWS = {row["name"]: row for row in read_results()}
EQUAL = [name for name, row in ROWS.items() if row["outcome"] == "equal"]
REFUSED = [name for name, row in ROWS.items() if row["outcome"] == "refused"]
# a scaling by its former name; a class by another model type, in fp8
FEW = ("microsoft/Phi-3-mini-128k-instruct, first revision", "moonshotai/Kimi-K2-Instruct")


def test_every_configuration_has_an_outcome() -> None:
    assert list(ROWS) == list(configurations())
    assert len(EQUAL) >= 60


@pytest.mark.parametrize("name", only(FEW, EQUAL))
def test_equal(name: str, tmp_path: Path) -> None:
    assert outcome(name, tmp_path) == ROWS[name]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    found = outcome(name, tmp_path)
    assert found == ROWS[name]
    for advice in ("trust_remote_code", "Traceback", "AssertionError"):
        assert advice not in found["said"]
