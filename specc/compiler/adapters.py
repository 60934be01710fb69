"""Low-rank adapters of a target: their files, and the phase that puts them beside its products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specc.artifact.manifest_entries import AdapterEntry
from specc.compiler.context import CompileContext
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.lora.peft_files import LoraFiles, parse_adapters
from specc.lora.target_adapters import TargetAdapters
from specc.passes.frontend.model_source import ModelSource
from specc.passes.pipeline import Phases
from specc.passes.rewrite.add_lora import AddLora
from specc.speculation.plans import SpecPlan

ADAPTERS = "adapters"


def open_adapters(config: CompileConfig) -> tuple[LoraFiles, ...]:
    """Those that `--lora` names, in its order; no tensor is read.

    Raises:
        ConfigError, WeightError: see `parse_adapters` and `LoraFiles.open`.
    """
    return tuple(LoraFiles.open(name, path) for name, path in parse_adapters(config.lora).items())


def check_plans(plans: Sequence[SpecPlan], adapters: Sequence[LoraFiles]) -> None:
    """Raises ConfigError: a draft goes through an adapter that the target has not."""
    names = [adapter.name for adapter in adapters]
    for drafter in (drafter for plan in plans for drafter in plan.drafters):
        if drafter.adapter is not None and drafter.adapter not in names:
            raise ConfigError(
                f"--draft {drafter.option}, and adapters {', '.join(names) or '(none)'}",
                f"--lora {drafter.adapter}=DIR, the adapter that it drafts through",
                f"pass --lora {drafter.adapter}=DIR, or another draft",
            )


def named(adapters: Sequence[LoraFiles], vocab_size: int) -> TargetAdapters:
    """What steps know of them."""
    return TargetAdapters(tuple(x.name for x in adapters), vocab_size)


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
