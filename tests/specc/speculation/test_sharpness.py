"""Plans whose drafts' logits are multiplied: names, files, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from specc.artifact.manifest_entries import PlanEntry
from specc.cli.render_plans import describe_plan
from specc.drafters.registry import drafter_of, drafters_of
from specc.errors import ConfigError
from specc.passes.step.fuse_step import fuse_step
from specc.speculation.plan_json import plan_from_json, plan_to_json
from specc.speculation.plans import MERGE, OFF, DynamicTree, SpecPlan
from specc.speculation.sharpness import describe_sharpness, expected_gain, factor_of, sharpened

CHAIN = SpecPlan.from_widths((1, 1, 1))
MERGED = SpecPlan.from_widths((1, 1), ("lookup-3", "draft_1", "draft_0"), MERGE)
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 2, 3))


def test_the_last_factor_counts_below_and_no_draft_is_forgotten():
    assert sharpened(CHAIN, {"draft_0": [0.5, 2.0]}).sharpness == ((0.5, 2.0, 2.0),)
    assert sharpened(CHAIN, {"draft_0": [0.5, 2.0, 3.0, 4.0]}).sharpness == ((0.5, 2.0, 3.0),)
    plan = sharpened(MERGED, {"draft_0": [0.5]})
    # lookups have no logits
    assert plan.asked == drafters_of("draft_1", "draft_0")
    assert plan.sharpness == ((1.0, 1.0), (0.5, 0.5))
    assert [factor_of(plan, draft, 1) for draft in plan.asked] == [1.0, 0.5]
    assert factor_of(CHAIN, drafter_of("draft_0"), 2) == 1.0


def test_names_tell_plans_apart():
    first, second = (sharpened(CHAIN, {"draft_0": [x]}) for x in (0.5, 0.7))
    assert len({CHAIN.name, first.name, second.name}) == 3
    assert first.name.startswith("chain-3-sharp-")
    # of what is sharp already, the factors are replaced
    assert sharpened(first, {"draft_0": [0.7]}) == second
    assert sharpened(first, {}) == sharpened(first, {"draft_0": [1.0]}) == CHAIN
    assert sharpened(OFF, {"draft_0": [0.5]}) == OFF
    assert sharpened(CHAIN, {"draft_1": [0.5]}) == CHAIN


@pytest.mark.parametrize("plan", [CHAIN, MERGED, DYNAMIC], ids=lambda plan: plan.name)
def test_files(plan):
    sharp = sharpened(plan, {"draft_0": [0.5, 0.75]})
    assert plan_from_json(json.loads(json.dumps(plan_to_json(sharp)))) == sharp
    assert PlanEntry.of(sharp, "steps/x.json").plan == sharp
    assert "sharpness" not in plan_to_json(plan)


@pytest.mark.parametrize("plan", [CHAIN, MERGED, DYNAMIC], ids=lambda plan: plan.name)
def test_factors_of_1_change_nothing(plan):
    """Steps are the same to the byte; those of other factors have a product for each level."""
    slabs = {"target": 1, "draft_0": 1, "draft_1": 1}

    def step(given):
        made = fuse_step(given, slabs).to_json()
        return json.dumps([made["constants"], made["stages"]])

    ones = tuple((1.0,) * plan.max_depth for _ in plan.asked)
    assert step(dataclasses.replace(plan, sharpness=ones)) == step(plan)
    assert sharpened(plan, {"draft_0": [1.0]}) == plan
    sharp = step(sharpened(plan, {"draft_0": [0.5], "draft_1": [2.0]}))
    operator = "aten.mul.Tensor" if plan.dynamic else "aten.mul.Scalar"
    assert sharp.count(f'"{operator}"') == plan.max_depth * len(plan.asked)


@pytest.mark.parametrize(
    "rows",
    [((0.5, 0.5),), ((0.5,) * 4,), ((0.5,) * 3,) * 2, ((0.5, 0.0, 1.0),), ((0.5, -1.0, 1.0),),
     ((float("nan"),) * 3,), ((float("inf"),) * 3,)],
)  # fmt: skip
def test_what_is_refused(rows):
    with pytest.raises(ConfigError, match="of sharpness"):
        dataclasses.replace(CHAIN, sharpness=rows)
    with pytest.raises(ConfigError, match="of sharpness"):
        dataclasses.replace(OFF, sharpness=rows)


def test_what_people_read():
    plan = sharpened(MERGED, {"draft_0": [0.5, 0.333]})
    assert describe_sharpness(plan) == "1.00, 1.00 (draft_1); 0.50, 0.33 (draft_0)"
    text = describe_plan(sharpened(CHAIN, {"draft_0": [0.85]}))
    assert text.endswith("; logits of drafts times 0.85, 0.85, 0.85 by depth")
    assert "logits" not in describe_plan(CHAIN)


def test_gains_are_in_standard_errors():
    assert expected_gain([True] * 9 + [False], [False] * 9 + [True]) == pytest.approx(8 / 10**0.5)
    assert expected_gain([True, False], [True, False]) == 0.0
