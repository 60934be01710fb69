"""Padded programs of ranks in lockstep compute what the whole one does, as graphs and as ONNX."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.kernels.operator import NoRule
from specc.kernels.ops import operator_of
from specc.passes.lower.onnx.lower import OnnxFile
from specc.passes.lower.onnx.operators import COLLECTIVE, DOMAIN
from tests import models
from tests.passes.shard.lockstep import assert_alike
from tests.passes.shard.padded_lockstep import PaddedRanks, Ranks, Values

Written = Callable[[str, int], tuple[Path, OnnxFile]]
ranks_of = cache(PaddedRanks)
# heads that are copied, and views over tokens of several sequences; windows, one table for both
# ends, parallel residuals and experts in the slow tier, as are files of all but the first
USUAL = {("llama", 4), ("gpt2", 2)}
ALL = [(name, n) for name in (*models.ARCHITECTURES, "gemma3-tied") for n in (2, 4)]


def cases(usual: set[tuple[str, int]]) -> list[Any]:
    return [pytest.param(*c, marks=[] if c in usual else [pytest.mark.slow]) for c in ALL]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Files of all ranks of a model, written once."""

    @cache
    def write(name: str, num_ranks: int) -> tuple[Path, OnnxFile]:
        directory = tmp_path_factory.mktemp(f"{name}-{num_ranks}")
        return directory, ranks_of(name, num_ranks).write(directory)

    return write


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


@pytest.mark.default("gpt2-2")
@pytest.mark.parametrize(("name", "num_ranks"), cases(USUAL))
def test_graphs_of_all_ranks_are_the_whole_one(name: str, num_ranks: int) -> None:
    """Prompts, then a tree over the rows that they left."""
    found = ranks_of(name, num_ranks)
    found.caches = check(found, found.run_graphs, found.prompt())
    check(found, found.run_graphs, found.tree())


@pytest.mark.parametrize(("name", "num_ranks"), cases({("llama", 4)}))
def test_files_of_all_ranks_are_the_whole_program(
    written: Written, name: str, num_ranks: int
) -> None:
    found = ranks_of(name, num_ranks)
    directory, file = written(name, num_ranks)
    assert file.operators[COLLECTIVE] == len(found.plan.collectives)
    run = lambda inputs: found.run_files(directory, inputs)  # noqa: E731
    found.caches = check(found, run, found.prompt())
    check(found, run, found.tree())


def test_a_sum_says_its_ranks(written: Written) -> None:
    import onnx

    directory, _ = written("llama", 4)
    model = onnx.load(str(directory / "rank-3.model.onnx"), load_external_data=False)
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
    known = operator_of(ops.masked_attention)
    assert known is not None
    whole = replace(known, cut=NoRule("attention goes over it"))
    monkeypatch.setattr(
        ops,
        "operator_of",
        lambda target: whole if target is ops.masked_attention else operator_of(target),
    )
    with pytest.raises(UnsupportedGraphError, match=re.escape("target is cut in one way where")):
        PaddedRanks("llama", 2)
