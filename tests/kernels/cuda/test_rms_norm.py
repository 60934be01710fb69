"""`rms_norm` and `add_rms_norm` equal their oracles for every layout that a graph hands them."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda.dependent import LEAST_CAPABILITY
from specc.kernels.cuda.rms_norm import MAX_SIZE, add_rms_norm, config, rms_norm, shipped
from specc.kernels.cuda.shipped import CAPABILITIES
from specc.kernels.cuda.strided_rows import rows_of
from specc.kernels.reference.fused import add_rms_norm_reference
from tests.kernels.cuda.cases_rms_norm import (
    CASES,
    DTYPES,
    assert_rounded_alike,
    check_add_rms_norm,
    check_extremes,
    check_rms_norm,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
IDS = [f"{c[1]}-{'x'.join(map(str, c[0]))}-D{c[2]}-{str(c[3])[6:]}-{c[5]:d}" for c in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rms_norm(case, device):
    check_rms_norm(*case, device)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_add_rms_norm(case, device):
    check_add_rms_norm(*case, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes(dtype, device):
    check_extremes(dtype, device)


def test_heads_of_a_projection_are_read_in_place(device):
    """No copy, hence one launch: of dense rows, heads, and heads first."""
    buffer = torch.randn(1, 6, 5, 16, device=device)
    for x in (buffer, buffer[:, :, :3], buffer[:, :, :3].transpose(1, 2)):
        assert rows_of(x).tensors[0] is x
    dense = rows_of(buffer)
    assert (dense.num_rows, dense.num_inner, dense.strides) == (30, 1, ((16, 0),))
    both = rows_of(buffer[:, :, :3], torch.randn(1, 6, 3, 16, device=device))
    assert (both.num_inner, both.strides) == (3, ((80, 16), (48, 16)))


def test_either_of_two_has_rows_of_its_own(device):
    """Rows of one that lie side by side must not be taken for those of the other."""
    buffer, weight = torch.randn(1, 6, 5, 16, device=device), torch.randn(16, device=device)
    heads, dense = buffer[:, :, :3], torch.randn(1, 6, 3, 16, device=device)
    assert rows_of(dense, heads).strides == ((48, 16), (80, 16))
    for x, residual in ((heads, dense), (dense, heads)):
        found = add_rms_norm(x, residual, weight, 1e-6)
        wanted = add_rms_norm_reference(x, residual, weight, 1e-6)
        for one, other in zip(found, wanted, strict=True):
            assert_rounded_alike(one, other)


def test_no_rows(device):
    x, weight = torch.randn(0, 8, device=device), torch.randn(8, device=device)
    assert rms_norm(x, weight, 1e-6).shape == (0, 8)
    assert [part.shape for part in add_rms_norm(x, x, weight, 1e-6)] == [(0, 8)] * 2


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        ((2, MAX_SIZE + 1), (MAX_SIZE + 1,), r"found x \[2, 16385\]; needed rows of 1 … 16384"),
        ((2, 8), (7,), r"found weight \[7\].*needed a contiguous \[8\]"),
        ((), (), r"found x \[\]"),
    ],
)
def test_bad_shapes_are_refused(x, weight, message, device):
    x, weight = torch.zeros(x, device=device), torch.zeros(weight, device=device)
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, 1e-6)
    with pytest.raises(ValueError, match=message):
        add_rms_norm(x, x, weight, 1e-6)


def test_bad_dtypes_are_refused(device):
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match=r"found x torch.float64"):
        rms_norm(x.double(), x[0], 1e-6)
    with pytest.raises(ValueError, match=r"found weight \[8\], strides \(2,\)"):
        rms_norm(x, torch.zeros(16, device=device)[::2], 1e-6)
    with pytest.raises(ValueError, match=r"found residual torch.bfloat16 \[2, 8\]"):
        add_rms_norm(x, x.bfloat16(), x[0], 1e-6)
    with pytest.raises(ValueError, match=r"found residual torch.float32 \[1, 8\]"):
        add_rms_norm(x, x[:1], x[0], 1e-6)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_ships_covers_every_size(capability):
    items = list(shipped(capability))
    assert len({item.name for item in items}) == len(items)
    for size in (1, 64, 65, 4096, 5120, MAX_SIZE):
        item = config(size)
        assert item["BLOCK_D"] >= size
        found = [s for s in items if s.constexprs["BLOCK_D"] == item["BLOCK_D"]]
        # in bfloat16 also for dependent launches, where there are such
        assert len(found) == 2 * (len(DTYPES) + (capability >= LEAST_CAPABILITY))
        assert {s.num_warps for s in found} == {item["num_warps"]}
