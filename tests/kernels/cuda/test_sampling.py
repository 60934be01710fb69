"""`sample` in Triton against its oracle, and its noise against the oracle's bits."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda import sampling
from tests.kernels.cuda import cases_sampling as cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("index", range(3), ids="vector{}".format)
def test_philox_vectors_of_random123(index, device):
    cases.check_philox(index, device)


@pytest.mark.parametrize(
    ("seed", "offset"),
    [(0, 0), (1, 0), (0, 1), (-1, -1), (2**40 + 3, 7), (5, 2**33 + 1)],
    ids=["zero", "seed1", "offset1", "negative", "seed-high", "offset-high"],
)
def test_noise_is_the_oracles_to_the_last_bit(seed, offset, device):
    cases.check_noise(seed, offset, device)


def test_noise_of_extreme_bits(device):
    bits = [0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, *range(2**32 - 8, 2**32)]
    noise = cases.noise_of_bits(torch.tensor(bits, device=device)).tolist()
    for bit, value in zip(bits, noise, strict=True):
        assert value == pytest.approx(cases.exact_noise(bit), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("num_rows", "vocab", "dtype", "kind", "max_programs"),
    [
        pytest.param(5, 1000, torch.float32, "random", 2048, id="fp32-v1000"),
        pytest.param(5, 511, torch.float16, "ties", 2048, id="fp16-v511-ties"),
        pytest.param(5, 513, torch.bfloat16, "masked", 2048, id="bf16-v513-masked"),
        pytest.param(10, 1300, torch.float32, "nan", 2048, id="fp32-v1300-nan"),
        pytest.param(5, 1, torch.float32, "random", 2048, id="fp32-v1"),
        pytest.param(7, 100, torch.bfloat16, "ties", 2048, id="bf16-v100-ties"),
        pytest.param(5, 3000, torch.float16, "random", 10, id="fp16-v3000-4-blocks"),
        pytest.param(2, 4900, torch.float32, "masked", 2048, id="fp32-v4900-masked"),
        pytest.param(1100, 3, torch.float32, "random", 2048, id="fp32-1100-rows")
        if torch.cuda.is_available()
        else pytest.param(17, 3, torch.float32, "random", 2048, id="fp32-17-rows"),
    ],
)
def test_sample(num_rows, vocab, dtype, kind, max_programs, device):
    cases.check_sample(num_rows, vocab, dtype, device, kind=kind, max_programs=max_programs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="100k programs; the oracle's run here")
def test_samples_follow_the_distribution(device):
    cases.check_distribution(device)


def test_no_rows(device):
    empty = torch.empty(0, dtype=torch.int64, device=device)
    logits = torch.empty(0, 9, device=device)
    assert sampling.sample(logits, empty.float(), empty, empty).shape == (0,)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"logits": torch.zeros(3, 4, dtype=torch.float64)}, "torch.float64"),
        ({"logits": torch.zeros(4, 3).T}, "strides"),
        ({"temperature": torch.ones(2)}, r"temperature \[2\]"),
        ({"temperature": torch.ones(3, dtype=torch.float64)}, "torch.float64"),
        ({"seed": torch.zeros(3, dtype=torch.int32)}, "torch.int32"),
        ({"offset": torch.zeros(3, 1, dtype=torch.int64)}, r"offset \[3, 1\]"),
    ],
    ids=["fp64", "columns", "rows", "temperature-fp64", "seed-i32", "offset-2d"],
)
def test_bad_inputs_are_refused_with_their_values(change, found):
    integers = torch.zeros(3, dtype=torch.int64)
    inputs = {"logits": torch.zeros(3, 4), "temperature": torch.ones(3)}
    inputs |= {"seed": integers, "offset": integers}
    with pytest.raises(ValueError, match=found):
        sampling.sample(**(inputs | change))
