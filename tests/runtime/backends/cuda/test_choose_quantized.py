"""Products of quantized weights with a norm in front are measured beside their separate kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.kernels.cuda import few_rows
from specc.passes.program import Program
from specc.runtime.backends.cuda.choose_products import ProductCall, calls_of, choose_products
from tests.passes.rewrite.test_pair_fragments import lowered
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.runtime.backends.cuda.test_choose_products import FakeTimer


class OnDevice:
    """A model's program as a device has it."""

    dtype = torch.bfloat16

    def __init__(self, runner: Any, program: Program) -> None:
        self.graph = program.graph
        names = [node.target for node in program.graph.find_nodes(op="placeholder")]
        values = zip(names, runner._values, strict=True)
        self.tensors = {name: x for name, x in values if isinstance(x, torch.Tensor)}
        quantized = {name: x for name, x in program.weights.items() if x.quantized is not None}
        self.quantized_shapes = {name: weight.shape for name, weight in quantized.items()}


@pytest.fixture(scope="module")
def program() -> OnDevice:
    _, runner, program, _ = lowered("llama", "int4-g64")
    return OnDevice(runner, program)


@pytest.fixture(autouse=True)
def no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "choices", {})


def test_calls_of_quantized_layers(program: OnDevice) -> None:
    """Shapes and layouts are those of weights; calls run, and write no row."""
    calls = list(calls_of(program))
    layer = ("linear_q", "add_norm_gate_up", "linear_q")
    assert [call.operator for call in calls] == [
        "linear_q", *layer, "add_norm_rope_write", *layer, "linear_q",
    ]  # fmt: skip
    found = {call.operator: call for call in calls if isinstance(call, ProductCall)}
    layouts = {"add_norm_gate_up": "int4-g64-fragments-512"}
    layouts["add_norm_rope_write"] = "int4-g64-fragments-32"
    shapes = {"add_norm_gate_up": (1024, 256), "add_norm_rope_write": (512, 256)}
    caches = [cache.clone() for cache in found["add_norm_rope_write"].caches]
    for name, call in found.items():
        assert call.layout is not None
        assert (call.layout.name, call.shape) == (layouts[name], shapes[name])
        product = call.product(3)
        assert product == few_rows.Product(
            name, torch.bfloat16, shapes[name], 4, "int4-g64-fragments"
        )
        assert [tile.block_m for tile in product.tiles] == [8]
        out, total = call.bind(3)()  # type: ignore[misc]
        assert (out.numel(), total.shape) == (3 * (512 if "gate" in name else 256), (1, 3, 256))
    kept = zip(caches, found["add_norm_rope_write"].caches, strict=True)
    assert all(torch.equal(old, cache) for old, cache in kept)


def test_separate_kernels_where_they_are_faster(program: OnDevice) -> None:
    report = choose_products([program], SimulatedDevice(), FakeTimer({None: 1.0, 0: 2.0}), (1,))
    fused = [item for item in report if item["operator"].startswith("add_norm")]
    assert [(item["layout"], item["chosen"]) for item in fused] == [
        ("int4-g64-fragments", "library")
    ] * 2
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    for name, size in (("add_norm_gate_up", 1024), ("add_norm_rope_write", 512)):
        assert few_rows.normed_tile_for(name, x, size, "int4-g64-fragments") is None
        # what was not measured takes the kernel
        assert few_rows.normed_tile_for(name, x.repeat(4, 1), size, "int4-g64-fragments")
