"""`specc::write_kv` in Triton against its oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from specc.artifact.kv_rows import QUANTIZED_ROWS, SCALE_BYTES
from specc.kernels.cuda.write_kv import write_kv
from specc.kernels.reference.core import write_kv_reference
from specc.kernels.reference.kv_rows import read_rows
from tests.kernels.cuda.cases_write_kv import (
    CASES,
    CODED_CASES,
    Case,
    check_bad_data,
    check_write_kv,
    make_rows,
    split_slabs,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("name", CASES)
def test_write_kv(name: str, device: torch.device) -> None:
    check_write_kv(CASES[name], device)


@pytest.mark.parametrize("name", CODED_CASES)
def test_bytes_of_codes(name: str, device: torch.device) -> None:
    check_write_kv(CODED_CASES[name], device)


# what rounding may get wrong: ties of both kinds of codes, numbers below e4m3's normal ones, and
# next to them, zeros of both signs, and rows that are nearly nothing, or too large for a factor
_HARD = [
    [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, -126.5, 1e-30, -0.0, 0.0, 3.5, 4.5, 5.5, 6.5],
    [448.0, 17.0, 19.0, -17.0, -19.0, 25.0, -27.0, 2**-10, 3 * 2**-10, -5 * 2**-10, 2**-6, -0.0],
    [448.0, 2**-6 - 2**-10, 2**-6 - 2**-11, 2**-6 + 2**-10, -(2**-9), 1.01 * 2**-10, 2**-11, 440.0],
    [0.0, -0.0, 1e-31, -1e-31],
    [1e-30, -0.5e-30, 0.3e-30],
    [3e38, -1e38, 1.0],
    [1.0, 0.3, -0.7, math.pi, 2 / 3, -1 / 3, 0.1],
]
_BAD = [[1.0, math.nan], [1.0, math.nan, -math.inf], [math.inf, -2.0]]


@pytest.mark.parametrize("kind", QUANTIZED_ROWS)
def test_rows_that_are_hard_to_round(kind: str, device: torch.device) -> None:
    case = Case(((10, 3),), (2, 1), (16, 16), rows=kind)
    args, slabs = split_slabs(make_rows(case, device))
    expected, expected_slabs = split_slabs(make_rows(case, device))
    rows = torch.zeros(1, 10, 16)
    for row, given in zip(rows[0], (*_HARD, *_BAD), strict=True):
        row[: len(given)] = torch.tensor(given)
    args["k"] = expected["k"] = rows.to(device)
    write_kv(**args)
    write_kv_reference(**expected)
    found = read_rows(slabs[0])
    torch.testing.assert_close(found, read_rows(expected_slabs[0]), rtol=0, atol=0, equal_nan=True)
    assert int(found.isnan().any(-1).sum()) == len(_BAD)
    # which bits say that a scale is none is no matter; codes are 0
    for slab in (slabs[0], expected_slabs[0]):
        slab[..., -SCALE_BYTES:][read_rows(slab).isnan().any(-1)] = 0
    assert torch.equal(slabs[0], expected_slabs[0])


def test_codes_need_words(device: torch.device) -> None:
    args, _ = split_slabs(make_rows(replace(CASES["decode"], sizes=(66, 66), rows="int8"), device))
    with pytest.raises(ValueError, match=r"write_kv: found k_cache .*a multiple of 4 columns"):
        write_kv(**args)


def test_bad_data_writes_nothing(device: torch.device) -> None:
    check_bad_data(device)


BROKEN = {
    "dtype": ("k", lambda x: x.double(), "float64"),
    "shapes": ("v", lambda x: x[:1], r"v \(1, 5, 64\)"),
    "cache-heads": ("k_cache", lambda x: x[:, :, :1], r"k_cache \(4, 16, 1, 64\)"),
    "head-size": ("k", lambda x: x[..., :60], r"k \(2, 5, 60\)"),
    "q-start": ("q_start", lambda x: x[:2], r"q_start \(2,\)"),
    "slot": ("slot", lambda x: x[:2], r"slot \(2,\)"),
    "strides": ("v", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "of v;"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_refuses(broken: str, device: torch.device) -> None:
    args, _ = split_slabs(make_rows(Case(((3, 5), (2, 4))), device))
    name, change, found = BROKEN[broken]
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=f"write_kv: found.*{found}.*needed"):
        write_kv(**args)


def test_refuses_large_heads(device: torch.device) -> None:
    args, _ = split_slabs(make_rows(Case(((1, 2),), sizes=(264, 264)), device))
    with pytest.raises(ValueError, match="found head size 264; needed 1 to 256"):
        write_kv(**args)


def test_no_tokens(device: torch.device) -> None:
    args, slabs = split_slabs(make_rows(Case(((1, 2),)), device))
    before = slabs[0].clone()
    args |= {"k": args["k"][:, :0], "v": args["v"][:, :0], "slot": args["slot"][:0]}
    args["q_start"] = args["q_start"] * 0
    write_kv(**args)
    torch.testing.assert_close(slabs[0], before, rtol=0, atol=0)
