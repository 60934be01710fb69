"""The `specc::` operators, as torch knows them; importing this registers all of them.

What is known of each is a value of `specc.kernels.operators`, found by looking through its modules.
The default implementation of an operator is its oracle; other lowerings register for their own
dispatch key.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

import torch

from specc.artifact.graph_operators import allow
from specc.kernels import operators
from specc.kernels.operator import Operator
from specc.kernels.reference.core import rows_at_once as rows_at_once

# by name, in the order of their modules
OPERATORS: dict[str, Operator] = {}
_LIBRARY = torch.library.Library("specc", "DEF")
_by_overload: dict[Any, Operator] = {}


def register(
    operator: Operator, library: torch.library.Library = _LIBRARY
) -> torch._ops.OpOverload:
    """Make an operator known to torch, to passes and, where it may be stored, to graphs of engines.

    Args:
        operator: of a name that is not taken.
        library: of torch, which it is a part of; it holds as long as that lives.
    Returns:
        What graphs call, which is an attribute of this module from now on.
    """
    name = operator.name
    assert name not in OPERATORS, f"{name} is registered"
    library.define(operator.schema)
    library.impl(name, operator.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specc::{name}", operator.fake, lib=library)
    overload: torch._ops.OpOverload = getattr(torch.ops.specc, name).default
    OPERATORS[name] = _by_overload[overload] = operator
    if operator.stored:
        allow(overload)
    globals()[name] = overload
    return overload


def operator_of(target: Any) -> Operator | None:
    """What is known of the operator that a graph calls; None where it is not one of specc."""
    return _by_overload.get(target) if isinstance(target, torch._ops.OpOverload) else None


def of_cpu() -> list[Operator]:
    """What the library of C++ kernels has, as `specc_cpu::`; the oracles stay `specc::`."""
    return [operator for operator in OPERATORS.values() if operator.cpu]


def _register_all() -> None:
    for found in pkgutil.iter_modules(operators.__path__):
        module = importlib.import_module(f"{operators.__name__}.{found.name}")
        for value in vars(module).values():
            # a module may use what another one defines
            if isinstance(value, Operator) and value.name not in OPERATORS:
                register(value)


_register_all()

if TYPE_CHECKING:

    def __getattr__(name: str) -> torch._ops.OpOverload: ...
