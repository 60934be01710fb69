"""Policies choose plans."""

from __future__ import annotations

from typing import Any

import pytest

from specc.errors import ConfigError
from specc.runtime.policies.base import FixedPolicy, Policy
from specc.runtime.scheduling.batch import Batch, RunResult
from specc.speculation.metrics import SpecStats
from tests.runtime.scheduling.test_look_ahead import scripted


class Least(Policy):
    """All that a policy has to say."""

    def choose(self, num_running: int, stats: SpecStats) -> str:
        return "off"


def test_fixed_policy_never_changes_its_mind() -> None:
    policy = FixedPolicy("chain-4")
    assert {policy.choose(n, SpecStats()) for n in (0, 1, 100)} == {"chain-4"}
    assert not policy.needs_results


def test_by_default_a_policy_waits_for_results_and_learns_nothing() -> None:
    policy = Least()
    assert policy.needs_results
    assert not policy.chooses_late
    assert policy.decision is None
    assert policy.choose_each([], SpecStats()) is None
    policy.observe_batch(Batch(), RunResult())


def test_what_is_no_policy_is_refused() -> None:
    class Duck:
        def choose(self, num_running: int, stats: SpecStats) -> str:
            return "off"

    duck: Any = Duck()
    with pytest.raises(ConfigError, match="Duck") as caught:
        scripted(duck)
    assert "Policy" in caught.value.needed
