"""What holds of every kind of draft in the registry: facts, names, plans, both sides, steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from specc.drafters.drafter import Drafter
from specc.drafters.facts import Cache, Passes
from specc.drafters.registry import ALL, FIRST, drafter_of, facts_of, kind_of_target, parse_draft
from specc.lora.target_adapters import TargetAdapters
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.registry import compiler_drafter, drafters_of_files
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.program_files import plan_of
from specc.runtime.backends.step_constants import step_constants
from specc.runtime.drafters.host_drafter import HostDrafter, host_drafter
from specc.sampling.rows import Rule
from specc.speculation.plan_json import plan_from_json, plan_to_json
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from tests.draft_kinds.rig import all_rigs

# of each kind one or more, as plans have them
SAMPLES: dict[str, tuple[Drafter, ...]] = {
    "draft_model": FIRST,
    "lookup": (drafter_of("lookup-3"),),
    "suffix": (drafter_of("suffix"),),
    "uno": (drafter_of("uno_fast"),),
    "self": tuple(map(drafter_of, ("self_w32_s4", "self_l0to3", "self_int8_w32_s4"))),
} | {rig.kind: (rig.sample,) for rig in all_rigs()}
CASES = [(kind, drafter) for kind, drafters in SAMPLES.items() for drafter in drafters]
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3))
each = pytest.mark.parametrize(("kind", "drafter"), CASES, ids=lambda x: getattr(x, "name", x))


def plans_of(drafter: Drafter) -> list[SpecPlan]:
    made = [SpecPlan.from_widths((1, 1, 1), (drafter,)), SpecPlan.from_tree(TREE, (drafter,))]
    made.append(SpecPlan.from_widths((2, 1), (drafter, "draft_1"), MERGE))
    if drafter.is_asked:
        made.append(SpecPlan.from_dynamic(DynamicTree(5, 2, 3), drafter))
    return made


def test_every_kind_has_a_sample() -> None:
    assert {facts.kind for facts in ALL} == SAMPLES.keys()
    methods = [method for facts in ALL for method in facts.methods]
    assert len(set(methods)) == len(methods)


@each
def test_facts(kind: str, drafter: Drafter) -> None:
    facts = facts_of(kind)
    alike = replace(
        drafter.facts, kind=kind, module=facts.module, methods=facts.methods,
        assumes=facts.assumes, is_of_target=facts.is_of_target, called=facts.called,
    )  # fmt: skip
    assert facts == alike, "what a plan has of a kind is what its files are"
    assert facts.has_program == (drafter.number is not None)
    assert (facts.passes is Passes.NONE) == (not drafter.is_asked)
    assert drafter.has_rows == (facts.cache is Cache.OWN)
    assert not facts.hands_on or facts.reads_hidden
    assert not facts.is_of_target or kind_of_target(kind) == facts


@each
def test_names_and_json(kind: str, drafter: Drafter) -> None:
    if drafter.number is None:
        option = drafter.option.replace("lookup-", "lookup:")
        assert drafter_of(drafter.name) == drafter == parse_draft(option)
    for plan in plans_of(drafter):
        assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan
        assert set(plan.rules) >= {Rule.COUPLED, Rule.DELTA}


@each
def test_both_sides_are_found(kind: str, drafter: Drafter) -> None:
    found = compiler_drafter(facts_of(kind))
    assert isinstance(found, CompilerDrafter)
    facts = facts_of(kind)
    in_files = facts.reads_hidden and not facts.is_of_target
    assert (found in set(drafters_of_files())) == in_files
    if facts.has_host:
        assert isinstance(host_drafter(facts, 4, True), HostDrafter)


@each
def test_steps(kind: str, drafter: Drafter) -> None:
    """Of every shape: a stage that proposes, with the constants that the runtime expects."""
    for plan in plans_of(drafter):
        slabs = {"target": 1, **dict.fromkeys(plan.model_names, 1)}
        adapters = TargetAdapters(tuple(x.adapter for x in plan.drafters if x.adapter), 9)
        made = fuse_step(plan, slabs, block_size=4, adapters=adapters)
        program = json.loads(json.dumps(made.to_json()))
        assert plan_of(program) == plan
        step_constants(program, plan)
        text = json.dumps(program)
        for own in plan.models:
            assert own.moves_rows == (f'"slot_of_{own.name}"' in text)
            assert own.has_rows == (f'"{own.name}_len"' in text)


def test_a_kind_without_trees_that_are_data_says_so() -> None:
    plan = SpecPlan.from_widths((1,), (drafter_of("suffix"),))
    proposer = compiler_drafter(facts_of("suffix")).proposer(None, plan, plan.drafters[0])  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        proposer.propose_best(None, plan, None)  # type: ignore[arg-type]
