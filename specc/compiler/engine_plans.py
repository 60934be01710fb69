"""Plans of an engine: those that were asked for, the default ones, and off."""

from __future__ import annotations

from collections.abc import Sequence

from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.memory import logit_row_bytes
from specc.passes.program import Program
from specc.passes.step.tiles import tile_plan
from specc.speculation.choose_plans import DEFAULT_CHAIN
from specc.speculation.plans import OFF, SpecPlan


def engine_plans(config: CompileConfig, num_drafts: int) -> list[SpecPlan]:
    """Plans of an engine, the default first; off is always there.

    Raises:
        ConfigError: a plan asks for a draft that there is not.
    """
    plans = [plan for plan in config.plans if plan.speculates]
    known = [f"draft_{number}" for number in range(num_drafts)]
    for plan in plans:
        if missing := [model for model in plan.models if model not in known]:
            raise ConfigError(
                f"plan {plan.name} without a draft"
                if not known
                else f"plan {plan.name} of {missing[0]}, and {num_drafts} drafts",
                "a draft model that proposes tokens",
                "pass --draft, or leave out --tree and --num-speculative-tokens",
            )
    if not plans and not config.plans and known:
        plans = [SpecPlan.from_widths((1,) * DEFAULT_CHAIN)]
    return list(dict.fromkeys([*plans, OFF]))


def tile_plans(
    plans: Sequence[SpecPlan], programs: Sequence[Program], config: CompileConfig
) -> list[SpecPlan]:
    """The plans, in tiles where their logits exceed the engine's limit.

    Args:
        plans: of the engine.
        programs: of the models, after their last phase.
        config: options.
    Raises:
        ConfigError: not even the logits of one node of each sequence fit.
    """
    row_bytes = {program.name: logit_row_bytes(program) for program in programs}
    batch, limit_mb = config.max_batch_size, config.max_logits_mb
    return [tile_plan(plan, row_bytes, batch, limit_mb) for plan in plans]
