"""The `specc::` operators, as torch knows them; importing this registers all of them.

Each is described by an `Operator` in a module of `specc.kernels.operators`. The default
implementation is its reference; other lowerings register for their dispatch keys.
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
    """Register an operator with torch, passes and, if it may be stored, engine graphs.

    Args:
        library: keeps the registration alive.
    Returns:
        The overload that graphs call, also an attribute of this module from now on.
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
    """The `Operator` that a graph node calls; None if it is not one of specc's."""
    return _by_overload.get(target) if isinstance(target, torch._ops.OpOverload) else None


def of_cpu() -> list[Operator]:
    """Operators with a C++ kernel, as `specc_cpu::`; `specc::` stays the reference."""
    return [operator for operator in OPERATORS.values() if operator.cpu]


def _register_all() -> None:
    for found in pkgutil.iter_modules(operators.__path__):
        module = importlib.import_module(f"{operators.__name__}.{found.name}")
        for value in vars(module).values():
            # modules may import operators from each other
            if isinstance(value, Operator) and value.name not in OPERATORS:
                register(value)


_register_all()

if TYPE_CHECKING:

    def __getattr__(name: str) -> torch._ops.OpOverload: ...
