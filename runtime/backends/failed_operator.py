"""Which operator of a step failed: by name, also where it stands inside of a model."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import fx

from specc.artifact.graph_io import target_name
from specc.errors import UnsupportedGraphError

# file names that torch.fx gives to the code which it generates
_GENERATED = "<eval_with_key>"
_OPERATOR = re.compile(r"torch\.ops\.([\w.]+)\(")


class OperatorError(RuntimeError):
    """An operator that failed: it cannot run, or not where it was asked to.

    Args:
        operator: its name; where the code of a model does not tell, that line of it.
        model: that it stands in; None for the step's own operators.
        error: what it raised.
    """

    def __init__(self, operator: str, model: str | None, error: Exception) -> None:
        place = f"{operator} of {model}" if model else operator
        lines = str(error).strip().splitlines()
        super().__init__(f"{place} ({type(error).__name__}: {lines[0] if lines else ''})")
        self.operator = operator
        self.model = model

    @classmethod
    def of(cls, node: fx.Node, error: Exception) -> OperatorError:
        """The error of a step's node, which calls an operator or a model."""
        if node.op == "call_module":
            model = str(node.target)
            return cls(_generated_operator(error.__traceback__) or "a call", model, error)
        return cls(_name(node.target), None, error)


def do_named(what: str, work: Callable[..., Any], *args: Any) -> None:
    """Call what a step does besides the nodes of its graphs.

    Args:
        what: it does, for errors.
        *args: of `work`.
    Raises:
        OperatorError: it failed, for any reason.
    """
    try:
        work(*args)
    except Exception as error:
        raise OperatorError(what, None, error) from error


def _name(target: Any) -> str:
    if isinstance(target, str):
        return target
    try:
        return target_name(target)
    except UnsupportedGraphError:
        # a backend has put a function of its own in the place of an operator
        return getattr(target, "__name__", str(target))


def _generated_operator(trace: TracebackType | None) -> str | None:
    """The operator that the innermost line of generated code calls; None where there is none."""
    lines = [f.line for f in traceback.extract_tb(trace) if f.filename.startswith(_GENERATED)]
    if not lines or not lines[-1]:
        return None
    found = _OPERATOR.search(lines[-1])
    return found[1] if found else lines[-1].partition(";")[0]
