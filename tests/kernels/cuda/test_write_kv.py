"""`specc::write_kv` in Triton against its oracle."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda.write_kv import write_kv
from tests.kernels.cuda.cases_write_kv import (
    CASES,
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
