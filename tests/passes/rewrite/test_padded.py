"""Padded programs compute what the flat ones of the same models compute."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from specc.artifact.cache_rows import CacheRows, Reach, reach_of
from specc.errors import SpeccError, UnsupportedAttentionError, UnsupportedGraphError
from specc.kernels import ops
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import PADDED_INPUTS, Weight
from specc.passes.rewrite.map_vocabulary import FitVocabulary
from specc.passes.rewrite.padded import _require_same_weights, logits_width, padded_program
from tests import models
from tests.flat_passes import PADDING, causal_pass, first_level, random_tree, tree_pass
from tests.onnx_models import BothPrograms, Lowered, lowered
from tests.passes.modules import Tiny, compiled
from tests.traces import shared_traces, trace_once

ROWS = CacheRows(front=2, slots=100, scratch=74)
CHOOSER = random.Random(6)
# the window of tests/models.py is 16 rows
PASSES = (
    causal_pass([0, 30], [21, 21], [0, 1]),
    causal_pass([21, 51, 5], [1, 1, 1], [0, 1, 2]),
    first_level([0, 1, 40], 3, [0, 1, 2]),
    tree_pass([21, 51], [random_tree(CHOOSER, 9) for _ in range(2)], [0, 1]),
    tree_pass([3, PADDING], [random_tree(CHOOSER, 66) for _ in range(2)], [2, 3]),
)
ALL = (*models.ARCHITECTURES, *models.ROTARY_VARIANTS, "gemma3-tied")
DEFAULT = ("gemma3", "opt")
NAMES = [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in ALL]


@pytest.fixture(autouse=True, scope="module")
def _traces() -> Iterator[None]:
    with shared_traces():
        yield


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> Lowered:
    return once(request.param)


@functools.cache
def once(name: str) -> Lowered:
    return lowered(name, ROWS)


@pytest.fixture(scope="module")
def windowed() -> Lowered:
    return once("gemma3")


@pytest.mark.default("gemma3")
def test_passes_equal_those_of_the_flat_program(pair: Lowered) -> None:
    both = BothPrograms(pair, None, 4)
    for inputs in PASSES:
        both.compare(inputs, 1e-5)


def test_both_read_the_same_weights(pair: Lowered) -> None:
    flat, found = (
        {weight.key: weight for weight in program.weights.values()}
        for program in (pair.flat, pair.padded)
    )
    assert flat == found
    assert pair.padded.layers == pair.flat.layers


def test_inputs_and_what_reads_them(pair: Lowered) -> None:
    program = pair.padded
    masks = tuple(reach.mask_input for reach in pair.reaches)
    assert program.runtime_inputs == (*PADDED_INPUTS, *masks)
    inputs = [node.target for node in program.graph.find_nodes(op="placeholder")]
    layers = range(len(program.layers))
    caches = [f"{part}_cache_{layer}" for layer in layers for part in "kv"]
    assert inputs[-len(caches) - len(masks) - 4 :] == [*PADDED_INPUTS, *masks, *caches]
    batch, nodes = program.placeholder("tokens").meta["val"].shape
    for name in masks:
        mask = program.placeholder(name).meta["val"]
        assert (mask.dtype, mask.shape) == (torch.bool, (batch, 1, nodes, ROWS.total))
    attentions = program.calls(ops.masked_attention)
    flat = pair.flat.calls(ops.tree_attention)
    assert len(attentions) == len(flat) == len(layers)
    for number, (node, other, layer) in enumerate(
        zip(attentions, flat, program.layers, strict=True)
    ):
        _, keys, values, mask, scale = node.args
        assert mask.target == reach_of(layer).mask_input
        assert scale == other.kwargs["scale"]
        for part, written in (("k", keys), ("v", values)):
            assert written.target is ops.cache_write
            cache, index = written.args[0].target, written.args[2].target
            assert (cache, index) == (f"{part}_cache_{number}", "write_index")
            shape = (batch, layer.num_kv_heads, ROWS.total, layer.head_dim)
            assert program.placeholder(cache).meta["val"].shape == shape
    assert len(program.calls(ops.cache_write)) == len(caches)


def test_as_much_is_fused_as_of_the_flat_program(pair: Lowered) -> None:
    for name in ("FuseQKV", "FuseGateUp", "SelectLogits", "ReplaceGroupedMM"):
        counts = [
            next(record.rewrites for record in records if record.name == name)
            for records in (pair.flat_records, pair.records)
        ]
        assert counts[0] == counts[1], name


def test_each_window_has_a_mask_of_its_own(windowed: Lowered) -> None:
    assert windowed.reaches == [Reach(), Reach(models.WINDOW)]
    masks = [node.args[3].target for node in windowed.padded.calls(ops.masked_attention)]
    assert masks == [f"mask_window_{models.WINDOW}", "mask", f"mask_window_{models.WINDOW}"]


@pytest.mark.slow
def test_a_vocabulary_cut_to_the_targets_is_cut_here_too() -> None:
    model = models.build_model("qwen3")
    flat = trace_once(model, "draft_0")
    Pipeline((*PHASES, ("vocabulary", (partial(FitVocabulary, 100),)))).run(flat)
    program, records = padded_program(model, flat, ROWS.total)
    assert logits_width(flat) == logits_width(program) == 100
    pair = Lowered(model, flat, program, [], records, ROWS, ())
    assert BothPrograms(pair, None, 4).compare(PASSES[0], 1e-5).shape == (42, 100)


def test_graphs_are_written_where_asked(tmp_path, windowed: Lowered) -> None:
    padded_program(windowed.model, windowed.flat, ROWS.total, tmp_path)
    names = {path.name for path in (tmp_path / "padded").rglob("*") if path.is_file()}
    assert any("attention" in name for name in names), names


def changed(pair: Lowered, **changes: object) -> object:
    return replace(copy.copy(pair.flat), **changes)


def test_other_layers_are_refused(windowed: Lowered) -> None:
    fewer = changed(windowed, layers=windowed.flat.layers[:-1])
    with pytest.raises(UnsupportedAttentionError, match="3 attention layers") as caught:
        padded_program(windowed.model, fewer, ROWS.total)
    assert "and 2 where they are flat" in caught.value.found
    heads = [replace(layer, num_kv_heads=3) for layer in windowed.flat.layers]
    with pytest.raises(UnsupportedAttentionError, match=r"layer .*: keys of \d heads of 16"):
        padded_program(windowed.model, changed(windowed, layers=heads), ROWS.total)


def test_other_weights_are_refused(windowed: Lowered) -> None:
    weights = windowed.flat.weights
    name, weight = next(iter(weights.items()))
    for other in (
        {key: value for key, value in weights.items() if key != name},
        weights | {name: replace(weight, in_blocks=True)},
        weights | {name: Weight(weight.parameters, torch.float16, weight.shape)},
    ):
        with pytest.raises(UnsupportedGraphError, match="and other weights") as caught:
            _require_same_weights(changed(windowed, weights=other), windowed.padded)
        assert weight.key in caught.value.found


class ForManySequences(nn.Module):
    """Other weights where there are several sequences: not seen in a trace of one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.many = models.build_model("llama"), models.build_model("llama", seed=1)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        model = self.one if input_ids.shape[0] == 1 else self.many
        return model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


@pytest.mark.slow
def test_a_model_that_computes_otherwise_for_several_sequences_is_refused() -> None:
    model = ForManySequences().eval()
    flat, _ = compiled(model)
    with pytest.raises(UnsupportedGraphError, match="and other weights"):
        padded_program(model, flat, ROWS.total)


def test_a_model_of_one_sequence_is_refused() -> None:
    """`Tiny` reshapes to a batch of one."""
    model = Tiny().eval()
    flat, _ = compiled(model)
    with pytest.raises(SpeccError):
        padded_program(model, flat, ROWS.total)
