"""Constants of a step program, which its operators take for rows, nodes and columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specc.errors import EngineError
from specc.runtime.backends.plan_constants import earlier_constants, plan_constants
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import MAX_NODES

_INTEGERS = {"int32": torch.int32, "int64": torch.int64}
# of values that a graph computes with; no operator takes them for places
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# candidates of a plan
_MOST = 4 * MAX_NODES
_DO = "compile the engine again"


def step_constants(program: Mapping[str, Any], plan: SpecPlan) -> dict[str, Tensor]:
    """The constants of a step program by name.

    Args:
        program: content of `steps/<plan>.json`.
        plan: of the step, which says what they are.
    Raises:
        EngineError: a constant is malformed, or not what the plan says.
    """
    entries = program.get("constants", {})
    if not isinstance(entries, Mapping):
        raise EngineError(f"a step program with constants {entries!r:.40}", "an object", _DO)
    stated = [plan_constants(plan, is_padded) for is_padded in (False, True)]
    earlier = earlier_constants(plan)
    constants = {}
    for name, entry in entries.items():
        where = f"constant {name} of plan {plan.name}"
        value = constants[name] = _tensor(where, entry)
        if name not in stated[0]:
            is_place = not value.is_floating_point()
            if is_place and value.numel() and not (value.min() >= -1 and value.max() <= _MOST):
                raise EngineError(f"{where} is {_shown(value)}", f"-1 … {_MOST}", _DO)
            continue
        expected = [known[name] for known in (*stated, earlier) if name in known]
        if not any(_is_same(value, known) for known in expected):
            raise EngineError(f"{where} is {_shown(value)}", f"{_shown(expected[0])}", _DO)
    return constants


def drafter_tensors(plan: SpecPlan, models: Mapping[str, Any]) -> dict[str, Tensor]:
    """What steps read of the weights of drafts, by its name in the environment.

    Args:
        models: name → program, with `weights` by their keys.
    Raises:
        EngineError: the weights of a drafter do not have them.
    """
    found = {}
    for drafter in plan.models:
        for name, key in drafter.tensors.items():
            try:
                found[name] = models[drafter.name].weights[key]
            except KeyError:
                where = f"the weights of {drafter.name}"
                raise EngineError(f"{where} without {key}", "it, which a step reads", _DO) from None
    return found


def _tensor(where: str, entry: Any) -> Tensor:
    needed = f"values of one of the types {', '.join((*_INTEGERS, *_FLOATS))}"
    try:
        if (dtype := _FLOATS.get(entry["dtype"])) is None:
            dtype = _INTEGERS[entry["dtype"]]
            _check_integers(entry["values"])
        value = torch.tensor(entry["values"], dtype=dtype)
        if value.isnan().any():
            raise ValueError("a value that is no number")
        return value
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        found = f"{where}: {type(error).__name__}: {str(error)[:100]}"
        raise EngineError(found, needed, _DO) from error


def _check_integers(values: Any) -> None:
    """torch.tensor would cut fractions off."""
    for value in values:
        if isinstance(value, list):
            _check_integers(value)
        elif type(value) is not int:
            raise ValueError(f"{value!r:.40} is no integer")


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _shown(value: Tensor) -> str:
    text = str(value.tolist())
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {text}" if len(text) <= 60 else f"{dtype} {text[:57]}…"
