"""Engines whose draft reads the target's hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest

from specc.compiler.build import build
from specc.errors import ConfigError, HeadError
from specc.runtime.core import EngineCore
from tests import models
from tests.draft_kinds.eagle3 import RIGS
from tests.heads import WIDTH
from tests.lossless import Zoo
from tests.runtime.draft_cases import SIZES, write_target
from tests.runtime.head_rig import BLOCK, TREE, load, options, prompts_of, serve
from tests.runtime.live_rig import ScriptedNodes

(RIG,) = RIGS


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> Path:
    return write_target(zoo)


@pytest.mark.slow
def test_features_of_requests_whose_trees_have_dead_nodes(zoo: Zoo) -> None:
    """The target has no features of nodes that it does not verify, and nobody reads any."""
    policy = ScriptedNodes(TREE)
    core = EngineCore(load(RIG.engine(zoo)), policy=policy)
    oracle = RIG.oracle(zoo)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK), num_tokens=8, temperature=1.5)
    assert any(len(set(live)) > 1 for live in policy.asked)
    assert oracle.depths == set(range(TREE.max_depth))
    assert core.scheduler.stats.mean_acceptance_length > 1.0


def test_every_plan_by_load(zoo: Zoo) -> None:
    """Where the policy chooses by load, plans change from step to step."""
    core = EngineCore(load(RIG.engine(zoo)), policy="goodput")
    oracle = RIG.oracle(zoo)
    oracle.watch(core)
    serve(core, oracle, prompts_of(BLOCK)[2:4], num_tokens=12)
    assert oracle.num_nodes > 10


def test_a_head_of_another_target(zoo: Zoo, tmp_path: Path) -> None:
    head = RIG.draft(zoo, RIG.case)
    sizes = {**SIZES, "hidden_size": 2 * WIDTH}
    other = zoo.once("head-other", lambda path: models.save_tiny("llama", path, **sizes))
    with pytest.raises(HeadError, match="draft 0: "):
        build(other, head, tmp_path / "e", options(plans=()))


def test_two_heads_that_read_other_places(zoo: Zoo, target: Path, tmp_path: Path) -> None:
    heads = [RIG.draft(zoo, name) for name in (RIG.case, "nvidia")]
    with pytest.raises(ConfigError, match=r"boundaries 2, 4, 5, .* 3, 1, 6, 7"):
        build(target, heads, tmp_path / "e", options(plans=()))
