"""Weights with NaN, infinity or overflow: found wherever they are, counted, located, refused."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.artifact.nonfinite import is_finite
from specc.artifact.safetensors_io import CHUNK_BYTES, SafetensorsReader, tensor_bytes
from specc.artifact.weight_spec import Source, WeightSpec
from specc.artifact.weights import write_weights
from specc.errors import WeightError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
def test_one_bad_value_is_seen_wherever_it_is(dtype, bad):
    """Vector kernels have a body and a tail, and NaN compares as neither smaller nor larger."""
    for size in (1, 7, 64, 1029):
        values = torch.randn(size).to(dtype)
        assert is_finite(tensor_bytes(values), dtype)
        for place in {0, size // 2, size - 1}:
            changed = values.clone()
            changed[place] = bad
            assert not is_finite(tensor_bytes(changed), dtype), (size, place)
            assert not is_finite(bytes(tensor_bytes(changed)), dtype)


def test_types_that_hold_numbers_only():
    assert is_finite(tensor_bytes(torch.full((4,), -1)), torch.int64)
    assert is_finite(b"", torch.float32)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float16, 65504.0), (torch.bfloat16, 3.3895e38)], ids=str
)
def test_the_largest_values_are_finite(dtype, limit):
    values = torch.tensor([limit, -limit, 0.0]).to(dtype)
    assert is_finite(tensor_bytes(values), dtype)


def write(tmp_path, tensor, dtype=None, nonfinite=None, **source):
    """Write one tensor through `write_weights`; returns what it holds then."""
    save_file({"a": torch.ones(3), "w": tensor.contiguous()}, tmp_path / "in.safetensors")
    reader = SafetensorsReader(tmp_path / "in.safetensors")
    shape = tuple(tensor.shape)
    if rows := source.get("rows"):
        shape = (rows[1] - rows[0], *shape[1:])
    if source.get("transpose"):
        shape = shape[::-1]
    specs = [
        WeightSpec("w", dtype or tensor.dtype, shape, (Source("w", **source),)),
        WeightSpec("a", torch.float32, (3,), (Source("a"),)),
    ]
    options = {} if nonfinite is None else {"nonfinite": nonfinite}
    write_weights(specs, reader, tmp_path / "out.safetensors", **options)
    return load_file(tmp_path / "out.safetensors")["w"]


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_the_error_names_count_and_place(tmp_path, dtype):
    tensor = torch.randn(40, 30).to(dtype)
    tensor[31, 7], tensor[31, 9], tensor[39, 0] = NAN, INF, -INF
    with pytest.raises(WeightError) as caught:
        write(tmp_path, tensor)
    found = caught.value.found
    assert found.startswith(f"w in {tmp_path / 'in.safetensors'} holds 3 values")
    assert "(1 NaN, 2 infinite), the first at [31, 7]" in found
    assert "--allow-nonfinite-weights" in caught.value.do
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        (torch.float32, torch.float16, 70000.0),
        (torch.float32, torch.float16, -65520.0),
        (torch.float32, torch.bfloat16, 3.4e38),
        (torch.float64, torch.float32, 1e39),
        (torch.bfloat16, torch.float16, 1e30),
    ],
    ids=str,
)
def test_overflow_of_the_conversion(tmp_path, source, target, value):
    tensor = torch.randn(5, 6).to(source)
    tensor[4, 2] = value
    with pytest.raises(WeightError) as caught:
        write(tmp_path, tensor, target)
    assert "1 value that" in caught.value.found
    assert f"(1 too large for {str(target)[6:]}), the first at [4, 2]" in caught.value.found
    assert "--dtype float32" in caught.value.do


def test_places_are_those_of_the_checkpoint(tmp_path):
    """Rows of a tensor, its transpose, and a place beyond the first chunk."""
    tensor = torch.zeros(12, 5)
    tensor[8, 3] = NAN
    for source in ({"rows": (6, 10)}, {"rows": (6, 10), "transpose": True}, {"transpose": True}):
        with pytest.raises(WeightError, match=re.escape("[8, 3]")):
            write(tmp_path, tensor, **source)
    # what is not read is not looked at
    write(tmp_path, tensor, rows=(0, 8))
    long = torch.zeros(CHUNK_BYTES // 4 + 100)
    long[CHUNK_BYTES // 4 + 17] = INF
    with pytest.raises(WeightError, match=re.escape(f"[{CHUNK_BYTES // 4 + 17}]")):
        write(tmp_path, long)


def test_whoever_takes_them_gets_them(tmp_path):
    tensor = torch.randn(4, 4)
    tensor[1, 1], tensor[2, 2] = NAN, INF
    found = []
    got = write(tmp_path, tensor, nonfinite=found.append)
    assert torch.equal(got.isnan(), tensor.isnan())
    assert got[2, 2] == INF
    assert [(item.name, item.count, item.first) for item in found] == [("w", 2, (1, 1))]


def test_constants_may_be_infinite(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "in.safetensors")
    reader = SafetensorsReader(tmp_path / "in.safetensors")
    mask = torch.full((3, 3), -INF).triu(1)
    write_weights([WeightSpec.from_tensor("mask", mask)], reader, tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["mask"], mask)
