"""`specc::grouped_mm` against loops over rows in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specc.kernels.ops  # noqa: F401  registers the operators

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAN = float("nan")
# [E, K, N] from storage in another order: checkpoints hold [E, N, K], some [K, E, N]
STRIDES = {"ekn": (0, 1, 2), "enk": (0, 2, 1), "ken": (1, 0, 2)}


def loops(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """[M, N] float64; the row's expert is the first whose end is beyond the row."""
    rows = x.double().tolist()
    matrices = weight.double().tolist()
    out = []
    for index, row in enumerate(rows):
        owners = [expert for expert, end in enumerate(ends) if index < end]
        if not owners:
            out.append([0.0] * weight.shape[2])
            continue
        matrix = matrices[owners[0]]
        out.append(
            [sum(row[k] * matrix[k][n] for k in range(len(row))) for n in range(weight.shape[2])]
        )
    return torch.tensor(out, dtype=torch.float64).view(x.shape[0], weight.shape[2])


def make_weight(experts: int, size_in: int, size_out: int, strides: str) -> torch.Tensor:
    order = STRIDES[strides]
    shape = (experts, size_in, size_out)
    stored = torch.randn([shape[axis] for axis in order])
    return stored.permute([order.index(axis) for axis in range(3)])


def check(x: torch.Tensor, weight: torch.Tensor, ends: list[int], **tolerance: float) -> None:
    end_tensor = torch.tensor(ends, dtype=torch.int32)
    copies = [x.clone(), weight.clone(), end_tensor.clone()]
    out = torch.ops.specc.grouped_mm(x, weight, end_tensor)
    assert out.dtype == x.dtype
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.double(), loops(x, weight, ends), **tolerance)
    for tensor, copy in zip((x, weight, end_tensor), copies, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([3, 5, 9, 12], id="ragged"),
        pytest.param([0, 5, 5, 12], id="empty-experts"),
        pytest.param([12, 12, 12, 12], id="all-to-the-first"),
        pytest.param([0, 0, 0, 12], id="all-to-the-last"),
        pytest.param([1, 2, 3, 12], id="single-rows"),
    ],
)
def test_equals_loops(ends, strides):
    check(torch.randn(12, 5), make_weight(4, 5, 7, strides), ends)


@pytest.mark.parametrize("ends", [[2, 6], [0, 0], [6, 6], [7, 8]], ids=str)
def test_rows_after_the_last_expert_are_zero(ends):
    """Padding rows are NaN; they reach no output."""
    x = torch.randn(9, 4)
    x[ends[-1] :] = NAN
    check(x, make_weight(2, 4, 3, "enk"), ends)


def test_experts_do_not_read_each_other():
    weight = make_weight(3, 4, 3, "ekn")
    weight[1] = NAN
    check(torch.randn(6, 4), weight, [4, 4, 6])


def test_no_rows():
    check(torch.randn(0, 4), make_weight(2, 4, 3, "ekn"), [0, 0])


def test_one_expert():
    check(torch.randn(5, 4), make_weight(1, 4, 3, "ekn"), [5])


@pytest.mark.parametrize("strides", STRIDES)
def test_bfloat16(strides):
    x = torch.randn(8, 16).bfloat16()
    weight = make_weight(3, 16, 5, strides).bfloat16()
    check(x, weight, [3, 3, 8], rtol=8e-3, atol=1e-3)


def test_strided_rows():
    check(torch.randn(4, 10).T, make_weight(2, 4, 3, "ekn"), [4, 10])


@pytest.mark.parametrize("end_dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_dtype_of_ends(end_dtype):
    x, weight = torch.randn(6, 4), make_weight(2, 4, 3, "ekn")
    out = torch.ops.specc.grouped_mm(x, weight, torch.tensor([2, 6], dtype=end_dtype))
    torch.testing.assert_close(out.double(), loops(x, weight, [2, 6]), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from(sorted(STRIDES)),
)
def test_any_split(counts, padding, size_in, size_out, strides):
    ends = [sum(counts[: expert + 1]) for expert in range(len(counts))]
    x = torch.randn(ends[-1] + padding, size_in)
    check(x, make_weight(len(counts), size_in, size_out, strides), ends)
