"""Layers are found between values that everything goes through, and can be left out."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from specc.errors import UnsupportedGraphError
from specc.kernels import ops
from specc.passes.pipeline import PHASES, Pipeline
from specc.passes.program import Program
from specc.passes.program_json import program_to_json
from specc.passes.residual import layer_regions, stream_values
from specc.passes.rewrite.skip_layers import SkipLayers
from tests import models
from tests.passes.modules import Tiny, dense_logits, program_logits, traced
from tests.tiers import only
from tests.traces import trace_once

NUM_LAYERS = 3
ALL = (*models.ARCHITECTURES, "gemma3-tied")
# serial and parallel blocks, norms behind a branch, flattened branches, a mixture
DEFAULT = ("gemma3", "phi", "opt", "qwen3_moe")
NAMES = [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in ALL]
PARALLEL = ("phi", "gpt_neox")
TOKENS = torch.randint(0, models.VOCAB, (20,), generator=torch.Generator().manual_seed(5))
BEFORE_FUSION = PHASES[:3]


@cache
def of(name: str) -> tuple[nn.Module, Program]:
    count = "n_layer" if name == "gpt2" else "num_hidden_layers"
    model = models.build_model(name, **{count: NUM_LAYERS})
    program = trace_once(model, "target")
    Pipeline(BEFORE_FUSION).run(program)
    return model, program


def without(model: nn.Module, kept: tuple[int, ...]) -> nn.Module:
    """The module itself, with some of its layers alone."""
    layers = next(
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == NUM_LAYERS
    )
    parent, name = layers
    setattr(parent, name, nn.ModuleList(getattr(parent, name)[number] for number in kept))
    if hasattr(model.config, "layer_types") and model.config.layer_types:
        model.config.layer_types = [model.config.layer_types[number] for number in kept]
    model.config.num_hidden_layers = len(kept)
    return model


@pytest.mark.parametrize("name", only(("opt",), NAMES))
def test_layers_are_found_without_names(name: str) -> None:
    _, program = of(name)
    regions = layer_regions(program)
    calls = program.calls(ops.tree_attention)
    assert [region.attention for region in regions] == calls
    assert [region.end for region in regions[:-1]] == [region.start for region in regions[1:]]
    shapes = {str(tuple(x.meta["val"].shape)) for r in regions for x in (r.start, r.end)}
    assert len(shapes) == 1
    # the middle of a block counts where the feed-forward part follows attention
    values, order = stream_values(program), list(program.graph.nodes)
    for region in regions:
        inside = [
            value
            for value in values
            if order.index(region.attention) < order.index(value) < order.index(region.end)
            and str(tuple(value.meta["val"].shape)) in shapes
        ]
        assert bool(inside) == (name not in PARALLEL)


@pytest.mark.parametrize("kept", [(0, 2), (1,), (0, 1), (1, 2), (2,)])
@pytest.mark.parametrize("name", only(("opt",), NAMES))
def test_what_is_left_is_the_model_without_these_layers(name: str, kept: tuple[int, ...]) -> None:
    model, program = of(name)
    before = program_to_json(program)
    draft = program.copy("self_l0")
    pipeline = Pipeline((("derive", (lambda: SkipLayers(kept),)), *PHASES[3:]))
    pipeline.run(draft)
    assert pipeline.records[0].rewrites == NUM_LAYERS - len(kept)
    assert sorted(set(draft.caches.values())) == sorted((n, part) for n in kept for part in "kv")
    assert [layer.name for layer in draft.layers] == [program.layers[n].name for n in kept]
    assert program_to_json(program) == before
    found = program_logits(draft, model, TOKENS)
    other = without(models.build_model(name, **_changes(name)), kept)
    torch.testing.assert_close(found, dense_logits(other, TOKENS), rtol=1e-4, atol=1e-4)


def _changes(name: str) -> dict[str, int]:
    return {"n_layer" if name == "gpt2" else "num_hidden_layers": NUM_LAYERS}


@pytest.mark.default("gemma3", "opt")
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_skipped_layers_are_not_read(name: str) -> None:
    _, program = of(name)
    draft = program.copy("self_l0")
    SkipLayers([0, 2]).run(draft)
    parts = [f".{number}." for number in range(NUM_LAYERS)]
    found = {part: [w.key for w in draft.weights.values() if part in w.key] for part in parts}
    assert found[".0."]
    assert found[".1."] == []
    assert found[".2."]
    assert SkipLayers(range(NUM_LAYERS)).run(program.copy("self_l0")).rewrites == 0


class TwoAttentions(Tiny):
    """The second attention reads what the first one gave, and nothing is added in between."""

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        attended = self.attend(*self.operands(x), positions)
        return x + self.o(attended.transpose(1, 2).flatten(2))


class LedPast(TwoAttentions):
    """The embedding is added to every layer's result, past its layer."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        first = self.embed(input_ids, position_ids)
        x = first + self.o(
            self.attend(*self.operands(first), position_ids).transpose(1, 2).flatten(2)
        )
        return self.project(self.after(x, position_ids) + first)


class NoStream(Tiny):
    """The last layer ends in another shape than it began with."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2 * self.width, 13, bias=False)

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        attended = self.attend(*self.operands(x), positions).transpose(1, 2).flatten(2)
        return torch.cat([x, self.o(attended)], -1)


def layered(model: nn.Module) -> Program:
    program, _ = traced(model)
    Pipeline(BEFORE_FUSION).run(program)
    return program


def test_a_module_without_any_names() -> None:
    model = TwoAttentions()
    program = layered(model)
    assert len(layer_regions(program)) == 2
    SkipLayers([0]).run(program)
    torch.testing.assert_close(
        program_logits(program, model, TOKENS % 13), dense_logits(_FirstAlone(model), TOKENS % 13)
    )


class _FirstAlone(nn.Module):
    def __init__(self, model: Tiny) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return Tiny.forward(_Plain(self.model), input_ids, position_ids)  # type: ignore[arg-type]


class _Plain:
    """A model whose `after` does nothing."""

    def __init__(self, model: Tiny) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return Tiny.after.__get__(self._model) if name == "after" else getattr(self._model, name)


@pytest.mark.parametrize("kind", [LedPast, NoStream])
def test_layers_that_cannot_be_told_apart(kind: type[Tiny]) -> None:
    program = layered(kind())
    with pytest.raises(UnsupportedGraphError) as error:
        SkipLayers([0]).run(program)
    assert error.value.found.startswith("layers of target: ")
    assert "cannot be skipped" in error.value.do
