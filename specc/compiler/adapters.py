"""Low-rank adapters of a target: their files, and the phase that puts them beside its products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specc.artifact.manifest_entries import AdapterEntry
from specc.compiler.context import CompileContext
from specc.config import CompileConfig
from specc.lora.peft_files import LoraFiles, parse_adapters
from specc.passes.frontend.model_source import ModelSource
from specc.passes.pipeline import Phases
from specc.passes.rewrite.add_lora import AddLora

ADAPTERS = "adapters"


def open_adapters(config: CompileConfig) -> tuple[LoraFiles, ...]:
    """Those that `--lora` names, in its order; no tensor is read.

    Raises:
        ConfigError, WeightError: see `parse_adapters` and `LoraFiles.open`.
    """
    return tuple(LoraFiles.open(name, path) for name, path in parse_adapters(config.lora).items())


def adapter_phases(context: CompileContext, source: ModelSource) -> Phases:
    """The phase of a target with adapters; none of others."""
    if not context.adapters:
        return ()
    parameters = source.module.named_parameters(remove_duplicate=False)
    shapes = {name: tuple(value.shape) for name, value in parameters if value.dim() == 2}
    return ((ADAPTERS, (partial(AddLora, context.adapters, shapes),)),)


def adapter_entries(adapters: Sequence[LoraFiles]) -> tuple[AdapterEntry, ...]:
    """What the manifest says of them."""
    return tuple(AdapterEntry(x.name, x.rank, len(x.pairs)) for x in adapters)
