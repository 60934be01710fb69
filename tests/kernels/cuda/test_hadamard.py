"""`specc::hadamard` in Triton: its sums are the oracle's, so nothing differs."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda.hadamard import MAX_SIZE, SIZES, hadamard
from specc.kernels.cuda.strided_rows import FLOATS
from specc.kernels.reference.kv_rows import hadamard_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 2, 17, 24, *SIZES])
def test_hadamard(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit: heads of a projection, as attention takes them, and rows of any other shape."""
    torch.manual_seed(columns)
    heads = torch.randn(5, 7 * columns + 3, device=device).to(dtype)[:, 3:]
    for x in (
        heads.view(5, 7, columns).transpose(0, 1),
        torch.randn(2, 70, 2 * columns, device=device).to(dtype)[..., :columns],
        torch.randn(columns, device=device).to(dtype),
        torch.randn(0, columns, device=device).to(dtype),
    ):
        got = hadamard(x)
        assert got.is_contiguous()
        assert torch.equal(got, hadamard_reference(x))


def test_a_row_without_numbers_stays_alone(device: torch.device) -> None:
    """Of 80 columns, 16 are added up."""
    x = torch.randn(3, 80, device=device)
    want = hadamard(x)
    x[1, 20], x[2, 79] = float("nan"), float("inf")
    found = (hadamard(x) != want).nonzero().tolist()
    assert found == [[1, i] for i in range(16, 32)] + [[2, i] for i in range(64, 80)]


@pytest.mark.parametrize(
    "x",
    [torch.ones(2, 64, dtype=torch.float64), torch.ones(2, MAX_SIZE + 1), torch.ones(2, 0)],
    ids=["dtype", "wide", "empty"],
)
def test_refuses(x: torch.Tensor, device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"hadamard: found x .*; needed rows of 1 … 256 columns"):
        hadamard(x.to(device))
