"""What a stored program says of its weights."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.safetensors_io import tensor_bytes
from specc.passes.program import Program, Weight, constant_key
from specc.passes.program_json import program_to_json

LAYOUT = QuantizedLayout.named("int8")
ORDER = torch.tensor([2, 0, 1, 3])


def kept(order: torch.Tensor) -> KeptIntegers:
    return KeptIntegers(LAYOUT, bytes(tensor_bytes(order)))


@pytest.mark.parametrize(
    ("integers", "constants", "says"),
    [
        # two parts in one order, which the program has
        ({"a": kept(ORDER), "b": kept(ORDER)}, {"order": ORDER}, constant_key("order")),
        # parts in two orders were rounded anew, each row in its own order
        ({"a": kept(ORDER), "b": kept(ORDER.flip(0))}, {}, None),
        ({"a": kept(ORDER), "b": kept(ORDER.flip(0))}, {"order": ORDER}, None),
        # no product reads rows in this order
        ({"a": kept(ORDER), "b": kept(ORDER)}, {"other": ORDER.flip(0)}, None),
        ({}, {"order": ORDER}, None),
    ],
)
def test_the_order_of_a_weight_s_columns(
    integers: dict[str, KeptIntegers], constants: dict[str, torch.Tensor], says: str | None
) -> None:
    graph = fx.Graph()
    weight = Weight(("a", "b"), torch.float32, (8, 4), quantized=LAYOUT)
    with FakeTensorMode():
        for name, shape in (("w", weight.stored_shape), *((n, (4,)) for n in constants)):
            graph.placeholder(name).meta["val"] = torch.empty(shape, dtype=torch.uint8)
    (first, *_) = graph.nodes
    graph.output((first,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    program = Program("target", module, {"w": weight}, constants, integers=integers)
    entry = program_to_json(program)["inputs"][0]
    assert entry["name"] == "w"
    assert entry.get("columns") == says
