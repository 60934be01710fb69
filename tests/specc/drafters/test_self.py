"""Self-drafts as users write them: layers, views, and both; and what plans call them."""

from __future__ import annotations

import pytest

from specc.drafters.layers import Layers
from specc.drafters.registry import drafters_of
from specc.drafters.self import SelfDraft
from specc.drafters.views import View
from specc.errors import ConfigError
from specc.speculation.choose_plans import choose_plans, split_drafts
from specc.speculation.plan_json import plan_from_json, plan_to_json
from specc.speculation.plans import SpecPlan

OPTIONS = [
    ("self:layers=0-3", "self_l0to3", (0, 1, 2, 3), None),
    ("self:layers=0-3+6-7", "self_l0to3_6to7", (0, 1, 2, 3, 6, 7), None),
    ("self:layers=5", "self_l5", (5,), None),
    ("self:skip=2+4-5", "self_x2_4to5", (0, 1, 3, 6, 7), None),
    ("self:layers=0-5,window=256", "self_l0to5_w256_s4", (0, 1, 2, 3, 4, 5), View(256)),
    ("self:sink=0,skip=7,window=64", "self_x7_w64_s0", tuple(range(7)), View(64, 0)),
]


@pytest.mark.parametrize(("text", "name", "kept", "view"), OPTIONS)
def test_options(text, name, kept, view):
    draft = SelfDraft.parse(text)
    assert (draft.name, draft.view) == (name, view)
    assert draft.layers.kept(8) == kept
    assert SelfDraft.parse(draft.option) == SelfDraft.named(name) == draft
    assert split_drafts(["D/", text]) == (["D/"], drafters_of("draft_0", name))


@pytest.mark.parametrize(
    ("text", "name", "quantization"),
    [
        ("self:int8", "self_int8", "int8"),
        ("self:window=64,int4", "self_int4_w64_s4", "int4-g64"),
        ("self:fp8,skip=2", "self_fp8_x2", "fp8"),
        ("self:skip=2,int8,window=64,sink=0", "self_int8_x2_w64_s0", "int8"),
    ],
)
def test_weights(text, name, quantization):
    draft = SelfDraft.parse(text)
    assert (draft.name, draft.quantization) == (name, quantization)
    assert SelfDraft.parse(draft.option) == SelfDraft.named(name) == draft
    assert draft.has_second_program
    assert not SelfDraft.parse("self:window=64").has_second_program


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # what is written in another way is the same draft
        ("self:layers=6-7+0-1+2", "self_l0to2_6to7"),
        ("self:layers=1-3+2-4", "self_l1to4"),
        ("self:skip=3-3", "self_x3"),
    ],
)
def test_one_draft_has_one_name(text, name):
    assert SelfDraft.parse(text).name == name
    with pytest.raises(ConfigError, match="twice"):
        split_drafts([text, SelfDraft.named(name).option])


@pytest.mark.parametrize(
    "text",
    [
        "self:layers=", "self:layers", "self:layers=a", "self:layers=3-1", "self:layers=1,2",
        "self:layers=1..3", "self:skip=auto", "self:skip=-1", "self:layers=0-", "self:layers=12345",
        "self:layers=1,skip=2", "self:layers=1,layers=2", "self:layers=1,window=0",
        "self:layers=1,sink=4", "self:layers=1,", "self:layer=1",
        "self:int8,int4", "self:int8=1", "self:int8,int8", "self:int5", "self:int8,",
    ],
)  # fmt: skip
def test_malformed_options(text):
    with pytest.raises(ConfigError) as error:
        split_drafts(text)
    assert error.value.found.startswith("--draft self:")
    assert error.value.needed
    assert error.value.do


def test_layers_that_cannot_be():
    for layers in (Layers((0, 8)), Layers((8,), True)):
        with pytest.raises(ConfigError) as error:
            layers.kept(8)
        assert error.value.found == f"--draft self:{layers.option}, and a target of 8 layers"
        assert error.value.needed == "layers among 0 … 7"
    with pytest.raises(ConfigError, match="one layer that is left"):
        Layers(tuple(range(8)), True).kept(8)


def test_names_of_others():
    names = ("self", "self_l", "self_l2to1", "self_l1_0", "self_l0_1", "self_l01", "self_w8_s4_l1")
    names += ("draft_0", "lookup-3", "self_l1_w8", "self_y1", "self_l99999")
    names += ("suffix", "self_w16", "self_s4_w3")
    assert not any(map(SelfDraft.named, names))


def test_plans():
    (chain,) = choose_plans([], None, ("self_l0_2to5_w64_s4",))
    assert (chain.name, chain.max_depth) == ("selfl0.2to5w64s4-chain-4", 4)
    assert (chain.models, chain.asked) == ((), drafters_of("self_l0_2to5_w64_s4"))
    assert chain.views == (View(64),)
    assert chain.self_drafts == (SelfDraft(View(64), Layers((0, 2, 3, 4, 5))),)
    assert chain.is_static
    # its root alone: rows before it are the target's
    assert chain.catch_up == chain.asked[0].first_level(chain.catch_up) == 1
    merged = SpecPlan.from_widths((1, 1), ("draft_0", "self_x1", "lookup-2"), "merge")
    assert merged.name == "merge-0+selfx1+lookup2-chain-2"
    assert [draft.first_level(merged.catch_up) for draft in merged.asked] == [3, 1]
    assert merged.views == ()
    for plan in (chain, merged):
        assert plan_from_json(plan_to_json(plan)) == plan


def test_plans_of_different_layers_have_different_names():
    drafts = ("self_l1_3", "self_l13", "self_x1_3", "self_x13", "self_l1_3to4", "self_l1_34")
    names = [SpecPlan.from_widths((1,), (draft,)).name for draft in drafts]
    assert len(set(names)) == len(drafts)
