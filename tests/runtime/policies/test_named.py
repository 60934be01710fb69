"""Policies that a caller names."""

from __future__ import annotations

import pytest

from specc.cost.roofline import roofline
from specc.errors import ConfigError, RequestError
from specc.runtime.drafters.host_drafts import HostDrafts
from specc.runtime.policies.adaptive import AdaptivePolicy
from specc.runtime.policies.base import Policy
from specc.runtime.policies.best import BestPolicy
from specc.runtime.policies.goodput.policy import GoodputPolicy
from specc.runtime.policies.named import ProfilePolicy, make_policy
from specc.speculation.plans import OFF, SpecPlan

CHAINS = (SpecPlan.from_widths((1,) * 4), SpecPlan.from_widths((1, 1)))
LOOKUP = SpecPlan.from_widths((1,) * 6, ("lookup-3",))
TREE = SpecPlan.from_widths((2, 1))


def make(name: str, *plans: SpecPlan, **profile: object) -> Policy:
    known = {plan.name: plan for plan in (*plans, OFF)}
    return make_policy(name, known, HostDrafts(known), profile)


def test_each_name_makes_its_policy():
    assert isinstance(make("adaptive", *CHAINS, TREE, LOOKUP), AdaptivePolicy)
    assert isinstance(make("best", TREE, LOOKUP), BestPolicy)
    assert isinstance(make("goodput", *CHAINS, TREE), GoodputPolicy)
    measured = make("goodput", *CHAINS, latency=roofline().to_json(), acceptance={})
    assert measured.choose(0, None) in ("chain-2", "chain-4")
    profile = make("profile", *CHAINS, plans={"1": "chain-2", "4": "off"})
    assert isinstance(profile, ProfilePolicy)
    assert [profile.choose(count, None) for count in (1, 4)] == ["chain-2", "off"]


@pytest.mark.parametrize(
    ("name", "plans", "needed"),
    [
        ("adaptive", (TREE, LOOKUP), "a chain of one draft model"),
        ("best", CHAINS, "a plan of a model and one of a lookup"),
        ("best", (LOOKUP,), "a plan of a model and one of a lookup"),
        ("profile", CHAINS, "a profile.json"),
        ("fastest", CHAINS, "one of fixed, measured, adaptive, best, profile, goodput"),
    ],
)
def test_engines_without_the_plans_of_a_policy(name, plans, needed):
    with pytest.raises(RequestError) as error:
        make(name, *plans)
    assert needed in error.value.needed
    assert f"policy {name!r}" in error.value.found


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("adaptive", {}, "--adaptive-verification, and the policy adaptive"),
        ("fixed", {}, "--adaptive-verification, and the policy fixed"),
        ("goodput", {"shares_pass": False}, "verify whole trees"),
    ],
)
def test_adaptive_verification_where_nothing_can_do_it(name, options, found):
    known = {plan.name: plan for plan in (*CHAINS, OFF)}
    with pytest.raises(ConfigError) as error:
        make_policy(name, known, HostDrafts(known), {}, adapts_verification=True, **options)
    assert found in error.value.found
    made = make_policy("goodput", known, HostDrafts(known), {}, adapts_verification=True)
    assert isinstance(made, GoodputPolicy)
