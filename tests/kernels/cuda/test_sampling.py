"""Noise in Triton against the oracle's bits."""

from __future__ import annotations

import pytest
import torch

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
