from __future__ import annotations

import json
import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from specc.artifact.graph_io import graph_to_json
from specc.kernels import ops
from specc.runtime.backends.cpu.missing_kernels import missing_kernels
from specc.runtime.backends.cpu.native_calls import operators
from tests.native_library import load_native
from tests.runtime.backends.cpu.plain_program import PlainProgram, expected

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def library() -> None:
    load_native()
    assert "specc::linear" in operators()
    assert "aten::kthvalue" not in operators()


def graph() -> fx.Graph:
    """Two calls that no kernel is for, one of them with two results, and some that one is for."""
    made = fx.Graph()
    x = made.placeholder("x")
    rows = made.call_function(aten.sym_size.int, (x, 0))
    twice = made.call_function(operator.mul, (rows, 2))
    both = made.call_function(aten.kthvalue.default, (x, 2, 1))
    value = made.call_function(operator.getitem, (both, 0))
    place = made.call_function(operator.getitem, (both, 1))
    whole = made.call_function(aten.add.Tensor, (value, place))
    joined = made.call_function(aten.cat.default, ([whole, whole], 0))
    curved = made.call_function(aten.erfc.default, (joined,))
    made.output(made.call_function(aten.reshape.default, (curved, [twice, 1])))
    return made


def test_calls_without_a_kernel_are_counted(tmp_path: Path) -> None:
    step = fx.Graph()
    y = step.placeholder("y")
    passed = step.call_module("target", (y,))
    step.output({"z": step.call_function(aten.erfc.default, (passed,))})
    rows = fx.Graph()
    inputs = [rows.placeholder(name) for name in ("a", "b", "c")]
    rows.output({"rows": rows.call_function(ops.tree_rows, tuple(inputs))})
    (tmp_path / "program.json").write_text(json.dumps({"graph": graph_to_json(graph())}))
    stages = [{"graph": graph_to_json(each)} for each in (step, rows)]
    (tmp_path / "step.json").write_text(json.dumps({"stages": stages}))
    manifest: Any = SimpleNamespace(
        models=[SimpleNamespace(name="target", program_file="program.json")],
        self_drafts=[],
        step_files={"off": "step.json"},
        winners_files={"off": "step.json"},
    )
    found = missing_kernels(tmp_path, manifest)
    assert found == {"aten.erfc.default": 2, "aten.kthvalue.default": 1}


def test_torch_runs_them() -> None:
    program = PlainProgram(graph())
    assert program.encoder.python_names == ["aten.kthvalue.default", "aten.erfc.default"]
    for rows in (3, 1, 8):
        x = torch.randn(rows, 5)
        assert torch.equal(program(x), expected(graph(), [x]))


def test_what_torch_raises_is_raised_where_the_program_is_called() -> None:
    program = PlainProgram(graph())
    with pytest.raises(IndexError, match="Dimension out of range"):
        program(torch.randn(3))
    with pytest.raises(RuntimeError, match="out of range for dimension 1"):
        program(torch.randn(3, 1))
    x = torch.randn(2, 2)
    assert torch.equal(program(x), expected(graph(), [x]))
