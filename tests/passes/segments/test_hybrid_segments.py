"""Segments of targets whose layers keep states are the program that they are cut from: its bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from specc.passes.program import STATES
from specc.passes.segments.places import layer_places, stage_places
from tests import models
from tests.passes.segments.lockstep import Cut
from tests.passes.shard.test_hybrid_lockstep import passes
from tests.tiers import only

# a value of the first layer is read by all others
NOT_BY_LAYERS = ("zamba2",)
NAMES = [name for name in models.HYBRIDS if name not in NOT_BY_LAYERS]


@pytest.mark.parametrize("name", only(("qwen3_5", "nemotron_h"), NAMES))
def test_layers_one_after_another_are_the_model(name: str) -> None:
    cut = Cut.make(name)
    for inputs in passes():
        cut.check(inputs)
    assert_each_once([x.layers for x in cut.segments], len(cut.program.layers))
    assert_each_once([x.state_layers for x in cut.segments], len(cut.program.state_layers))
    # the embedding and the head keep nothing, and every other segment does
    kept = [bool(x.layers or x.state_layers) for x in cut.segments]
    assert kept == [False, *[True] * (len(kept) - 2), False]
    for segment in cut.segments:
        assert STATES in segment.program.runtime_inputs
        assert len(segment.program.state_layers) == len(segment.state_layers)


def test_equal_layers_are_one_kind() -> None:
    """Two kinds of layers, and both ends."""
    cut = Cut.make("lfm2")
    kinds = [x.kind for x in cut.segments]
    assert kinds[1] == kinds[2] == kinds[4]
    assert len(set(kinds)) == 4


@pytest.mark.parametrize("name", only(("qwen3_5",), NAMES))
def test_stages_are_the_model(name: str) -> None:
    cut = Cut.make(name, partial(stage_places, num_stages=2))
    for inputs in passes():
        cut.check(inputs)
    assert_each_once([x.state_layers for x in cut.segments], len(cut.program.state_layers))


def test_a_model_without_attention_is_cut_by_its_states() -> None:
    cut = Cut.make("mamba2", layer_places)
    assert [len(x.state_layers) for x in cut.segments] == [0, 2, 2, 0]
    for inputs in passes():
        cut.check(inputs)


def assert_each_once(parts: Sequence[tuple[int, ...]], count: int) -> None:
    assert [layer for part in parts for layer in part] == list(range(count))
