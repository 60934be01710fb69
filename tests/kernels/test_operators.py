"""The table of operators says of each what the operator does."""

from __future__ import annotations

import ast
import ctypes
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from specc.kernels import generate, native, ops
from specc.kernels.operator import (
    Cut,
    Lookup,
    NamedRows,
    NoRule,
    OfHeads,
    OfRows,
    Operand,
    Operator,
    PassLimits,
    Product,
    SortedRows,
    nothing,
)
from specc.kernels.ops import OPERATORS
from specc.kernels.reference.ranks import LockstepGroup, use_group, use_links
from tests.kernels.more_calls import CALLS

CUDA = Path(__file__).resolve().parents[2] / "kernels" / "cuda"
NUM_CALLS = 6
# a call of somebody else's shapes may be refused
_REFUSED = (ValueError, IndexError, RuntimeError)
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


class NoLinks:
    def over_link(self, x: Tensor, link: str) -> Tensor:
        return x.clone()


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A group of one rank, in which collectives do nothing."""
    use_group(LockstepGroup(1))
    use_links(NoLinks())
    yield
    use_group(None)
    use_links(None)


def arguments_of(operator: Operator) -> list[Any]:
    return list(getattr(ops, operator.name)._schema.arguments)


def calls(name: str) -> Iterator[dict[str, Any]]:
    for seed in range(NUM_CALLS):
        rng = random.Random(f"{name}/{seed}")
        torch.manual_seed(rng.getrandbits(32))
        yield CALLS[name](rng)


def layout(value: Any) -> Any:
    """What a fake says: shape, type, device, and strides, where more than one element has them."""
    if not isinstance(value, Tensor):
        return value
    strides = [step for step, size in zip(value.stride(), value.shape, strict=True) if size > 1]
    steps = strides if value.numel() else None
    return tuple(value.shape), value.dtype, value.device, steps


def test_every_operator_has_calls():
    assert CALLS.keys() == OPERATORS.keys()


def assert_fake_is(function: Any, fake: Any, operator: Operator) -> None:
    answered = 0
    for arguments in calls(operator.name):
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            described = fake(**tree_map_only(Tensor, mode.from_tensor, arguments))
        before = tree_map_only(Tensor, Tensor.clone, arguments)
        try:
            got = function(**arguments)
        except _REFUSED:
            continue
        answered += 1
        if operator.name == "gather_rows":
            # how many ranks there are is known where it runs
            assert described.dtype == got.dtype
            continue
        assert list(map(layout, tree_leaves(described))) == list(map(layout, tree_leaves(got)))
        for argument in arguments_of(operator):
            if argument.name in before and not (info := argument.alias_info):
                pairs = zip(
                    tree_leaves(before[argument.name]),
                    tree_leaves(arguments[argument.name]),
                    strict=True,
                )
                for old, new in pairs:
                    is_same = not isinstance(old, Tensor) or torch.equal(
                        old.nan_to_num(), new.nan_to_num()
                    )
                    assert is_same, f"{argument.name} is changed, {info}"
    assert answered > NUM_CALLS // 4


@every_operator
def test_fakes_are_like_the_oracle(operator):
    """Shapes, types and strides of results; what the schema does not name stays as it was."""
    assert_fake_is(operator.reference, getattr(ops, operator.name), operator)


def test_the_library_has_what_the_table_says(native_operators):
    names = {name for name in native.operator_names() if name.startswith("specc::")}
    assert names == {f"specc::{operator.name}" for operator in ops.of_cpu()}


@pytest.mark.parametrize("operator", ops.of_cpu(), ids=lambda item: item.name)
def test_fakes_are_like_the_library(operator, native_operators):
    if operator.name in ("all_reduce", "gather_rows", "from_first", "best_of_ranks"):
        pytest.skip("its ranks are processes: tests/kernels/cpu/test_ranks.py")
    function = getattr(native_operators, operator.name)
    assert_fake_is(function, function, operator)


@every_operator
def test_rules_name_operands(operator):
    names = {argument.name for argument in arguments_of(operator)}
    rule = operator.tokens
    match rule:
        case OfHeads():
            named = {*rule.heads, *rule.tables, *rule.of_tokens, *rule.parameters}
            assert rule.heads or rule.tables or rule.of_tokens
        case OfRows():
            named = {*rule.rows, *rule.tables, *rule.parameters, *filter(None, (rule.chosen,))}
        case NamedRows():
            named = {rule.names}
        case SortedRows():
            named = {rule.rows, rule.weight, rule.ends}
        case Product():
            named = {rule.first, rule.second, rule.bias} - {""}
        case Lookup():
            named = {rule.table, rule.ids}
        case NoRule():
            assert rule.reason
            named = set()
        case _:
            named = set()
    assert named <= names
    reads = {operator.reads.whole, operator.reads.rows, operator.reads.experts} - {None}
    assert reads <= names


@every_operator
def test_cuts_name_dimensions(operator):
    """Of operands that exist, and as many as they have."""
    rule = operator.cut
    if isinstance(rule, NoRule):
        assert rule.reason
    if not isinstance(rule, Cut):
        return
    arguments = next(calls(operator.name))
    assert rule.operands.keys() <= {argument.name for argument in arguments_of(operator)}
    for name, words in rule.operands.items():
        if "..." not in words and isinstance(arguments.get(name), Tensor):
            # a dimension with a question mark may be absent
            absent = range(words.count("?") + 1)
            assert len(words.split()) - arguments[name].dim() in absent, name
    if rule.contracted is not None:
        name, word = rule.contracted
        assert word in rule.operands[name].split()
    for name in rule.heads or ():
        assert re.search(r"[a-z]", rule.operands[name])


@every_operator
def test_costs_are_numbers(operator):
    """Multiplications and memory inside, of operands of these shapes."""
    limits = PassLimits(5, 64, "whole", 1 << 20)
    defaults = {argument.name: argument.default_value for argument in arguments_of(operator)}
    for arguments in calls(operator.name):
        operands = defaults | tree_map_only(
            Tensor, lambda x: Operand(tuple(x.shape), x.dtype), arguments
        )
        for value in (
            0 if operator.flops is None else operator.flops(**operands),
            0 if operator.scratch is None else operator.scratch(limits, **operands),
        ):
            assert isinstance(value, int)
            assert value >= 0


@pytest.mark.parametrize(
    "operator", [item for item in OPERATORS.values() if item.flops], ids=lambda item: item.name
)
def test_multiplications_are_those_of_the_oracle(operator):
    """As torch counts them; experts have fewer rows where ends or ids leave some out."""
    for arguments in calls(operator.name):
        operands = tree_map_only(Tensor, lambda x: Operand(tuple(x.shape), x.dtype), arguments)
        if "bits" in operands:
            continue  # the oracle multiplies integers, in parts that floats hold
        with FlopCounterMode(display=False) as counter:
            try:
                operator.reference(**arguments)
            except _REFUSED:
                continue
        counted, stated = counter.get_total_flops(), operator.flops(**operands)
        assert counted == stated or (operator.reads.experts and counted < stated)


@pytest.mark.parametrize(
    "operator", [item for item in OPERATORS.values() if item.cuda], ids=lambda item: item.name
)
def test_kernels_for_cuda_are_there(operator):
    """Without Triton: its functions take what the schema names, in its order."""
    module, _, name = operator.cuda.partition(":")
    tree = ast.parse((CUDA / f"{module}.py").read_text(encoding="utf-8"))
    (function,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name)
    parameters = [x.arg for x in (*function.args.args, *function.args.kwonlyargs)]
    arguments = arguments_of(operator)
    assert parameters == [argument.name for argument in arguments if argument.name in parameters]
    if function.args.vararg is not None:
        # of attention, what follows is named once for all of its kernels
        positional = [argument.name for argument in arguments if not argument.kwarg_only]
        following = positional[len(function.args.args) :]
        names = tensors_of_attention()
        assert names[len(names) - len(following) :] == following
        return
    # what only the CPU has is left at its default: others are refused when a model is compiled
    rest = [argument for argument in arguments if argument.name not in parameters]
    assert all(argument.has_default_value() for argument in rest)


def tensors_of_attention() -> list[str]:
    """Names of the tensors of a call, in their order, as `attend_call.py` has them."""
    found: dict[str, tuple[str, ...]] = {}
    for item in ast.parse((CUDA / "attend_call.py").read_text(encoding="utf-8")).body:
        name = ast.unparse(item.targets[0]) if isinstance(item, ast.Assign) else ""
        if name in ("ROWS", "PLACES", "_TENSORS"):
            parts = [
                found[x.value.id] if isinstance(x, ast.Starred) else (ast.literal_eval(x),)  # type: ignore[attr-defined]
                for x in item.value.elts  # type: ignore[attr-defined]
            ]
            found[name] = tuple(x for part in parts for x in part)
    return list(found["_TENSORS"])


def test_what_cpp_is_told_is_the_table():
    """`python -m specc.kernels.generate` writes it."""
    assert generate.PATH.read_text(encoding="utf-8") == generate.declarations()


def test_the_library_says_what_its_operators_take():
    native.load()
    schema_of = native.c_functions().specc_operator_schema
    schema_of.restype, schema_of.argtypes = ctypes.c_char_p, (ctypes.c_char_p,)
    for name in native.operator_names():
        packet, _, overload = name.partition(".")
        assert schema_of(name.encode()).decode() == str(torch._C._get_schema(packet, overload))
    # known to torch, without a kernel; known to nobody; nothing
    for absent in (b"specc::grouped_mm", b"specc::rms", b"aten::acosh", b"", None):
        assert schema_of(absent) is None


def test_an_operator_is_found_by_what_graphs_call():
    for name, operator in OPERATORS.items():
        assert ops.operator_of(getattr(ops, name)) is operator
    assert ops.operator_of(torch.ops.aten.linear.default) is None
    assert ops.operator_of(max) is None


@every_operator
def test_what_writes_returns_nothing_new_or_says_so(operator):
    written = [argument for argument in arguments_of(operator) if argument.is_write]
    assert operator.writes == bool(written)
    assert operator.writes or operator.fake is not nothing


def test_no_name_is_taken_twice():
    name, operator = next(iter(OPERATORS.items()))
    with pytest.raises(AssertionError, match=f"{name} is registered"):
        ops.register(operator)
