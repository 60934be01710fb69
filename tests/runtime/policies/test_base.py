"""Policies choose plans."""

from __future__ import annotations

from specc.runtime.policies.base import FixedPolicy
from specc.speculation.metrics import SpecStats


def test_fixed_policy_never_changes_its_mind() -> None:
    policy = FixedPolicy("chain-4")
    assert {policy.choose(n, SpecStats()) for n in (0, 1, 100)} == {"chain-4"}
