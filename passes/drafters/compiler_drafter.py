"""The compiler's side of a kind of draft, the `DRAFTER` of `passes/drafters/<kind>.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specc.artifact.safetensors_io import TensorReader
from specc.drafters.drafter import Drafter
from specc.passes.base import Pass
from specc.passes.drafters.head_spec import HeadSpec, HeadSwitches, TargetFacts
from specc.passes.frontend.model_source import ModelSource
from specc.passes.program import Program, RowInput, Weight
from specc.passes.rewrite.read_features import IS_TAPPED, TAPPED, ReadFeatures
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan


class CompilerDrafter:
    """What a kind does on its way from files to steps; arguments `spec` are those of its files."""

    # what people call one in a directory
    called = "draft head"
    # the file that it may have in place of an ordinary checkpoint
    file = ""

    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        """In the draft stage of a plan; what it sees or reads is computed here, once."""
        raise NotImplementedError(f"{drafter.name} proposes nothing")

    def says(self, raw: Mapping[str, Any], name: str) -> bool:
        """Whether a configuration is of this kind, whatever tensors there are.

        Raises:
            HeadError: of a kind that specc does not run.
        """
        return False

    def is_no_model(self, raw: Mapping[str, Any]) -> bool:
        """Whether a configuration is of this kind, and of nothing that could be a target."""
        return False

    def fit(
        self,
        reader: TensorReader,
        raw: dict[str, Any],
        directory: Path,
        weights: Path,
        target: TargetFacts,
        switches: HeadSwitches,
    ) -> HeadSpec | None:
        """A draft in a directory, compared with its target; None where it is of another kind.

        Arguments and errors as of `fit_head`.
        """
        return None

    def of_config(self, config: Any, name: str) -> Drafter | None:
        """How plans ask a language model that reads tokens alone, where they ask it for more than a
        level at a time; None where its configuration does not say so.

        Args:
            config: of transformers.
            name: of the model, for errors.
        Raises:
            HeadError: it says something that specc does not run.
        """
        return None

    def fit_in_target(
        self,
        config: Any,
        reader: TensorReader,
        directory: Path,
        target: TargetFacts,
        switches: HeadSwitches,
    ) -> HeadSpec:
        """Of a kind that is in its target's checkpoint; headers are read, and no weight.

        Args:
            switches: what to take in place of what its files say.
        Raises:
            HeadError: there is none, or none that specc runs.
        """
        raise NotImplementedError("no draft of the kind is in a target's checkpoint")

    def source_in_target(
        self, spec: Any, target: ModelSource, dtype: torch.dtype, name: str
    ) -> ModelSource | None:
        """The same as a model to compile; None of a kind with files of its own."""
        return None

    def has_layers(self, spec: Any) -> bool:
        """Whether its module has layers, which attend."""
        return True

    def rows(self, spec: Any, dtype: torch.dtype) -> tuple[RowInput, ...]:
        """What its module takes beside tokens and positions."""
        return (
            RowInput(TAPPED, spec.feature_columns, dtype),
            RowInput(IS_TAPPED, 1, torch.bool),
        )

    def module(self, spec: Any) -> nn.Module:
        """What is traced; the device is the one of the context."""
        raise NotImplementedError(f"{spec.kind} has no module of its own")

    def passes(self, spec: Any) -> tuple[Callable[[], Pass], ...]:
        """What lets it read its target's hidden states, and see what it was trained to see."""
        return (ReadFeatures,)

    def target_passes(self, spec: Any, target: Program) -> tuple[Callable[[], Pass], ...]:
        """What lets it attend to caches of its target, before those of `passes`.

        Args:
            target: its program, after its last pass.
        """
        return ()

    def hidden_columns(self, spec: Any) -> int:
        """Columns of hidden states that its program puts out after the logits."""
        return 0

    def step_weights(
        self, spec: Any, dtype: torch.dtype
    ) -> tuple[dict[str, Weight], dict[str, Tensor]]:
        """What steps read of it besides its logits: weights and tables by key."""
        return {}, {}
