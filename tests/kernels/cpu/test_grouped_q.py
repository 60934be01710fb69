"""Grouped products of quantized experts: each row has the bits of its own projection."""

from __future__ import annotations

import pytest
import torch

from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels import native
from tests.kernels.cpu.quantized_weights import random_weight, whole_columns
from tests.kernels.cpu.test_linear import in_poison
from tests.kernels.cpu.test_linear_q import DTYPES, EVERY, numbers_of, oracle, same_bits

K, N = 48, 100


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    native.load()


@pytest.mark.default(
    "torch.float32-int8",
    "torch.float32-int4-g32",
    "torch.float32-int4-g64-zeros",
    "torch.float32-int8-g32",
    "torch.float32-int8-zeros",
    "torch.float32-fp8",
    "torch.float32-q4_0",
    "torch.float32-q5_1",
    "torch.float32-q3_k",
    "torch.float32-q6_k",
    "torch.bfloat16-int8",
    "torch.bfloat16-int4-g64",
    "torch.bfloat16-int4-g128-zeros",
    "torch.bfloat16-int8-g128",
    "torch.bfloat16-mxfp4",
    "torch.bfloat16-nvfp4",
    "torch.bfloat16-fp8-g128",
    "torch.bfloat16-q5_0",
    "torch.bfloat16-q2_k",
    "torch.bfloat16-q5_k",
)
@pytest.mark.parametrize("layout", **EVERY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_projected_by_their_expert(dtype, layout) -> None:
    """Experts without rows, rows without an expert, and rows that are not next to each other."""
    k = whole_columns(K, layout)
    experts = [random_weight(N, k, layout) for _ in range(5)]
    stored, arguments = torch.cat(experts), (N, *numbers_of(layout))
    x, ends = in_poison(13, k, dtype=dtype, padding=16), [0, 4, 4, 5, 11]
    given = torch.tensor(ends, dtype=torch.int32)
    found = torch.ops.specc_cpu.grouped_mm_q(x, stored, given, *arguments)
    assert same_bits(found, torch.ops.specc.grouped_mm_q(x, stored, given, *arguments))
    owners = [next((e for e, end in enumerate(ends) if row < end), None) for row in range(13)]
    for row, owner in enumerate(owners):
        alone = torch.zeros(1, N, dtype=dtype)
        if owner is not None:
            alone = oracle(x[row : row + 1], experts[owner], None, N, layout)
        assert same_bits(found[row : row + 1], alone), row


def test_no_rows_and_no_experts() -> None:
    layout = QuantizedLayout(4, 32)
    arguments = N, *numbers_of(layout)
    stored, x = random_weight(N, K, layout), torch.randn(3, K)
    for operator in (torch.ops.specc_cpu.grouped_mm_q, torch.ops.specc.grouped_mm_q):
        ends = torch.zeros(1, dtype=torch.int32)
        assert operator(x[:0], stored, ends, *arguments).shape == (0, N)
        assert torch.equal(operator(x, stored, ends, *arguments), torch.zeros(3, N))
    # the memory of outputs that no weight has
    none = torch.empty(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="1 expert or more"):
        torch.ops.specc_cpu.grouped_mm_q(x, stored[:0], none, 2**40, *arguments[1:])


def test_what_does_not_fit_is_refused() -> None:
    layout = QuantizedLayout(4, 32)
    stored = torch.cat([random_weight(N, K, layout)] * 2)
    x, ends = torch.randn(4, K), torch.tensor([1, 4], dtype=torch.int32)
    call = torch.ops.specc_cpu.grouped_mm_q
    call(x, stored, ends, N, *numbers_of(layout))
    for wrong in ([3, 1], [0, 5], [-1, 4]):
        with pytest.raises(RuntimeError, match="in order"):
            call(x, stored, torch.tensor(wrong, dtype=torch.int32), N, *numbers_of(layout))
    for other in (ends.long(), ends[:1], torch.cat([ends, ends]), ends[None]):
        with pytest.raises(RuntimeError, match=r"ends are|blocks"):
            call(x, stored, other, N, *numbers_of(layout))
    for blocks in (stored[:-1], stored[:, :-1], stored.int()):
        with pytest.raises(RuntimeError, match=r"blocks|quantized weight"):
            call(x, blocks, ends, N, *numbers_of(layout))
