"""Programs of heads draft trees as a head does that computes every path anew."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specc.passes.drafters.registry import drafter_of_files
from specc.passes.facts import features_are_read
from specc.passes.frontend.read_program import read_program
from specc.passes.frontend.trace import trace
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import PHASES, Phases, Pipeline
from specc.passes.program import Program, constant_key
from specc.passes.program_json import program_to_json
from specc.passes.proof.verify_graph import verify_graph
from specc.passes.rewrite.read_features import ReadFeatures
from tests.head_reference import hidden_states
from tests.heads import CASES, VOCAB
from tests.passes.drafters.drafted_trees import PagedDrafts, TreeDrafts
from tests.tiers import only

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
# one of each layout, and between them every flag, both kinds of layers, and windows


READ: Phases = (("features", (ReadFeatures,)),)


def program_of(loaded: Any, more: Phases = ()) -> Program:
    """A head's program, traced without weights, after these phases, too."""
    rows = drafter_of_files(loaded.spec).rows(loaded.spec, torch.float32)
    program = trace(loaded.source.module, "draft_0", rows=rows, hands_on=True)
    Pipeline((*PHASES, *more)).run(program)
    return program


@pytest.mark.parametrize("name", only(("safeailab-narrow",), CASES))
def test_trees_over_several_steps(name, load, target):
    """Logits of every node, after acceptances of every length, of two sequences in one pass."""
    check_trees(name, load(name), target)


@pytest.mark.slow
@pytest.mark.parametrize("name", only(("speculators-sliding",), CASES))
def test_trees_over_slabs(name, load, target):
    """The same of programs that read features from slabs, and write there what they hand on."""
    check_trees(name, load(name), target, READ, PagedDrafts)


def test_what_is_written_is_read_back(load):
    """Graph, inputs, and the rows that the memory plan counts."""
    program = program_of(load("safeailab-narrow"), READ)
    data = program_to_json(program)
    constants = {constant_key(name): value for name, value in program.constants.items()}
    layers = [(layer.name, layer.window) for layer in program.layers]
    keys = [*(weight.key for weight in program.weights.values()), *constants]
    found = read_program(data, constants, layers, keys)
    assert program_to_json(found) == data
    assert features_are_read(found)
    assert (found.runtime_inputs, found.row_inputs) == (program.runtime_inputs, ("feature_rows",))
    assert (found.taps, found.feature_width) == (None, 24)
    verify_graph(found, "reading", is_final=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_trees_after_the_phases_for_cuda(name, load, target):
    check_trees(name, load(name), target, cuda_phases(64))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_trees_over_slabs_after_the_phases_for_cuda(name, load, target):
    check_trees(name, load(name), target, (*READ, *cuda_phases(64)), PagedDrafts)


def check_trees(
    name: str, loaded: Any, target: Any, more: Phases = (), kind: type[TreeDrafts] = TreeDrafts
) -> None:
    """Compare every node of several trees with the head that computes its path anew."""
    chooser = random.Random(name)
    prompts = [[chooser.randrange(VOCAB) for _ in range(n)] for n in (9, 4)]
    boundaries = loaded.reference.case.boundaries
    drafts = kind(
        program_of(loaded, more),
        loaded.module,
        prompts,
        lambda tokens: hidden_states(target, tokens, boundaries),
    )
    # tokens of a path that are accepted, of each sequence
    for lengths in ((0, 3), (2, 1), (0, 0)):
        found = drafts.step(chooser, VOCAB)
        for b, own in enumerate(drafts.sequences):
            assert len(found[b]) == 9
            taps = drafts.taps_of(own.tokens[:-1])
            for path, logits in found[b]:
                want = loaded.reference.logits(taps, own.tokens, path)
                torch.testing.assert_close(logits, want, **CLOSE)
            path = chooser.choice([path for path, _ in found[b] if len(path) == 3])
            drafts.accept(b, path[: lengths[b]], chooser.randrange(VOCAB))
