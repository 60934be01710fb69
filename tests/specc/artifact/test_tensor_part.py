"""Parts of stored tensors: what is read is what slicing takes, each byte once and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specc.artifact.safetensors_io import SafetensorsReader, TensorReader, tensor_bytes
from specc.artifact.tensor_part import TensorPart, read_part
from specc.artifact.weight_spec import Source, WeightSpec
from specc.artifact.weights import MemoryReader, check_spec
from specc.errors import WeightError

SHAPES = ((7,), (6, 5), (3, 4, 5))
PARTS = (
    TensorPart(((0, 1),), ((0, 5),)),
    TensorPart(((0, 1),), ((1, 3), (4, 5))),
    TensorPart(((1, 3), (4, 6)), ((0, 5),)),
    TensorPart(((0, 2), (3, 6)), ((0, 1), (2, 4))),
    TensorPart(((2, 2),), ((0, 5),)),
)


def taken(tensor: Tensor, part: TensorPart, transpose: bool) -> Tensor:
    """The oracle: plain slices."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    rows = torch.cat([flat[a:b] for a, b in part.vectors])
    found = torch.cat([rows[:, a:b] for a, b in part.columns], 1)
    return found.t() if transpose else found


@pytest.fixture(params=["file", "memory"])
def read(request: pytest.FixtureRequest, tmp_path: Path) -> TensorReader:
    """Tensors of each shape and dtype, named by both."""
    tensors = {
        f"{len(shape)}-{dtype}": torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    if request.param == "memory":
        return MemoryReader(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsReader(tmp_path / "model.safetensors")


@pytest.mark.parametrize("chunk_bytes", [1, 16, 1 << 20])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_parts_are_slices(
    read: TensorReader, dtype: torch.dtype, transpose: bool, chunk_bytes: int
) -> None:
    for dims, shape in enumerate(SHAPES, start=1):
        key = f"{dims}-{dtype}"
        whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        for part in PARTS if dims > 1 else PARTS[:2]:
            chunks = read.read_part(key, part, transpose, chunk_bytes)
            found = b"".join(bytes(chunk) for chunk in chunks)
            wanted = taken(whole, part, transpose).contiguous()
            assert found == bytes(tensor_bytes(wanted)), (key, part)


@pytest.mark.parametrize("transpose", [False, True])
def test_each_byte_is_read_once_and_no_other(transpose: bool) -> None:
    part, width, item = TensorPart(((0, 2), (3, 6)), ((0, 1), (2, 4))), 5, 4
    touched: list[int] = []

    def read(offset: int, target: memoryview) -> None:
        touched.extend(range(offset, offset + len(target)))

    for _ in read_part(read, width, item, part, transpose, 16):
        pass
    items = torch.arange(6 * width).view(6, width)
    wanted = [
        i * item + byte for i in taken(items, part, False).reshape(-1) for byte in range(item)
    ]
    assert sorted(touched) == sorted(int(place) for place in wanted)


def test_a_part_that_the_checkpoint_has_not_got_is_told(read: TensorReader) -> None:
    source = Source("2-torch.float32", part=TensorPart(((4, 7),), ((0, 5),)))
    spec = WeightSpec("w", torch.float32, (3, 5), (source,))
    with pytest.raises(WeightError, match="7 vectors of 5"):
        check_spec(spec, read)
