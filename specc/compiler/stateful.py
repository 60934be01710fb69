"""Models whose layers keep states: what does not go together with them yet."""

from __future__ import annotations

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
        ConfigError: a draft that has such layers, or options that do not go with those of a target.
    """
    if not any(_name(node.target) in _TRACED for node in program.graph.nodes):
        return
    if program.name != TARGET:
        raise ConfigError(
            f"{program.name}, a draft whose layers keep states",
            "a draft that attends to its tokens alone, or has no model: the states of drafts would"
            " have to follow the tokens of every level",
            "pass another --draft, such as lookup or suffix",
        )
    facts = context.facts
    refuse(CompileRequest(context.config, context.plans, facts, facts.options, keeps_states=True))


def _name(target: object) -> str:
    return str(getattr(getattr(target, "_schema", None), "name", ""))
