"""`specc::block_conv` against sums that are written out, row by row and channel by channel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specc.kernels.operators.block_conv import block_conv_reference

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
# rows of the context, a block, rows of the context, a block of one row, and a longer one; padding
NUMBERS = [0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 1, 2, 3, 4, 5, 2**31 - 1]


def places_of(numbers: list[int]) -> Tensor:
    """As a pass has them: the second column of another tensor."""
    wide = torch.zeros(len(numbers), 2, dtype=torch.int64)
    wide[:, 1] = -1 - torch.tensor(numbers)
    return wide.int()[:, 1:]


def wanted(x: Tensor, base: Tensor, factors: Tensor) -> Tensor:
    """[Nt, d] in float64."""
    x, base, factors = x.double(), base.double(), factors.double()
    size, found = x.shape[1] // factors.shape[2], torch.zeros_like(x)
    for i, number in enumerate(NUMBERS):
        for t in range(min(len(base), number + 1, i + 1)):
            for c in range(x.shape[1]):
                found[i, c] += (base[t, c] + factors[i, t, c // size]) * x[i - t, c]
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("taps", "groups", "size"), [(2, 2, 16), (1, 1, 5), (4, 3, 7), (9, 5, 1)])
def test_sums_of_rows_of_a_block(
    taps: int, groups: int, size: int, dtype: torch.dtype, native_operators: object
) -> None:
    """Rows of another block are no number: nothing of them is read."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, places = drawn(len(NUMBERS), groups * size), places_of(NUMBERS)
    base, factors = drawn(2, taps, groups * size)[1], drawn(len(NUMBERS), 2, taps, groups)[:, 0]
    exact = wanted(x, base, factors)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 3e-2}
    functions = (block_conv_reference, native_operators.block_conv)  # type: ignore[attr-defined]
    for function in functions:
        found = function(x, base, factors, places)
        assert (found.dtype, found.is_contiguous()) == (dtype, True)
        torch.testing.assert_close(found.double(), exact, **close)
        # the last rows before each block
        for row in (1, 7, 8):
            other = x.clone()
            other[row] = torch.nan
            changed = function(other, base, factors, places)
            after = [i for i in range(len(NUMBERS) - 1) if i != row]
            assert torch.equal(changed[after], found[after])


def test_the_same_bits_for_any_number_of_rows(native_operators: object) -> None:
    """A row alone, and beside others of its pass, whatever threads share."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(640, 96, generator=generator)
    base, factors = torch.randn(2, 96), torch.randn(640, 2, 6)
    places = places_of([i % 8 for i in range(640)])
    every = native_operators.block_conv(x, base, factors, places)  # type: ignore[attr-defined]
    for first in range(0, 640, 80):
        own = slice(first, first + 8)
        part = (x[own], base, factors[own], places[own])
        assert torch.equal(native_operators.block_conv(*part), every[own])  # type: ignore[attr-defined]
    torch.testing.assert_close(every, block_conv_reference(x, base, factors, places))


def test_other_shapes_are_refused(native_operators: object) -> None:
    x, base, factors, places = (
        torch.ones(3, 6),
        torch.ones(2, 6),
        torch.ones(3, 2, 3),
        places_of([0] * 3),
    )
    call = native_operators.block_conv  # type: ignore[attr-defined]
    for changed in (
        (x[:2], base, factors, places),
        (x, base[:1], factors, places),
        (x, base[:, :5], factors, places),
        (x, base, torch.ones(3, 2, 4), places),
        (x, base, torch.ones(3, 2, 0), places),
        (x, base.bfloat16(), factors, places),
        (x, base, factors, places.long()),
        (x, base, factors, places[:, 0]),
    ):
        with pytest.raises(RuntimeError, match="specc: "):
            call(*changed)
