"""`specc::rope_write` in Triton against its oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda.rope_write import rope_write
from specc.kernels.reference.fused import rope_write_reference
from specc.kernels.reference.kv_rows import store_rows
from tests.kernels.cuda.cases_write_kv import (
    CANARY,
    CANARY_CODE,
    CASES,
    CODED_CASES,
    Case,
    break_rows,
    make_rows,
    split_slabs,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# the sums of two products may be fused: one unit in the last place
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def make_args(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Arguments of `rope_write`, and the slabs."""
    args = make_rows(case, device)
    num_tokens, head_dim = args["slot"].shape[0], case.sizes[0]
    num_heads = case.heads[0]
    # columns of its own for each half, and rows of a wider table
    wide = torch.randn(2, num_tokens, head_dim + 8, device=device).clamp(-2, 2)
    wide = wide.to(case.angle_dtype or case.dtype)
    cos, sin = wide[..., : case.rotated or head_dim]
    fused = torch.randn(num_tokens, num_heads * head_dim + 16, device=device).to(case.dtype)
    q = fused[:, 8 : 8 + num_heads * head_dim].view(num_tokens, num_heads, head_dim)
    return {"q": q.transpose(0, 1), "cos": cos, "sin": sin, **args}


def check_rope_write(case: Case, device: torch.device) -> None:
    """Compare queries and all of the slabs with the oracle's; raises AssertionError."""
    args, slabs = split_slabs(make_args(case, device))
    expected, expected_slabs = split_slabs(make_args(case, device))
    got = rope_write(**args)
    want = rope_write_reference(**expected)
    tolerance = TOLERANCE[case.dtype]
    assert got.transpose(0, 1).is_contiguous()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(slabs[0], expected_slabs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(slabs[1], expected_slabs[1], rtol=0, atol=0)
    # a wider cache holds what the activations' dtype can hold
    narrow = slabs[0].to(case.dtype).to(slabs[0].dtype)
    torch.testing.assert_close(slabs[0], narrow, rtol=0, atol=0)
    # what is not rotated is copied
    size = args["cos"].shape[1]
    torch.testing.assert_close(got[..., size:], args["q"][..., size:], rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_rope_write(name: str, device: torch.device) -> None:
    check_rope_write(CASES[name], device)


@pytest.mark.parametrize("name", CODED_CASES)
def test_codes_are_those_of_rotated_rows(name: str, device: torch.device) -> None:
    """Byte for byte, of rows that the same kernel writes in the activations' type."""
    case = CODED_CASES[name]
    args, slabs = split_slabs(make_args(case, device))
    plain, plain_slabs = split_slabs(make_args(replace(case, rows="auto"), device))
    for name, value in args.items():
        if not name.endswith("_cache"):
            plain[name] = value
    assert torch.equal(rope_write(**args), rope_write(**plain))
    for slab, values in zip(slabs, plain_slabs, strict=True):
        is_written = (values != CANARY).all(-1)
        assert torch.equal(slab[is_written], store_rows(values[is_written], slab.dtype))
        assert (slab[~is_written] == CANARY_CODE).all()


def test_bad_data_writes_nothing(device: torch.device) -> None:
    """Rows without a place are not written; queries are rotated all the same."""
    case = Case(((2, 15), (3, 20), (2, 12)))
    args, slabs = split_slabs(break_rows(make_args(case, device)))
    expected, expected_slabs = split_slabs(make_args(case, device))
    expected["slot"][:2] = -1
    expected["slot"][5:] = -1
    got = rope_write(**args)
    want = rope_write_reference(**expected)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    for slab, other in zip(slabs, expected_slabs, strict=True):
        torch.testing.assert_close(slab, other, rtol=1e-6, atol=1e-6)


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
