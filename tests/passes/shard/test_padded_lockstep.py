"""Padded programs of ranks in lockstep compute what the whole one does, as graphs and as ONNX."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.errors import UnsupportedGraphError
from specc.passes.lower.onnx.operators import COLLECTIVE, DOMAIN
from specc.passes.shard import dimension_rules
from tests import models
from tests.passes.shard.lockstep import assert_alike
from tests.passes.shard.padded_lockstep import PaddedRanks, Ranks, Values

ranks_of = cache(PaddedRanks)
# heads that are copied, views over tokens of several sequences, a parallel residual, a window and
# one table for both ends, experts
USUAL = {("llama", 4), ("gpt2", 2), ("gemma3-tied", 2)}
ALL = [(name, n) for name in (*models.ARCHITECTURES, "gemma3-tied") for n in (2, 4)]


def cases(usual: set[tuple[str, int]]) -> list[Any]:
    return [pytest.param(*c, marks=[] if c in usual else [pytest.mark.slow]) for c in ALL]


def check(found: PaddedRanks, run: Ranks, inputs: Values) -> Values:
    """A pass of all ranks and of the whole program; returns the caches after it."""
    wanted, written = found.run_whole(inputs)
    passed = run(inputs)
    parts = [logits for logits, _ in passed]
    assert_alike(torch.cat(parts, 1) if found.plan.cuts_vocabulary else parts[0], wanted)
    for rank, (_, own) in enumerate(passed):
        for name, value in written.items():
            assert torch.allclose(own[name], found.part_of_cache(name, value, rank), atol=2e-5)
    return written


@pytest.mark.parametrize(("name", "num_ranks"), cases(USUAL))
def test_graphs_of_all_ranks_are_the_whole_one(name: str, num_ranks: int) -> None:
    """Prompts, then a tree over the rows that they left."""
    found = ranks_of(name, num_ranks)
    found.caches = check(found, found.run_graphs, found.prompt())
    check(found, found.run_graphs, found.tree())


@pytest.mark.parametrize(("name", "num_ranks"), cases({("llama", 4), ("gemma3-tied", 2)}))
def test_files_of_all_ranks_are_the_whole_program(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    found = ranks_of(name, num_ranks)
    file = found.write(tmp_path)
    assert file.operators[COLLECTIVE] == len(found.plan.collectives)
    run = lambda inputs: found.run_files(tmp_path, inputs)  # noqa: E731
    found.caches = check(found, run, found.prompt())
    check(found, run, found.tree())


def test_a_sum_says_its_ranks(tmp_path: Path) -> None:
    import onnx

    found = ranks_of("llama", 4)
    found.write(tmp_path)
    model = onnx.load(str(tmp_path / "rank-3.model.onnx"), load_external_data=False)
    sums = [node for node in model.graph.node if node.op_type == COLLECTIVE]
    for node in sums:
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert node.domain == DOMAIN
        assert given == {
            "collective_operation": b"all_reduce",
            "reduce_op": b"sum",
            "root": -1,
            "nb_rank": 4,
        }
    # each rank's file names that rank's weights
    places = {
        e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"
    }
    assert places == {"rank-3.weights.safetensors"}


def test_another_cut_than_that_of_the_flat_program_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a rule that padded programs alone ask: without it, heads stay whole
    rules = {k: v for k, v in dimension_rules._RULES.items() if k != "masked_attention"}
    monkeypatch.setattr(dimension_rules, "_RULES", rules)
    with pytest.raises(UnsupportedGraphError, match=re.escape("target is cut in one way where")):
        PaddedRanks("llama", 2)
