"""Constants of a step program: those of the compiler are taken, and no others."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from specc.drafters.block import BlockDraft
from specc.drafters.registry import drafters_of
from specc.errors import EngineError
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.step_constants import step_constants
from specc.speculation.plans import MERGE, OFF, VOTE, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from tests.tiers import every

PAIR = ("draft_0", "draft_1")
MIXED = ("draft_0", "lookup-3", "draft_1")
# a node with children stands beside two leaves, which stand between it and the next
GAPS = TokenTree((-1, 0, 0, 0, 0, 1, 4, 4, 5))
PLANS = [
    OFF,
    SpecPlan.from_widths((1, 1, 1)),
    SpecPlan.from_widths((3, 2, 1)),
    SpecPlan.from_tree(GAPS),
    SpecPlan.from_dynamic(DynamicTree(5, 2, 3)),
    SpecPlan.from_dynamic(DynamicTree(4, 3, 1)),
    SpecPlan("lookup", (1, 1, 1), drafters=drafters_of("lookup-3")),
    SpecPlan("suffix", (1, 1, 1), drafters=drafters_of("suffix")),
    SpecPlan("merge", (2, 1), drafters=drafters_of(*PAIR), combine=MERGE),
    SpecPlan("merge-lookup", (1, 1), drafters=drafters_of(*MIXED), combine=MERGE),
    SpecPlan("merge-gaps", parents=GAPS.parents, drafters=drafters_of(*PAIR), combine=MERGE),
    SpecPlan("vote", (1, 1, 1), drafters=drafters_of("draft_0", "suffix", "draft_1"), combine=VOTE),
]  # fmt: skip
# programs of padded batches know no views
VIEWS = [
    SpecPlan("view", (3, 2, 1), drafters=drafters_of("self_w32_s4")),
    SpecPlan.from_dynamic(DynamicTree(5, 2, 3), "self_w32_s4"),
    SpecPlan(
        "merge-view",
        (2, 1),
        drafters=drafters_of("draft_0", "self_w32_s4", "suffix"),
        combine=MERGE,
    ),
    SpecPlan("vote-view", (1, 1), drafters=drafters_of("self_w32_s4", "self_w64_s0"), combine=VOTE),
]
# nor do they block drafters
_OF_BLOCKS = {"draft_0": BlockDraft(5, 90_000), "draft_1": BlockDraft(4, 0, True, True)}
BLOCKS = [
    plan.with_drafters(_OF_BLOCKS)
    for plan in (
        SpecPlan("block", (3, 2, 1)),
        SpecPlan("block-gaps", parents=GAPS.parents, drafters=drafters_of("draft_1")),
        SpecPlan.from_dynamic(DynamicTree(5, 2, 3)),
        SpecPlan(
            "merge-block", (2, 1), drafters=drafters_of(*PAIR, "draft_2", "suffix"), combine=MERGE
        ),
        SpecPlan("vote-block", (1, 1), drafters=drafters_of(*PAIR), combine=VOTE),
    )
]
SIZES = (None, 1, 2, 3, 4)


def program_of(plan: SpecPlan, is_padded: bool = False) -> dict:
    models = {"target": 1, **dict.fromkeys(plan.model_names, 1)}
    return json.loads(json.dumps(fuse_step(plan, models, is_padded).to_json()))


@pytest.mark.parametrize(
    ("plan", "tile", "is_padded"),
    [
        (plan, tile, is_padded)
        for plan in [*PLANS, *VIEWS, *BLOCKS]
        for tile in SIZES
        for is_padded in (False, True)
        if (plan.speculates or tile is None) and not ((plan.views or plan in BLOCKS) and is_padded)
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_compiler_writes_what_the_plan_says(plan, tile, is_padded):
    plan = dataclasses.replace(plan, tile=tile)
    slabs = {"target": 1, **dict.fromkeys(plan.model_names, 1)}
    step = fuse_step(plan, slabs, is_padded, block_size=16)
    found = step_constants(json.loads(json.dumps(step.to_json())), plan)
    assert found.keys() == step.constants.keys()
    for name, value in found.items():
        assert value.dtype == step.constants[name].dtype
        assert torch.equal(value, step.constants[name]), name


def test_rows_of_blocks_in_fewer_words():
    """Engines compiled before have a bit for each row of a block alone: the others are zeros."""
    block = BlockDraft(60, 0, is_causal=True)
    plan = SpecPlan("narrow", (1,) * 8).with_drafters({"draft_0": block})
    program = program_of(plan)
    entry = program["constants"]["draft_0_rows_seen"]
    assert {len(words) for words in entry["values"]} == {2}
    entry["values"] = [words[:1] for words in entry["values"]]
    found = step_constants(program, plan)["draft_0_rows_seen"]
    assert found.tolist() == entry["values"]
    for row in (0, 9, -1):
        values = [list(words) for words in entry["values"]]
        values[row][0] ^= 1 << 5
        changed = {**program["constants"], "draft_0_rows_seen": {**entry, "values": values}}
        with pytest.raises(EngineError, match="constant draft_0_rows_seen of plan narrow"):
            step_constants({**program, "constants": changed}, plan)


HOSTILE = (
    -(2**70), -(2**63), -(2**31), -2, -1, 0, 1, 2, 7, 64, 2**31 - 1, 2**31, 2**63 - 1, 2**70,
    1.5, float("nan"), "1", None, True, [], [1], {},
)  # fmt: skip


def spoil(rng: random.Random, values: list) -> list:
    kind = rng.random()
    if kind < 0.2:
        return values[:-1]
    if kind < 0.4:
        return [*values, *values[:1], 0][: len(values) + 1]
    values, at = list(values), rng.randrange(len(values))
    is_list = isinstance(values[at], list)
    values[at] = spoil(rng, values[at]) if is_list and kind < 0.9 else rng.choice(HOSTILE)
    return values


@pytest.mark.default("off", "lookup", "block")
@pytest.mark.parametrize("plan", [*every(6, PLANS), *every(4, BLOCKS)], ids=lambda plan: plan.name)
def test_others_are_refused(plan):
    rng = random.Random(plan.name)
    program = program_of(plan)
    for name, entry in program["constants"].items():
        for _ in range(40):
            values = spoil(rng, entry["values"])
            if json.dumps(values) == json.dumps(entry["values"]):
                continue
            changed = {**program["constants"], name: {"dtype": entry["dtype"], "values": values}}
            with pytest.raises(EngineError, match=f"constant {name} of plan {plan.name}"):
                step_constants({**program, "constants": changed}, plan)


@pytest.mark.parametrize(
    "entry",
    [
        *({"dtype": dtype, "values": [-1, 0]} for dtype in ("float32", "int64", "load", "no", 3)),
        None, [], {}, {"dtype": "int32"}, {"values": [-1, 0]}, {"dtype": "int32", "values": 3},
    ],
)  # fmt: skip
def test_malformed_entries(entry):
    plan = SpecPlan.from_widths((1,))
    with pytest.raises(EngineError, match="constant parents of plan"):
        step_constants({"constants": {"parents": entry}}, plan)


@pytest.mark.parametrize("constants", [[], 3, None, {"x": {"dtype": "int32", "values": [4097]}}])
def test_other_constants(constants):
    with pytest.raises(EngineError):
        step_constants({"constants": constants}, SpecPlan.from_widths((1,)))
