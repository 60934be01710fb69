"""Rows on their way into blocks: stacks of matrices, transposes, and the parts of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specc.artifact.packed_stream import (
    packed_stream,
    quantized_stream,
    rounded_matrices,
    rounded_rows,
    zero_rows,
)
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.rounding import quantize, round_weight
from specc.artifact.weight_spec import QuantizedPart, Source, WeightSpec
from specc.artifact.weights import MemoryReader, check_spec, write_weights
from specc.errors import WeightError

NAMES = ("int8", "int4-g32", "int4-g64-zeros", "int8-zeros", "fp8", "mxfp4", "nvfp4")
LAYOUTS = [QuantizedLayout.named(name) for name in NAMES]
EVERY = {"argvalues": LAYOUTS, "ids": lambda item: item.name}


def chunks_of(weight: Tensor, size: int = 997) -> Iterator[memoryview]:
    data = memoryview(weight.numpy().tobytes())
    yield from (data[i : i + size] for i in range(0, len(data), size))


def content(chunks) -> bytes:
    return b"".join(map(bytes, chunks))


@pytest.mark.parametrize("layout", **EVERY)
@pytest.mark.parametrize("outputs", [1, 31, 32, 37, 64, 70], ids="n{}".format)
def test_each_matrix_has_blocks_of_its_own(outputs, layout) -> None:
    """The last block of a matrix is not filled with rows of the next one."""
    weights = torch.randn(3, outputs, 96)
    want = content(quantize(item, layout).numpy().tobytes() for item in weights)
    found = content(quantized_stream(chunks_of(weights), weights.shape, torch.float32, layout))
    assert found == want
    assert len(found) == torch.Size(layout.stored_shape(weights.shape)).numel()
    # rows that come one by one, and all at once
    rows = round_weight(weights.view(-1, 96), layout)
    for step in (1, 5, 3 * outputs):
        parts = (rows.rows(i, i + step) for i in range(0, 3 * outputs, step))
        assert content(packed_stream(parts, layout, outputs)) == want


@pytest.mark.parametrize("step", [1, 20, 37, 256, 512])
def test_outputs_far_apart_wait_for_each_other(step) -> None:
    """However rows come: blocks are those of each matrix as a whole."""
    layout = QuantizedLayout.named("int4-g32-zeros-fragments-64")
    weights = torch.randn(2, 256, 256)
    want = content(quantize(item, layout).numpy().tobytes() for item in weights)
    rows = round_weight(weights.view(-1, 256), layout)
    parts = (rows.rows(i, min(i + step, 512)) for i in range(0, 512, step))
    assert content(packed_stream(parts, layout, 256)) == want


@pytest.mark.parametrize("layout", **EVERY)
def test_matrices_that_are_stored_as_transposes(layout) -> None:
    weights = torch.randn(3, 37, 96)
    want = content(quantize(item, layout).numpy().tobytes() for item in weights)
    stored = weights.transpose(1, 2).contiguous()
    rows = rounded_matrices(chunks_of(stored), (37, 96), torch.float32, layout)
    assert content(packed_stream(rows, layout, 37)) == want


@pytest.mark.parametrize("layout", **EVERY)
def test_rows_of_zeros_are_what_zeros_are_rounded_to(layout) -> None:
    found = zero_rows(5, 96, layout)
    (want,) = rounded_rows(chunks_of(torch.zeros(5, 96)), 96, torch.float32, layout)
    for name in ("levels", "scales", "zeros"):
        one, other = getattr(found, name), getattr(want, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one.float(), other.float())


def stored(spec: WeightSpec, tensors: dict[str, Tensor], path) -> Tensor:
    from safetensors.torch import load_file

    reader = MemoryReader(tensors)
    check_spec(spec, reader)
    write_weights([spec], reader, path / "weights.safetensors")
    return load_file(path / "weights.safetensors")[spec.key]


@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "turned"])
@pytest.mark.parametrize("layout", **EVERY)
def test_a_part_has_the_integers_of_the_whole(tmp_path, layout, is_turned) -> None:
    """Rows and columns of a rank: scales are those of whole rows, or of the whole's groups."""
    weights = torch.randn(2, 40, 256)
    rows, columns = ((0, 7), (33, 40)), ((0, 64), (192, 256))
    if is_turned:
        given = {"w": weights.transpose(1, 2).contiguous()}
        part = QuantizedPart((40, 256), rows, columns)
    else:
        given = {"w": torch.cat([weights[:, a:b] for a, b in rows], 1)}
        part = QuantizedPart((14, 256), (), columns)
    spec = WeightSpec(
        "q", torch.float32, (2, 14, 128), (Source("w"),), quantized=layout, is_turned=is_turned,
        part=part,
    )  # fmt: skip
    found = stored(spec, given, tmp_path)
    wholes = []
    for item in weights:
        whole = round_weight(item, layout)
        taken = [whole.rows(a, b).columns(columns, layout) for a, b in rows]
        wholes.append(packed_stream(taken, layout, 14))
    want = torch.frombuffer(bytearray(b"".join(map(content, wholes))), dtype=torch.uint8)
    assert torch.equal(found.flatten(), want)


@pytest.mark.parametrize("layout", **EVERY)
def test_columns_stand_for_what_they_did(layout) -> None:
    whole, columns = round_weight(torch.randn(40, 256), layout), ((0, 64), (192, 256))
    want = torch.cat([whole.values(layout)[:, a:b] for a, b in columns], 1)
    assert whole.columns(columns, layout).values(layout).equal(want)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_has_no_integers(tmp_path, value) -> None:
    """Whatever a report takes: there is no scale for it."""
    weight = torch.randn(40, 64)
    weight[3, 5] = value
    spec = WeightSpec("q", torch.float32, (40, 64), (Source("w"),), quantized=LAYOUTS[0])
    heard: list[object] = []
    with pytest.raises(WeightError, match=r"w in .* the first at \[3, 5\]") as caught:
        write_weights(
            [spec], MemoryReader({"w": weight}), tmp_path / "w.safetensors", nonfinite=heard.append
        )
    assert not heard
    assert "leave out --quantize" in caught.value.do
