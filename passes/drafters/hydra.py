"""Hydra heads: a pass over what is known, then a head for each level of a tree.

Source: zankner/Hydra hydra/model/hydra_heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from specc.artifact.safetensors_io import TensorReader
from specc.drafters.drafter import Drafter
from specc.drafters.hydra import EMBEDDING, FIRST_READS, PARTS, HydraHeads, projection_of
from specc.passes.base import Pass
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.head import HeadGrower
from specc.passes.drafters.head_modules import Layer, RMSNorm, fill_buffers
from specc.passes.drafters.head_spec import HeadSwitches, TargetFacts
from specc.passes.drafters.hydra_spec import HYDRA_FILE, HydraSpec, fit_hydra, says_hydra
from specc.passes.drafters.path_states import PathGrower, PathStates
from specc.passes.program import RowInput, Weight
from specc.passes.rewrite.read_features import TAPPED, ReadFeatures
from specc.passes.rewrite.select_earlier import SelectEarlier
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten


class HydraModule(nn.Module):
    """What a pass computes: h of each row, and the first head."""

    # of `fill_buffers`: it has rows for all ids
    columns = None

    def __init__(self, spec: HydraSpec) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        width, self.config, self.spec = spec.width, spec.config, spec
        self.embed_tokens = nn.Embedding(spec.target.vocab_size, width)
        self.layers, self.norm, self.rotary_emb = nn.ModuleList(), None, None
        if spec.windows:
            self.layers.append(Layer(spec, 0))
            self.norm = RMSNorm(width, spec.config.rms_norm_eps)
            self.rotary_emb = LlamaRotaryEmbedding(spec.config)
        first = _HeadLayer(FIRST_READS * width, width, has_skip=True)
        num_rest = spec.block.num_layers - 1
        # one module in two places would have two names
        self.repeats = num_rest if spec.block.is_tied else 1
        rest = [_HeadLayer(width, width) for _ in range(num_rest // self.repeats)]
        self.heads = nn.ModuleList([nn.ModuleList([first, *rest])])
        self.lm_heads = nn.ModuleList([nn.Linear(width, spec.target.vocab_size)])

    def forward(self, input_ids: Tensor, position_ids: Tensor, features: Tensor) -> Tensor:
        """Logits of the token after each row's.

        Args:
            input_ids: [1, Nt] int64, token i + 1 of the row of token i.
            position_ids: [1, Nt] int64, i.
            features: [1, Nt, H], the target's hidden state of token i.
        Returns:
            [1, Nt, V].
        """
        h = features
        for layer in self.layers:
            assert self.rotary_emb is not None
            assert self.norm is not None
            h = self.norm(layer(h, position_ids, self.rotary_emb(h, position_ids)))
        x = torch.cat([h, self.embed_tokens(input_ids)], dim=-1)
        layers = list(self.heads[0])  # type: ignore[call-overload]
        for layer in (*layers[:1], *layers[1:] * self.repeats):
            x = layer(x)
        return self.lm_heads[0](x)

    def _init_weights(self, module: Any) -> None:
        """Fill the buffers of what was made on the meta device."""
        fill_buffers(self, module)


class _HeadLayer(nn.Module):
    """SiLU(W x + b), added to x or to a projection of it."""

    def __init__(self, columns: int, width: int, has_skip: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, width)
        self.skip = nn.Linear(columns, width) if has_skip else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + F.silu(self.linear(x))


class HydraGrower(PathGrower):
    """A node leaves what its head reads to its children, whose heads read their tokens, too."""

    def __init__(self, heads: HydraHeads, depth: int) -> None:
        super().__init__(heads)
        self.heads, self.depth, self._read = heads, depth, PathStates()

    def first_level(self, g: StepGraph) -> fx.Node:
        """The pass: rows of what a step may have accepted, the last of them beside the root."""
        before = g.call(aten.sub.Tensor, g["cache_len"], 1)
        made = HeadGrower(self.heads, self.heads.num_read(self.depth), before).first_level(g)
        width = self.heads.hidden_columns
        self._read.leave(g.last(made, width), 1)
        return g.call(aten.slice.Tensor, made, 1, 0, -width)

    def feed_level(
        self,
        g: StepGraph,
        tokens: fx.Node,
        ancestors: fx.Node | None,
        first_slot: int | fx.Node,
        count: int,
        depth: int,
        parents: fx.Node | None = None,
    ) -> fx.Node:
        known = g.call(aten.embedding.default, self._tensor(g, EMBEDDING), g.flat(tokens))
        read = x = g.cat(self._read.above(g, count, depth, parents), known)
        self._read.leave(read, count)
        for layer in self.heads.layers_of(depth):
            made = g.call(aten.silu.default, self._linear(g, layer.linear, x))
            x = g.call(aten.add.Tensor, self._linear(g, layer.skip, x) if layer.skip else x, made)
        return self._linear(g, projection_of(depth), x)

    def _linear(self, g: StepGraph, key: str, x: fx.Node) -> fx.Node:
        weight, bias = (self._tensor(g, f"{key}.{part}") for part in PARTS)
        return g.call(aten.linear.default, x, weight, bias)

    def _tensor(self, g: StepGraph, key: str) -> fx.Node:
        return g[self.heads.tensor(key)]


class CompilerHydra(CompilerDrafter):
    called = "Hydra heads"
    file = HYDRA_FILE

    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        assert isinstance(drafter, HydraHeads)
        return HydraGrower(drafter, plan.max_depth)

    def says(self, raw: Mapping[str, Any], name: str) -> bool:
        return says_hydra(raw)

    def fit(
        self,
        reader: TensorReader,
        raw: dict[str, Any],
        directory: Path,
        weights: Path,
        target: TargetFacts,
        switches: HeadSwitches,
    ) -> HydraSpec | None:
        return fit_hydra(reader, raw, directory, weights, target) if says_hydra(raw) else None

    def has_layers(self, spec: HydraSpec) -> bool:
        return bool(spec.windows)

    def rows(self, spec: HydraSpec, dtype: torch.dtype) -> tuple[RowInput, ...]:
        return (RowInput(TAPPED, spec.feature_columns, dtype),)

    def module(self, spec: HydraSpec) -> HydraModule:
        return HydraModule(spec)

    def passes(self, spec: HydraSpec) -> tuple[Callable[[], Pass], ...]:
        return (ReadFeatures, SelectEarlier)

    def hidden_columns(self, spec: HydraSpec) -> int:
        """What the first head reads."""
        return spec.block.hidden_columns

    def step_weights(
        self, spec: HydraSpec, dtype: torch.dtype
    ) -> tuple[dict[str, Weight], dict[str, Tensor]]:
        keys = spec.block.tensors.values()
        return {key: Weight((key,), dtype, spec.shapes[key]) for key in keys}, {}


DRAFTER = CompilerHydra()
