"""Engines whose draft proposes all levels from masks after a text: PARD models, P-EAGLE heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.manifest import Manifest
from specc.cli.render import head_lines
from specc.compiler.build import build
from specc.drafters.pard import PardDraft
from specc.errors import ConfigError, EngineError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import MAX_NODES
from tests import models
from tests.draft_kinds.pard import MASK, PardRig
from tests.draft_kinds.pard import RIGS as PARDS
from tests.draft_kinds.peagle import RIGS as PEAGLES
from tests.draft_kinds.rig import DraftRig
from tests.heads import VOCAB
from tests.lossless import Zoo
from tests.runtime.draft_cases import outputs, write_target
from tests.runtime.head_rig import BLOCK, TREE, load, options, prompts_of, serve

WIDE, SHORT = SpecPlan.from_widths((3, 2, 1)), SpecPlan.from_widths((3, 2))


@pytest.mark.parametrize("rig", [PARDS[0], pytest.param(PEAGLES[0], marks=pytest.mark.slow)])
def test_every_child_of_every_node(rig: DraftRig, zoo: Zoo) -> None:
    """Of sequences in one pass, after rejections; passes are as long as their plan is deep."""
    path = rig.engine(zoo, label="wide", plans=(WIDE, SHORT))
    for plan in (WIDE, SHORT):
        core, oracle = EngineCore(load(path), plan.name), rig.oracle(zoo)
        assert core.engine.plans[plan.name].num_rows == plan.num_nodes
        oracle.watch(core)
        oracle.check_trees(core, plan)
        serve(core, oracle, prompts_of(BLOCK)[1:4], num_tokens=6, temperature=1.5, rule="mss")
        assert oracle.num_nodes > 25


def test_what_the_engine_says_of_a_pard_model(zoo: Zoo) -> None:
    """An ordinary model, whose plans say how it is asked."""
    rig = PARDS[0]
    manifest = Engine.load(rig.engine(zoo)).manifest
    assert manifest is not None
    draft = manifest.models[1]
    mask = rig.cases[rig.case][1]["pard_token"]
    assert (draft.head, manifest.models[0].taps, draft.vocab_size) == (None, None, VOCAB)
    for entry in manifest.plans[:-1]:
        assert entry.plan.drafters == (PardDraft(MAX_NODES, mask, draft="draft_0"),)
    (line,) = head_lines(manifest)
    assert f"all levels of a tree in one pass; mask token {mask}" in line
    data = manifest.to_json()
    assert Manifest.from_json(json.loads(json.dumps(data))) == manifest

    def refused(change: Any, found: str) -> None:
        changed = json.loads(json.dumps(data))
        change(changed["plans"][0]["blocks"][0])
        with pytest.raises(EngineError, match=found):
            Manifest.from_json(changed)

    # a block drafter reads hidden states, of which this engine keeps none
    refused(lambda block: block.update(kind="", size=4), "plan chain-3 has blocks of draft_0")
    refused(lambda block: block.update(from_anchor=False), "a block")
    refused(lambda block: block.update(size=0), r"blocks\[0\].size is 0")
    refused(lambda block: block.update(kind="peagle"), "plan chain-3 has blocks of draft_0")


def test_states_are_not_taken_back_past_masks(zoo: Zoo, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    more = {"vocab_size": VOCAB, "pard_token": MASK}
    draft = models.save_tiny("lfm2", tmp_path / "draft", 7, **sizes, **more)
    with pytest.raises(ConfigError, match="draft_0, a draft that reads masks, whose layers keep"):
        build(write_target(zoo), draft, tmp_path / "e", options())


@pytest.mark.slow
def test_a_window_over_its_rows(zoo: Zoo) -> None:
    """`--draft-kv` is for it as for any model: outputs are those without a draft."""
    rig: PardRig = PARDS[1]
    path = rig.engine(zoo, label="window", plans=(TREE,), draft_kv=("window=16,sink=2",))
    engine = Engine.load(path)
    assert outputs(EngineCore(engine, TREE.name)) == outputs(EngineCore(engine, "off"))
    assert rig.cases[rig.case][1]["pard_token"] == MASK
