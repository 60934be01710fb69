"""Which state a call continues, for the proof that tokens stay apart."""

from __future__ import annotations

from torch import fx

from specc.passes.program import STATES, Program, bind_args

# what says whose a token is, and which path leads to it
_RUNTIME = ("q_start", "slot", "cache_len", "ancestors", STATES)
_PARTS = ("state", "rows")


def why_not_its_own(program: Program, node: fx.Node) -> str | None:
    """Why a call over states may mix tokens; None where each follows its path from its own state.

    Args:
        node: the call, of an operator that takes `states`.
    """
    bound = bind_args(node)
    for name in _RUNTIME:
        item = bound[name]
        if item is None or item.op != "placeholder" or item.target != name:
            return f"its {name} is another one"
    own = [bound[part] for part in _PARTS]
    held = [program.states.get(str(item.target)) for item in own]
    if any(found is None for found in held):
        return "it has no state among the inputs"
    if any(list(item.users) != [node] for item in own):
        return "another call has its state, too"
    layers, parts = zip(*filter(None, held), strict=True)
    if len(set(layers)) > 1 or parts != _PARTS:
        return "its state and its rows are not those of one layer"
    return None
