"""MTP modules, which are in their target's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specc.artifact.safetensors_io import TensorReader
from specc.passes.drafters.head import CompilerHead
from specc.passes.drafters.head_spec import HeadSwitches, TargetFacts
from specc.passes.drafters.mtp_source import mtp_source
from specc.passes.drafters.mtp_spec import MtpSpec, recognise_mtp
from specc.passes.frontend.model_source import ModelSource


class CompilerMtp(CompilerHead):
    def fit_in_target(
        self,
        config: Any,
        reader: TensorReader,
        directory: Path,
        target: TargetFacts,
        switches: HeadSwitches,
    ) -> MtpSpec:
        return recognise_mtp(config, reader, directory, target, switches)

    def source_in_target(
        self, spec: MtpSpec, target: ModelSource, dtype: torch.dtype, name: str
    ) -> ModelSource:
        return mtp_source(spec, target, dtype, name)


DRAFTER = CompilerMtp()
