"""A program that is read back from its file is the program that was written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from specc.errors import EngineError
from specc.kernels import ops
from specc.passes.frontend.read_program import read_program
from specc.passes.lower.cpu.phases import LAYOUT_PHASES
from specc.passes.memory import PassShape, plan_memory
from specc.passes.pipeline import PHASES, Phases, Pipeline
from specc.passes.program import Program, constant_key
from specc.passes.program_json import program_to_json
from specc.passes.rewrite.tap_features import TapFeatures
from specc.passes.shard.shard import Shard
from specc.speculation.taps import Taps
from tests import models
from tests.tiers import only
from tests.traces import trace_once

# others are cut anew by tests/specc/compiler/test_reshard.py
SOME = ("opt", "gpt_neox", "qwen3_moe")
ARCHITECTURES = [
    pytest.param(name, marks=() if name in SOME else pytest.mark.slow)
    for name in (*models.ARCHITECTURES, "gemma3-tied")
]
SHAPE = PassShape(num_tokens=40, num_rows=3, batch_size=3, longest=20, context=64)


def traced(name: str, phases: Phases) -> Program:
    program = trace_once(models.build_model(name), "target")
    Pipeline(phases).run(program)
    return program


def read_back(program: Program, data: dict[str, Any]) -> Program:
    constants = {constant_key(name): value for name, value in program.constants.items()}
    layers = [(layer.name, layer.window) for layer in program.layers]
    keys = [*(weight.key for weight in program.weights.values()), *constants]
    return read_program(data, constants, layers, keys)


@pytest.mark.parametrize("name", only(("opt",), ARCHITECTURES))
def test_what_is_written_is_read_and_cut_alike(name: str) -> None:
    whole = traced(name, PHASES)
    data = program_to_json(whole)
    found = read_back(whole, data)
    assert program_to_json(found) == data
    assert found.layers == whole.layers
    assert found.caches == whole.caches
    assert list(found.weights.items()) == list(whole.weights.items())
    assert list(found.constants) == list(whole.constants)
    sizes = [plan_memory(item, torch.float32, 64, [SHAPE]) for item in (found, whole)]
    assert sizes[0] == sizes[1]
    cut = (("shard", (partial(Shard, 2),)), *LAYOUT_PHASES)
    again = read_back(whole, data)
    Pipeline(cut).run(again)
    fresh = traced(name, (*PHASES, *cut))
    assert program_to_json(again) == program_to_json(fresh)
    assert again.shard == fresh.shard


def test_what_is_kept_for_drafts_is_read_back() -> None:
    taps = Taps((2, 0), is_last_normed=True)
    whole = traced("llama", (*PHASES, ("taps", (partial(TapFeatures, taps),))))
    data = program_to_json(whole)
    found = read_back(whole, data)
    assert program_to_json(found) == data
    assert (found.taps, found.feature_width) == (taps, 128)
    assert found.caches == whole.caches
    # 64 rows of two hidden states of 64 columns
    plain = traced("llama", PHASES)
    planned = [plan_memory(item, torch.float32, 64, [SHAPE]).cache for item in (found, plain)]
    assert planned[0] - planned[1] == 64 * 128 * 4


def test_new_nodes_are_named_after_the_graph_alone() -> None:
    """Nodes of the same operators, which were there before the cut, leave no trace."""
    programs = [traced("llama", PHASES) for _ in range(2)]
    graph = programs[1].graph
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        for target in (ops.all_reduce, torch.ops.aten.sub.Tensor):
            values = (output.args[0],) * len(target._schema.arguments[:2])
            graph.erase_node(graph.call_function(target, values))
    for program in programs:
        Pipeline((("shard", (partial(Shard, 2),)),)).run(program)
    assert program_to_json(programs[0]) == program_to_json(programs[1])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(
            lambda data: data["inputs"].pop(0), "cannot be read: KeyError", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda data: data["inputs"][0].update(kind="other"),
            "cannot be read: ValueError",
            marks=pytest.mark.slow,
        ),
        (lambda data: data["inputs"][0].update(shape=[3]), r"is float32\[3\] here, and float32\["),
        (lambda data: data["graph"]["nodes"][-1].update(val="float32[3]"), r"float32\[3\] in its"),
        (lambda data: data["graph"]["nodes"].pop(-2), "cannot be decoded"),
    ],
)
def test_what_is_no_program_of_this_version_is_refused(
    change: Callable[[dict[str, Any]], Any], told: str
) -> None:
    whole = traced("llama", PHASES)
    data = program_to_json(whole)
    change(data)
    with pytest.raises(EngineError, match=told):
        read_back(whole, data)
