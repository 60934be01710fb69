"""P-EAGLE heads: their files, and one pass over tokens and masks.

Sources: vllm-project/speculators models/peagle; vllm-project/vllm v1/spec_decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from specc.artifact.safetensors_io import TensorReader
from specc.drafters.drafter import Drafter
from specc.drafters.peagle import FACTS, PeagleDraft
from specc.errors import HeadError
from specc.passes.drafters.block_pass import block_levels
from specc.passes.drafters.compiler_drafter import CompilerDrafter
from specc.passes.drafters.eagle3 import fit_eagle
from specc.passes.drafters.head_config import read_head_config
from specc.passes.drafters.head_spec import HeadSwitches, TargetFacts
from specc.passes.drafters.head_tensors import count_layers, missing_error
from specc.passes.drafters.kinds import peagle_layout_of
from specc.passes.drafters.lattice import Lattice
from specc.passes.drafters.peagle_head import MaskedHead
from specc.passes.drafters.peagle_spec import MASK, PeagleSpec
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan

# what files of different trainers call the mask
_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_DO = "correct config.json, or download the head again"


class CompilerPeagle(CompilerDrafter):
    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        assert isinstance(drafter, PeagleDraft)
        return Lattice(drafter, block_levels(g, plan, drafter))

    def says(self, raw: Mapping[str, Any], name: str) -> bool:
        return peagle_layout_of(raw, ()) is not None

    def fit(
        self,
        reader: TensorReader,
        raw: dict[str, Any],
        directory: Path,
        weights: Path,
        target: TargetFacts,
        switches: HeadSwitches,
    ) -> PeagleSpec | None:
        name, names = str(directory), list(reader.keys())
        layout = peagle_layout_of(raw, names)
        if layout is None:
            return None
        if MASK not in names:
            raise missing_error([MASK], reader, name)
        mask, shape = _mask_of(raw, target, name), tuple(reader.shape(MASK))
        config = read_head_config(raw, layout, count_layers(names), switches, name)
        given = (layout, directory, target, switches, raw, {MASK: shape})
        spec = fit_eagle(reader, config, *given)
        if shape[-1:] != (spec.feature_columns,) or prod(shape) != spec.feature_columns:
            raise HeadError(
                f"{name}: {MASK} is {list(shape)}",
                f"[1, 1, {spec.feature_columns}]: a row of {len(spec.boundaries)} hidden states of"
                f" {target.name}",
                "pass the head of this target",
            )
        fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        fields |= {"kind": FACTS.kind, "mask_token_id": mask, "mask_shape": shape}
        return PeagleSpec(**fields)

    def module(self, spec: PeagleSpec) -> MaskedHead:
        return MaskedHead(spec)


DRAFTER = CompilerPeagle()


def _mask_of(raw: Mapping[str, Any], target: TargetFacts, name: str) -> int:
    """The token that masks.

    Raises:
        HeadError: none, several, or one that the target does not have.
    """
    said = {key: raw[key] for key in _KEYS if raw.get(key) is not None}
    values = set(map(repr, said.values()))
    mask = next(iter(said.values()), None)
    if len(values) != 1 or type(mask) is not int or not 0 <= mask < target.vocab_size:
        found = ", ".join(f"{key} {value!r:.40}" for key, value in said.items())
        found = found or f"none of {', '.join(_KEYS)}"
        raise HeadError(
            f"{name}: config.json: {found}",
            f"one mask, of the ids 0 … {target.vocab_size - 1} of {target.name}",
            _DO,
        )
    return mask
