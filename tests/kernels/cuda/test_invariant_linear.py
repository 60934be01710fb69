"""`specc::invariant_linear` in Triton: its oracle, and rows that do not depend on others."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda.invariant_linear import TILES, invariant_linear
from specc.kernels.reference.products import skinny_linear_reference
from tests.kernels.cuda.test_skinny_linear import assert_close, make_operands

pytestmark = pytest.mark.usefixtures("poisoned_memory")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# of one tile and of several, of weights whose outputs and columns fill tiles and do not
SHAPES = ((1, 200, 33), (16, 384, 64), (17, 130, 70), (150, 200, 96))


@pytest.mark.parametrize("dtype", TILES, ids=str)
@pytest.mark.parametrize(("rows", "size", "num_out"), SHAPES)
def test_the_oracle(rows, size, num_out, dtype, device):
    for has_bias in (False, True):
        operands = make_operands((1, rows), size, num_out, dtype, device, has_bias)
        found = invariant_linear(**operands)
        assert_close(found, skinny_linear_reference(**operands), dtype)


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("dtype", TILES, ids=str)
def test_rows_do_not_depend_on_others(dtype, device):
    """A row is the same bit for bit in a launch of either tile, wherever it lies in it."""
    operands = make_operands((131,), 392, 70, dtype, device, has_bias=True)
    x = operands["input"]
    whole = invariant_linear(**operands)
    for first, last in ((0, 1), (5, 6), (130, 131), (3, 19), (1, 18), (60, 131), (64, 128)):
        part = invariant_linear(**operands | {"input": x[first:last]})
        assert torch.equal(part, whole[first:last]), (first, last)


def test_no_rows(device):
    operands = make_operands((0,), 8, 6, F32, device)
    assert invariant_linear(**operands).shape == (0, 6)


@pytest.mark.parametrize(
    ("change", "found"),
    [({"weight": torch.zeros(8, 15)}, "found weight"), ({"bias": torch.zeros(7)}, "found bias")],
    ids=["weight", "bias"],
)
def test_bad_input_is_refused(change, found, device):
    operands = make_operands((1, 4), 16, 8, F32, device)
    with pytest.raises(ValueError, match=f"invariant_linear: {found}"):
        invariant_linear(**(operands | {k: v.to(device) for k, v in change.items()}))
