"""Models whose layers keep states: what does not go together with them yet."""

from __future__ import annotations

from dataclasses import replace

from specc.compile_request import CompileRequest
from specc.compiler.context import CompileContext
from specc.errors import ConfigError
from specc.passes.program import Program
from specc.passes.step.step_graph import TARGET
from specc.refusals import refuse

# what models call while they are traced (`specc.kernels.operators.dense_recurrence`)
_TRACED = {"specc::dense_conv", "specc::dense_recurrence"}


def check_states(context: CompileContext, program: Program) -> None:
    """Refuse what is asked for beside layers that keep states, as soon as these are known.

    Args:
        context: of the compilation.
        program: of a model, just traced.
    Raises:
        ConfigError: options that do not go with such layers.
    """
    if not any(_name(node.target) in _TRACED for node in program.graph.nodes):
        return
    facts = context.facts
    asked = CompileRequest(context.config, context.plans, facts, facts.options)
    if program.row_inputs:
        raise ConfigError(
            f"{program.name}, a draft that reads hidden states, whose layers keep states",
            "one that attends: hidden states of tokens that were rejected are read again",
            "choose another draft",
        )
    drafters = (plan.drafter(program.name) for plan in context.plans)
    if any(drafter is not None and drafter.is_one_pass for drafter in drafters):
        raise ConfigError(
            f"{program.name}, a draft that reads masks, whose layers keep states",
            "one that attends: states are not taken back past masks",
            "choose another draft",
        )
    if program.name == TARGET:
        refuse(replace(asked, keeps_states=True))
    else:
        refuse(replace(asked, stateful_drafts=(program.name,)))


def _name(target: object) -> str:
    return str(getattr(getattr(target, "_schema", None), "name", ""))
