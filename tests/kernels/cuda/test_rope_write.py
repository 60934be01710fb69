"""`specc::rope_write` and `specc::norm_rope_write` in Triton against their oracles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda import rope_write as module
from specc.kernels.cuda.rms_norm import rms_norm
from specc.kernels.cuda.rope_write import norm_rope_write, rope_write
from specc.kernels.reference.fused import norm_rope_write_reference, rope_write_reference
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
from tests.kernels.cuda.launches import record

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


def check_rope_write(case: Case, device: torch.device, hadamard: bool) -> None:
    """Compare queries and all of the slabs with the oracle's; raises AssertionError."""
    args, slabs = split_slabs(make_args(case, device))
    expected, expected_slabs = split_slabs(make_args(case, device))
    got = rope_write(**args, hadamard=hadamard)
    want = rope_write_reference(**expected, hadamard=hadamard)
    tolerance = TOLERANCE[case.dtype]
    assert got.transpose(0, 1).is_contiguous()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(slabs[0], expected_slabs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(slabs[1], expected_slabs[1], rtol=0, atol=0)
    # a wider cache holds what the activations' dtype can hold
    narrow = slabs[0].to(case.dtype).to(slabs[0].dtype)
    torch.testing.assert_close(slabs[0], narrow, rtol=0, atol=0)
    if not hadamard:
        # what is not rotated is copied
        size = args["cos"].shape[1]
        torch.testing.assert_close(got[..., size:], args["q"][..., size:], rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_rope_write(name: str, device: torch.device) -> None:
    for hadamard in (False, True):
        check_rope_write(CASES[name], device, hadamard)


@pytest.mark.parametrize("name", [*CASES, *CODED_CASES])
def test_exact_products_make_the_bits_of_the_oracle(name: str, device: torch.device) -> None:
    """Signs of zeros, too. Then nothing depends on what is fused.

    All numbers are multiples of 1/4 up to 4.
    """
    case = {**CASES, **CODED_CASES}[name]
    for hadamard in (False, True):
        found: list[list[Tensor]] = []
        for operator in (rope_write, rope_write_reference):
            args, slabs = split_slabs(make_args(case, device))
            for key in ("q", "k", "v", "cos", "sin"):
                args[key].copy_(args[key].mul(4).round().div(4).clamp(-4, 4))
            turned = operator(**args, hadamard=hadamard)
            found.append([x.contiguous().view(torch.uint8) for x in (turned, *slabs)])
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", CODED_CASES)
def test_codes_are_those_of_rotated_rows(name: str, device: torch.device) -> None:
    """Byte for byte, of rows that the same kernel writes in the activations' type."""
    case = CODED_CASES[name]
    for hadamard in (False, True):
        args, slabs = split_slabs(make_args(case, device))
        plain, plain_slabs = split_slabs(make_args(replace(case, rows="auto"), device))
        for key, value in args.items():
            if not key.endswith("_cache"):
                plain[key] = value
        got = rope_write(**args, hadamard=hadamard)
        assert torch.equal(got, rope_write(**plain, hadamard=hadamard))
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


# with norms: eps that shows beside small rows, weights of q and of k, and whether one is added
NORMED = ("decode", "one-token", "tree", "partial", "partial-odd-half", "dead-tokens", "chunk")
EPS = 1e-2


def normed_args(case: Case, device: torch.device) -> tuple[dict[str, Any], list[Tensor]]:
    """Arguments of `norm_rope_write` but `unit_offset`, and the slabs."""
    args, slabs = split_slabs(make_args(case, device))
    for i, name in enumerate(("q_gamma", "k_gamma")):
        torch.manual_seed(i)
        args[name] = torch.randn(case.sizes[0], device=device).to(case.dtype)
    return args | {"eps": EPS}, slabs


@pytest.mark.parametrize("unit_offset", [False, True], ids=["gamma", "offset"])
@pytest.mark.parametrize("name", NORMED)
def test_norm_rope_write(name: str, unit_offset: bool, device: torch.device) -> None:
    for hadamard in (False, True):
        check_norm_rope_write(CASES[name], device, unit_offset=unit_offset, hadamard=hadamard)


def check_norm_rope_write(case: Case, device: torch.device, **options: bool) -> None:
    """Compare queries and all of the slabs with the oracle's; raises AssertionError."""
    args, slabs = normed_args(case, device)
    expected, expected_slabs = normed_args(case, device)
    # a row that is small beside eps, and one that is nothing at all
    for rows in (args, expected):
        rows["q"][:, -1] *= 0.01
        rows["k"][:, 0] = 0
    got = norm_rope_write(**args, **options)
    want = norm_rope_write_reference(**expected, **options)
    tolerance = 2 * TOLERANCE[case.dtype]
    assert got.transpose(0, 1).is_contiguous()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(slabs[0], expected_slabs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(slabs[1], expected_slabs[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["tree", "partial", "one-token", "tree-int8", "partial-fp8"])
def test_a_norm_is_rounded_before_it_is_rotated(name: str, device: torch.device) -> None:
    """To the last bit what `rms_norm` and `rope_write` make one after the other, codes too."""
    case = {**CASES, **CODED_CASES}[name]
    for hadamard in (False, True):
        args, slabs = normed_args(case, device)
        apart, apart_slabs = normed_args(case, device)
        for rows in (args, apart):
            # squares whose sum is the same in any order
            for key in "qk":
                rows[key].copy_(rows[key].mul(4).round().div(4))
        got = norm_rope_write(**args, unit_offset=False, hadamard=hadamard)
        for key in "qk":
            apart[key] = rms_norm(apart[key], apart.pop(f"{key}_gamma"), EPS)
        del apart["eps"]
        assert torch.equal(got, rope_write(**apart, hadamard=hadamard))
        assert all(map(torch.equal, slabs, apart_slabs))


def test_a_row_without_numbers_stays_alone(device: torch.device) -> None:
    """NaN of one head is in that head's row of the result, and in its row of the cache."""
    args, slabs = normed_args(CASES["decode"], device)
    clean, clean_slabs = normed_args(CASES["decode"], device)
    args["q"][1, 0, 63], args["k"][0, 2, 5] = float("nan"), float("inf")
    got = norm_rope_write(**args, unit_offset=False)
    want = norm_rope_write(**clean, unit_offset=False)
    # of an infinite one all others are zero, and their product with it is none
    is_changed = got != want
    assert is_changed.any(-1).nonzero().tolist() == [[1, 0]]
    assert got[1, 0].isnan().all()
    changed = slabs[0] != clean_slabs[0]
    assert changed.any(-1).sum() == 1
    assert torch.equal(slabs[1], clean_slabs[1])


def test_rows_with_norms_are_added_up_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One binary for few tokens and many, as `--batch-invariant` needs; `rope_write` has two."""

    def calls() -> Iterator[Tensor]:
        for num_tokens in (1, 64, 65, 512):
            case = Case(((num_tokens, 3),), sizes=(128, 128), dtype=torch.bfloat16)
            args, _ = normed_args(case, torch.device("cpu"))
            yield module.norm_rope_write(**args, unit_offset=True)

    launched = record(module, 90, monkeypatch, calls)
    assert len(launched) == 8
    assert len({launch.compiled for launch in launched}) == 2  # one of them starts early


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"q_gamma": torch.ones(63)}, r"found q_gamma torch.float32 \[63\]"),
        ({"k_gamma": torch.ones(64, dtype=torch.float64)}, "found k_gamma torch.float64"),
        ({"k_gamma": torch.ones(128)[::2]}, r"strides \(2,\)"),
        ({"cos": torch.ones(3, 63)}, r"found cos \(3, 63\)"),
    ],
    ids=["size", "dtype", "strides", "cos"],
)
def test_refuses_with_norms(change: dict[str, Tensor], found: str, device: torch.device) -> None:
    args, _ = normed_args(CASES["decode"], device)
    args |= {name: value.to(device) for name, value in change.items()}
    with pytest.raises(ValueError, match=f"(?s)norm_rope_write: .*{found}.*needed"):
        norm_rope_write(**args, unit_offset=False)
