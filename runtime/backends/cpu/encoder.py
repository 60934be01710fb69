"""Nodes of a graph as instructions of the runner: programs of models and steps alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.graph_operators import python_name
from specc.errors import EngineError
from specc.kernels.native_calls import CODES
from specc.runtime.backends.cpu.native_calls import (
    checked,
    describe,
    functions,
    made,
    operators,
)
from specc.runtime.backends.cpu.native_forms import takes
from specc.runtime.backends.cpu.python_calls import PythonCall

_TENSOR = torch.TensorType.get()
_ARITHMETIC = {
    f"operator.{sign}": sign.encode()
    for sign in ("add", "sub", "mul", "floordiv", "mod", "neg", "le", "lt", "ge", "gt", "eq")
} | {"torch.sym_max": b"max", "torch.sym_min": b"min"}


class Encoder:
    """Builds one program of the library from the nodes of its graphs.

    Args:
        num_values: slots; inputs have the first ones.
    """

    def __init__(self, num_values: int) -> None:
        self._library = functions()
        self.code = made(self._library.specc_code_new(num_values))
        self._python: list[PythonCall] = []
        self._finalizer = weakref.finalize(self, _free, self._library, self.code, self._python)
        self._finalizer.atexit = False
        self._next = 0
        # node → its slot, or those of its parts
        self.slots: dict[fx.Node, int | list[int]] = {}
        # what depends on the batch size alone
        self.static: set[fx.Node] = set()

    @property
    def python_names(self) -> list[str]:
        """Operators that Python calls, of each instruction that does."""
        return [name_of(call.target) for call in self._python]

    def input(self) -> int:
        """The slot of another value that is set from outside."""
        checked(self._library.specc_code_input(self.code, self._next))
        self._next += 1
        return self._next - 1

    def stage(self) -> None:
        checked(self._library.specc_code_stage(self.code))

    def keep(self, slots: Iterable[int]) -> None:
        for slot in slots:
            checked(self._library.specc_code_keep(self.code, slot))

    def finish(self) -> None:
        """Raises EngineError: instructions that cannot run."""
        checked(self._library.specc_code_finish(self.code))

    def slot(self, node: fx.Node) -> int:
        """The slot of a value that is one tensor or number."""
        found = self.slots[node]
        assert isinstance(found, int), "one value"
        return found

    def call(self, node: fx.Node, program: int) -> None:
        """A call of a model."""
        checked(self._library.specc_code_call(self.code, program, self._results(node, 1)))
        for value in node.args:
            self._argument(value)

    def function(self, node: fx.Node, may_be_static: bool = False) -> None:
        """A call of an operator, or of one of Python's functions.

        Args:
            may_be_static: of steps: what depends on the batch size alone is computed once for it.
        """
        name = name_of(node.target)
        if name == "operator.getitem" and isinstance(self.slots.get(node.args[0]), list):  # type: ignore[arg-type]
            self.slots[node] = self._part(node)
            if node.args[0] in self.static:
                self.static.add(node)
        elif name == "aten.sym_size.int":
            source, dim = node.args
            slot = self.slot(source)  # type: ignore[arg-type]
            checked(self._library.specc_code_size(self.code, slot, dim, self._results(node, 1)))
            self.static.add(node)  # of a step, only the batch size varies
        elif name in _ARITHMETIC:
            sign = _ARITHMETIC[name]
            checked(self._library.specc_code_arithmetic(self.code, sign, self._results(node, 1)))
            for value in node.args:
                self._argument(value)
            self.static.add(node)
        else:
            self._operator(node, may_be_static)

    def _part(self, node: fx.Node) -> int:
        """The slot of one of the results of an operator."""
        parts: Any = self.slots[node.args[0]]  # type: ignore[index]
        index = node.args[1]
        if not isinstance(index, int) or not 0 <= index < len(parts):
            raise EngineError(
                f"{node.name}: result {str(index)[:40]} of an operator that has {len(parts)}",
                "a graph that this version of specc has written",
                "compile the engine again",
            )
        found: int = parts[index]
        return found

    def _operator(self, node: fx.Node, may_be_static: bool) -> None:
        target: Any = node.target
        is_operator = isinstance(target, torch._ops.OpOverload)
        schema = target._schema if is_operator else None
        is_mutable = schema is not None and schema.is_mutable
        is_static = (
            may_be_static and not is_mutable and all(n in self.static for n in node.all_input_nodes)
        )
        if is_static:
            self.static.add(node)
        first, count = self._places(node, schema)
        if schema is None or not has_kernel(node):
            self._python_call(node, schema, first, count, is_static)
            return
        name = _native_name(target)
        checked(
            self._library.specc_code_operator(self.code, name.encode(), first, count, is_static)
        )
        for i, argument in enumerate(schema.arguments):
            if i < len(node.args):
                value: Any = node.args[i]
            else:
                value = node.kwargs.get(argument.name, argument.default_value)
            kind = argument.real_type
            if isinstance(value, int | float) and kind.isSubtypeOf(_TENSOR):
                value = torch.tensor(value)  # as torch's own parser of arguments does
            elif str(kind).startswith("List[") and self._is_one(value):
                value = [value]  # one for all dimensions
            self._argument(value)

    def _is_one(self, value: Any) -> bool:
        """Whether it is one number, or one value."""
        if isinstance(value, fx.Node):
            return isinstance(self.slots[value], int)
        return isinstance(value, int)

    def _python_call(
        self, node: fx.Node, schema: Any, first: int, count: int, is_static: bool
    ) -> None:
        call = PythonCall(node)
        self._python.append(call)
        is_view = schema is None or any(item.alias_info is not None for item in schema.returns)
        checked(
            self._library.specc_code_python(
                self.code, call.id, name_of(node.target).encode(), first, count, is_view,
                is_static,
            )
        )  # fmt: skip
        call.spread(self.slots)
        for source in call.inputs:
            found = self.slots[source]
            for slot in found if isinstance(found, list) else [found]:
                checked(self._library.specc_code_slot(self.code, slot))

    def _places(self, node: fx.Node, schema: Any) -> tuple[int, int]:
        """First slot and number of a call's results."""
        types = ["Tensor"] if schema is None else [str(x.real_type) for x in schema.returns]
        if types == ["Tensor"]:
            return self._results(node, 1), 1
        if "List[Tensor]" in types:
            described = node.meta.get("described", "")
            indices = [int(u.args[1]) for u in node.users if _is_item(u)]  # type: ignore[arg-type]
            count = max([described.count("["), *(i + 1 for i in indices)])
        else:
            count = len(types)
        first = self._results(node, count)
        self.slots[node] = list(range(first, first + count))
        return first, count

    def _results(self, node: fx.Node, count: int) -> int:
        first = self._next
        self._next += count
        self.slots[node] = first
        return first

    def _argument(self, value: Any) -> None:
        library, code = self._library, self.code
        if isinstance(value, fx.Node):
            found = self.slots[value]
            if isinstance(found, int):
                checked(library.specc_code_slot(code, found))
                return
            checked(library.specc_code_list(code, len(found)))
            for slot in found:
                checked(library.specc_code_slot(code, slot))
        elif isinstance(value, list | tuple):
            checked(library.specc_code_list(code, len(value)))
            for item in value:
                self._argument(item)
        elif isinstance(value, bool):
            checked(library.specc_code_bool(code, value))
        elif isinstance(value, int):
            checked(library.specc_code_int(code, value))
        elif isinstance(value, float):
            checked(library.specc_code_real(code, value))
        elif isinstance(value, str):
            checked(library.specc_code_text(code, value.encode()))
        elif isinstance(value, torch.dtype):
            checked(library.specc_code_int(code, CODES[value]))
        elif isinstance(value, Tensor):
            checked(library.specc_code_scalar(code, describe(value)))
        elif value is torch.contiguous_format:
            checked(library.specc_code_int(code, 0))  # not what it is copied from
        else:  # None, a device, a layout, another memory format
            checked(library.specc_code_none(code))


def has_kernel(node: fx.Node) -> bool:
    """Whether the library, or its runner, computes what an operator is called for."""
    name = _native_name(node.target)
    return name == "aten::sym_size.int" or (name in operators() and takes(node, name))


def name_of(target: Any) -> str:
    """Of a call's target: `aten.add.Tensor`, `operator.getitem`."""
    return python_name(target) or str(target)


def _native_name(target: Any) -> str:
    overload = target._overloadname
    return target._schema.name + ("" if overload == "default" else f".{overload}")


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and name_of(node.target) == "operator.getitem"


def _free(library: Any, code: int, calls: list[PythonCall]) -> None:
    library.specc_code_free(code)
    for call in calls:
        call.close()
