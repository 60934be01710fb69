"""Segments one after another are the program that they were cut from, to the bit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache, partial

import pytest
import torch
from torch import nn

from specc.errors import ConfigError, UnsupportedGraphError
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import constant_key
from specc.passes.proof.verify_graph import verify_graph
from specc.passes.quantize.quantize_linear import quantize_phases
from specc.passes.rewrite.insert_block_mass import InsertBlockMass
from specc.passes.segments.cut_segments import cut_segments, segments_to_json
from specc.passes.segments.places import (
    CutPlace,
    cut_places,
    layer_places,
    stage_places,
    stream_places,
)
from specc.speculation.plans import SpecPlan
from tests import models
from tests.passes.segments.lockstep import Cut, bind_segments
from tests.passes.shard.lockstep import (
    Inputs,
    ThreadRanks,
    assert_alike,
    make_caches,
    prompt_inputs,
    shard_phases,
    tree_inputs,
    whole_weights,
)
from tests.tiers import every, only
from tests.traces import trace_once

ARCHITECTURES = (*models.ARCHITECTURES, "gemma3-tied")
TIED = ("gemma3-tied", "gpt2", "opt")
PROMPTS = [models.prompts()[3], models.prompts()[1]]
PLANS = [SpecPlan.from_widths(widths) for widths in ((1,), (1, 1, 1, 1), (3, 2, 1))]


by_layers = cache(Cut.make)


def passes() -> Sequence[Inputs]:
    """Two prompts, then a token, a chain and a tree over the rows that they left."""
    generator = torch.Generator().manual_seed(7)
    committed = [len(prompt) for prompt in PROMPTS]
    made = [prompt_inputs(PROMPTS)]
    for plan in PLANS:
        tokens = torch.randint(models.VOCAB, (2, plan.num_nodes), generator=generator)
        made.append(tree_inputs(plan, tokens, committed))
    return made


@pytest.mark.default("qwen3")
@pytest.mark.parametrize("name", only(("qwen3", "gemma3", "gpt2"), ARCHITECTURES))
def test_layers_one_after_another_are_the_model(name: str) -> None:
    cut = by_layers(name)
    layers = len(cut.program.layers)
    assert [segment.layers for segment in cut.segments] == [(), *((i,) for i in range(layers)), ()]
    for inputs in passes():
        cut.check(inputs)
    keys = [key for segment in cut.segments for key in segment.keys if "constant" not in key]
    assert set(keys) == {weight.key for weight in cut.program.weights.values()}
    # an embedding that is the head, too, is in two segments
    assert len(keys) - len(set(keys)) == (name in TIED)


@pytest.mark.default("qwen3")
@pytest.mark.parametrize("name", only(("qwen3", "gpt_neox"), ARCHITECTURES))
def test_everywhere_that_it_can_be_cut(name: str) -> None:
    """Some segments have no attention, and some are one operator."""
    cut = Cut.make(name, cut_places)
    assert len(cut.segments) > 2 * len(cut.program.layers)
    for inputs in passes()[::3]:
        cut.check(inputs)
    for segment in cut.segments:
        verify_graph(segment.program, "segments", is_final=True)


@pytest.mark.parametrize(
    "name", only(("mixtral",), every(2, ["qwen3", "gpt2", "gpt_neox", "opt", "mixtral"]))
)
def test_equal_layers_are_one_kind(name: str) -> None:
    depth = {"n_layer": 4} if name == "gpt2" else {"num_hidden_layers": 4}
    cut = Cut.make(name, **depth)
    assert [segment.kind for segment in cut.segments] == [0, 1, 1, 1, 1, 5]
    cut.check(passes()[0])
    cut.check(passes()[3])


def test_layers_of_another_window_are_another_kind() -> None:
    cut = by_layers("gemma3")
    assert [segment.kind for segment in cut.segments] == [0, 1, 2, 1, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_stages",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3],
)
def test_stages_have_nearly_equal_weights(num_stages: int) -> None:
    cut = Cut.make("qwen3", partial(stage_places, num_stages=num_stages), num_hidden_layers=6)
    assert len(cut.segments) == num_stages
    sizes = [segment.weight_bytes for segment in cut.segments]
    layer = sum(w.numel() * 4 for w in _layer(cut).values())
    assert max(sizes) - min(sizes) < layer if num_stages > 1 else True
    cut.check(passes()[0])
    cut.check(passes()[3])


def _layer(cut: Cut) -> dict[str, torch.Tensor]:
    found = {w.key: torch.empty(w.shape) for w in cut.program.weights.values()}
    return {key: value for key, value in found.items() if "layers.0." in key}


def test_stages_are_the_best_that_there_are() -> None:
    """Against all choices of places."""
    program = by_layers("llama").program
    places = stream_places(program)

    def squares(chosen: Sequence[CutPlace]) -> int:
        return sum(s.weight_bytes**2 for s in cut_segments(program, chosen))

    pairs = [(a, b) for i, a in enumerate(places) for b in places[i + 1 :]]
    assert squares(stage_places(program, 3)) == min(map(squares, pairs))


def test_quantized_weights_count_as_they_are_stored() -> None:
    """A byte an integer, not the size of what it stands for."""
    program = by_layers("qwen3").program.copy("target")
    Pipeline(quantize_phases("int8")).run(program)
    stored = {
        w.key: math.prod(w.stored_shape) * w.stored_dtype.itemsize for w in program.weights.values()
    }
    segments = cut_segments(program, layer_places(program))
    for segment in segments:
        constants = sum(value.nbytes for value in segment.program.constants.values())
        own = {weight.key for weight in segment.program.weights.values()}
        assert segment.weight_bytes == constants + sum(stored[key] for key in own)
    first = layer_places(program)[1]
    own = {w.key for s in segments[:2] for w in s.program.weights.values()}
    assert first.weight_bytes == sum(stored[key] for key in own)


def test_more_stages_than_places_are_refused() -> None:
    program = by_layers("llama").program
    most = len(stream_places(program)) + 1
    assert len(stage_places(program, most)) == most - 1
    with pytest.raises(ConfigError, match=f"{most + 1} stages of target, which has {most - 1}"):
        stage_places(program, most + 1)


def test_sums_of_attention_are_added_to_by_all_segments() -> None:
    """`mass` goes to every segment, and is the same as of the whole program."""
    cut = Cut.of(
        models.build_model("qwen3"), layer_places, (*PHASES, ("votes", (InsertBlockMass,)))
    )
    inputs = prompt_inputs(PROMPTS)
    table = inputs[6]
    assert table is not None
    masses = [torch.zeros(table.shape) for _ in range(2)]
    with torch.inference_mode():
        wanted = cut.whole(*inputs, masses[0])
        found = cut.joined(*inputs, masses[1])
    assert torch.equal(found, wanted)
    assert torch.equal(*masses)
    assert masses[0].sum() > 0


def test_a_place_with_two_values_alive_is_refused() -> None:
    program = by_layers("llama").program
    first, second = layer_places(program)[:2]
    middle = CutPlace(second.value, (first.index + second.index) // 2, 0)
    with pytest.raises(ValueError, match=r"which a segment before it computes|does not compute"):
        cut_segments(program, [middle])


class _Around(nn.Module):
    """A Llama whose first embedding is added again at the end: it is alive all the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.build_model("llama")

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        embedded = self.inner.model.embed_tokens(input_ids)
        out = self.inner.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return self.inner.lm_head(out + embedded)


