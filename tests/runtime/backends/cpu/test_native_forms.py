"""What no kernel of aten's operators takes is torch's own; what one takes is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from specc.artifact.graph_io import graph_from_json, graph_to_json
from tests.native_library import load_native
from tests.runtime.backends.cpu.plain_program import PlainProgram

aten = torch.ops.aten


def _picked(x: Tensor) -> Tensor:
    return aten.index.Tensor(x, [aten.argmax(x, 0), aten.argmax(x, 0)])


def _complex(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(2, 2, 2))
    return torch.view_as_real(pairs * pairs)


# program → operators that Python is to call
PROGRAMS: tuple[tuple[Callable[[Tensor], Tensor], set[str]], ...] = (
    (lambda x: aten.add.Tensor(x, x), set()),
    (lambda x: aten.index.Tensor(x, [aten.argmax(x, 0)]), set()),
    (_picked, {"aten.index.Tensor"}),
    (lambda x: aten.cumsum(x, 1), {"aten.cumsum.default"}),
    (lambda x: aten.cumsum(aten.gt.Scalar(x, 0), 1), set()),
    (lambda x: aten.pow.Tensor_Scalar(aten.argmax(x, 1), 4), {"aten.pow.Tensor_Scalar"}),
    (lambda x: aten.mul.Tensor(x.double(), 2), {"aten._to_copy.default", "aten.mul.Tensor"}),
    (lambda x: aten.chunk.default(x, 4, 1)[3], set()),
    (lambda x: aten.chunk.default(aten.repeat.default(x, [1, 2]), 5, 1)[1], set()),
    (lambda x: aten.unbind.int(aten.repeat.default(x, [1, 2]), 1)[6], {"aten.unbind.int"}),
    (lambda x: aten.split.Tensor(aten.repeat.default(x, [3, 1]), 1)[4], {"aten.split.Tensor"}),
    (_complex, {"aten.view_as_complex.default", "aten.mul.Tensor", "aten.view_as_real.default"}),
)


@pytest.mark.parametrize(("function", "names"), PROGRAMS)
def test_forms(function: Callable[[Tensor], Tensor], names: set[str]) -> None:
    load_native()
    x = torch.randn(2, 4)
    # as a file has it, with dtypes and sizes of its values
    stored = graph_to_json(make_fx(function, tracing_mode="fake")(x).graph)
    program = PlainProgram(graph_from_json(stored).graph)
    assert set(program.encoder.python_names) == names
    torch.testing.assert_close(program(x), function(x))
