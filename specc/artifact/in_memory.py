"""What a benchmark with random weights is compiled to: programs in memory, no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specc.artifact.manifest_entries import LimitsEntry, MemoryEntry
from specc.artifact.model_entry import ModelEntry
from specc.speculation.plans import SpecPlan


@dataclass(frozen=True)
class HeadShape:
    """A draft that reads the target's hidden states and has no weights: what its files would say.

    Args:
        config: content of `config.json`.
        tensors: name → tensor of its checkpoint, on the meta device but for maps of ids.
    """

    label: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class BenchModel:
    """A compiled model that has no weights yet.

    Args:
        entry: name, geometry and caches, as in a manifest.
        module: the model of transformers, or the head, that was traced, on the meta device.
        program: content of `program.json`.
        constants: key → value of the program's constant inputs.
        memory: bytes that it will take.
        copies: key → tensor on the meta device of each weight that steps read, and the program not.
    """

    entry: ModelEntry
    module: nn.Module
    program: Mapping[str, Any]
    constants: Mapping[str, Tensor]
    memory: MemoryEntry
    logits_dtype: torch.dtype
    copies: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchPrograms:
    """A pair of models, or a target alone, and the steps of its plans.

    Args:
        models: the target first.
        steps: plan name → content of `steps/<plan>.json`; off is among them.
        plans: those of the steps, the default first.
        limits: what caches and passes are made for.
    """

    models: tuple[BenchModel, ...]
    steps: Mapping[str, Mapping[str, Any]]
    plans: tuple[SpecPlan, ...]
    limits: LimitsEntry
    dtype: str

    @property
    def memory_bytes(self) -> int:
        return sum(model.memory.total for model in self.models)