@pytest.mark.slow
def test_a_model_that_cannot_be_cut_by_layers_is_refused() -> None:
    program = trace_once(_Around(), "target")
    Pipeline(PHASES).run(program)
    told = "target: no place to cut before the attention of layer 1"
    with pytest.raises(UnsupportedGraphError, match=re.escape(told)):
        layer_places(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3", marks=pytest.mark.slow),
        "gpt_neox",
        pytest.param("mixtral", marks=pytest.mark.slow),
    ],
)
def test_segments_of_ranks_are_the_model(name: str) -> None:
    """The cut for ranks first: every segment has its sums over ranks."""
    model = models.build_model(name)
    whole = Cut.of(model, layer_places)
    program = trace_once(model, "target")
    Pipeline(shard_phases(2)).run(program)
    plan = program.shard
    assert plan is not None
    segments = cut_segments(program, layer_places(program))
    weights = whole_weights(model, whole.program)
    kept = {constant_key(key): value for key, value in program.constants.items()}
    ranks = []
    for rank in range(2):
        own = {key: plan.by_key[key].take(value, rank) for key, value in weights.items()}
        own |= kept | {constant_key(c.name): c.value(rank) for c in plan.constants}
        ranks.append(bind_segments(segments_to_json(segments), own, make_caches(program)))
    for inputs in passes():
        with torch.inference_mode():
            wanted = whole.whole(*inputs)
        parts = ThreadRanks(2).run([partial(rank, *inputs) for rank in ranks])
        assert_alike(torch.cat(parts, 1), wanted)
