"""`specc::rope_write` in Triton against its oracle."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda.rope_write import rope_write
from tests.kernels.cuda.cases_rope_write import (
    CASES,
    check_bad_data,
    check_rope_write,
    make_args,
    split_slabs,
)
from tests.kernels.cuda.cases_write_kv import Case

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("name", CASES)
def test_rope_write(name: str, device: torch.device) -> None:
    check_rope_write(CASES[name], device)


def test_bad_data_writes_nothing(device: torch.device) -> None:
    check_bad_data(device)


BROKEN = {
    "dtype": ("q", lambda x: x.double(), "float64"),
    "head-size": ("q", lambda x: x[..., :60], r"q .* \(4, 5, 60\)"),
    "odd": ("cos", lambda x: x[:, :63], r"cos \(5, 63\)"),
    "sin": ("sin", lambda x: x[:, :62], r"sin \(5, 62\)"),
    "strides": (
        "q",
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "q torch.float32 of strides",
    ),
    "cache": ("v", lambda x: x[:1], r"v \(1, 5, 64\)"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_refuses(broken: str, device: torch.device) -> None:
    args, _ = split_slabs(make_args(Case(((3, 5), (2, 4))), device))
    name, change, found = BROKEN[broken]
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=f"(?s)rope_write: found.*{found}.*needed"):
        rope_write(**args)


def test_refuses_more_rotation_than_head(device: torch.device) -> None:
    args, _ = split_slabs(make_args(Case(((1, 2),), sizes=(64, 64)), device))
    wide = torch.ones(1, 72, device=device)
    with pytest.raises(ValueError, match=r"found cos \(1, 72\).*R even and at most 64"):
        rope_write(**args | {"cos": wide, "sin": wide})
