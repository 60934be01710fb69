"""Grouped products of float experts: each row has the bits of its own projection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.artifact.weight_layout import to_blocks
from specc.kernels import native
from tests.kernels.cpu.test_linear import DTYPES, assert_close, in_poison


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    native.load()


def owners(ends: list[int], rows: int) -> list[int | None]:
    return [next((e for e, end in enumerate(ends) if row < end), None) for row in range(rows)]


def check(x: Tensor, weight: Tensor, ends: list[int]) -> None:
    """Of weights [E, N, K]: by float64, by the oracle, and by bits of each row alone."""
    outputs, blocks = weight.shape[1], to_blocks(weight)
    places = torch.tensor(ends, dtype=torch.int32)
    found = torch.ops.specc_cpu.grouped_linear(x, blocks, places, outputs)
    oracle = torch.ops.specc.grouped_linear(x, blocks, places, outputs)
    for row, owner in enumerate(owners(ends, len(x))):
        own = slice(row, row + 1)
        if owner is None:
            assert not found[own].any()
            assert not oracle[own].any()
            continue
        assert_close(found[own], x[own], weight[owner], None)
        assert_close(oracle[own], x[own], weight[owner], None)
        alone = torch.ops.specc_cpu.linear(x[own], to_blocks(weight[owner]), None, outputs)
        assert torch.equal(found[own], alone), row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_are_projected_by_their_expert(dtype: torch.dtype, threads: int) -> None:
    """Experts without rows, rows without an expert, and rows that are not next to each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = in_poison(53, 300, dtype=dtype, padding=16)
        check(x, torch.randn(5, 100, 300).to(dtype), [0, 4, 4, 45, 51])
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_sizes(data: st.DataObject) -> None:
    draw = data.draw
    rows, experts = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    n, k = draw(st.integers(1, 70)), draw(st.sampled_from([1, 2, 3, 31, 128, 129]))
    ends = sorted(draw(st.lists(st.integers(0, rows), min_size=experts, max_size=experts)))
    dtype = draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    check(in_poison(rows, k, dtype=dtype), torch.randn(experts, n, k).to(dtype), ends)


def test_no_rows_and_no_experts() -> None:
    stored = to_blocks(torch.randn(1, 100, 48))
    x, ends = torch.randn(3, 48), torch.zeros(1, dtype=torch.int32)
    for operator in (torch.ops.specc_cpu.grouped_linear, torch.ops.specc.grouped_linear):
        assert operator(x[:0], stored, ends, 100).shape == (0, 100)
        assert torch.equal(operator(x, stored, ends, 100), torch.zeros(3, 100))
    # the memory of outputs that no weight has
    none = torch.empty(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="1 expert or more"):
        torch.ops.specc_cpu.grouped_linear(x, stored[:0], none, 2**40)


def test_what_does_not_fit_is_refused() -> None:
    stored, x = to_blocks(torch.randn(2, 100, 48)), torch.randn(4, 48)
    ends, call = torch.tensor([1, 4], dtype=torch.int32), torch.ops.specc_cpu.grouped_linear
    call(x, stored, ends, 100)
    for wrong in ([3, 1], [0, 5], [-1, 4]):
        with pytest.raises(RuntimeError, match="in order"):
            call(x, stored, torch.tensor(wrong, dtype=torch.int32), 100)
    for other in (ends.long(), ends[:1], torch.cat([ends, ends]), ends[None]):
        with pytest.raises(RuntimeError, match=r"ends are|blocks"):
            call(x, stored, other, 100)
    for blocks in (stored[:-1], stored[:, :-1], stored.bfloat16()):
        with pytest.raises(RuntimeError, match=r"blocks|one dtype"):
            call(x, blocks, ends, 100)
