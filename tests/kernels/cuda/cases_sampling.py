"""Checks of noise on any device, to the last bit; draws, and their distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda import row_noise, sampling
from specc.kernels.reference.sampling import LARGEST_UNIFORM, gumbel_reference

# known answers of Random123: counter, key, words
PHILOX_VECTORS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@triton.jit
def _philox_kernel(counter, key, out):
    o = tl.arange(0, 1)
    b_0 = tl.load(counter + o).to(tl.uint32)
    b_1 = tl.load(counter + 1 + o).to(tl.uint32)
    b_2 = tl.load(counter + 2 + o).to(tl.uint32)
    b_3 = tl.load(counter + 3 + o).to(tl.uint32)
    b_0, b_1, b_2, b_3 = tl.philox(tl.load(key), b_0, b_1, b_2, b_3)
    tl.store(out + o, b_0.to(tl.int64))
    tl.store(out + 1 + o, b_1.to(tl.int64))
    tl.store(out + 2 + o, b_2.to(tl.int64))
    tl.store(out + 3 + o, b_3.to(tl.int64))


@triton.jit
def _noise_kernel(seed, offset, out, BQ: tl.constexpr):
    """Noise of the tokens of BQ counters, in the order of words."""
    o_q = tl.arange(0, BQ)
    b_0, b_1, b_2, b_3 = row_noise.noise_bits(
        tl.load(seed), tl.load(offset), tl.full([], row_noise.TOKEN_NOISE, tl.int32), o_q
    )
    o_t = o_q // sampling.LANES * (4 * sampling.LANES) + o_q % sampling.LANES
    tl.store(out + o_t, sampling.gumbel_of_bits(b_0))
    tl.store(out + o_t + sampling.LANES, sampling.gumbel_of_bits(b_1))
    tl.store(out + o_t + 2 * sampling.LANES, sampling.gumbel_of_bits(b_2))
    tl.store(out + o_t + 3 * sampling.LANES, sampling.gumbel_of_bits(b_3))


@triton.jit
def _noise_of_bits_kernel(bits, out, BQ: tl.constexpr):
    o = tl.arange(0, BQ)
    tl.store(out + o, sampling.gumbel_of_bits(tl.load(bits + o).to(tl.uint32)))


def noise_of_bits(bits: Tensor) -> Tensor:
    out = torch.empty(len(bits), dtype=torch.float32, device=bits.device)
    _noise_of_bits_kernel[(1,)](bits, out, BQ=len(bits), enable_fp_fusion=False)
    return out


def exact_noise(bits: int) -> float:
    """In double precision, from the fraction that float32 holds."""
    fraction = torch.tensor(bits).float() * 2.0**-32 + 2.0**-33
    return -math.log(-math.log1p(-min(float(fraction), LARGEST_UNIFORM)))


def check_philox(index: int, device: torch.device) -> None:
    counter, key, words = PHILOX_VECTORS[index]
    wide = key[0] | key[1] << 32
    seed = torch.tensor([wide - (1 << 64) if wide >> 63 else wide], device=device)
    out = torch.empty(4, dtype=torch.int64, device=device)
    _philox_kernel[(1,)](torch.tensor(counter, device=device), seed, out)
    assert out.tolist() == list(words)


def check_noise(seed: int, offset: int, device: torch.device) -> None:
    """The oracle's noise, to the last bit."""
    seeds, offsets = (torch.tensor([value], device=device) for value in (seed, offset))
    out = torch.empty(2048, dtype=torch.float32, device=device)
    _noise_kernel[(1,)](seeds, offsets, out, BQ=512, enable_fp_fusion=False)
    wanted = gumbel_reference(seeds.cpu(), offsets.cpu(), torch.arange(2048))
    assert torch.equal(out.cpu(), wanted)


def draws(
    sample: Callable[..., Tensor],
    logits: Tensor,
    temperature: float,
    num_rows: int,
    chunk: int = 20_000,
) -> Tensor:
    """How often each token comes out of rows that differ in their offset alone."""
    counts = torch.zeros(len(logits), dtype=torch.int64)
    for first in range(0, num_rows, chunk):
        rows = min(chunk, num_rows - first)
        tokens = sample(
            logits.repeat(rows, 1),
            torch.full((rows,), temperature),
            torch.full((rows,), 1234),
            torch.arange(first, first + rows),
        )
        counts += torch.bincount(tokens.cpu(), minlength=len(logits))
    return counts


def chi_square(counts: Tensor, probs: Tensor) -> float:
    expected = probs.double() / probs.double().sum() * counts.sum()
    return float(((counts - expected).square() / expected).sum())


def chi_square_bound(freedom: int) -> float:
    """Exceeded by chance once in a million (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4.75 * spread**0.5) ** 3
