"""Gumbel noise of random bits: that of `gumbel_reference` to the last bit.

Made of 32-bit integers, then additions and multiplications that no compiler may fuse
(`enable_fp_fusion=False` at every launch).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.reference import sampling as facts

LANES = tl.constexpr(facts.LANES)
MIN_TEMPERATURE = tl.constexpr(facts.MIN_TEMPERATURE)
LARGEST_UNIFORM = tl.constexpr(facts.LARGEST_UNIFORM)
SQRT_HALF = tl.constexpr(facts.SQRT_HALF)
SQRT_HALF_TO_ONE = tl.constexpr(facts.SQRT_HALF_TO_ONE)
LOG_TWO_HIGH = tl.constexpr(facts.LOG_TWO[0])
LOG_TWO_LOW = tl.constexpr(facts.LOG_TWO[1])


@triton.jit
def split_float(b_x):
    b_bits = b_x.to(tl.int32, bitcast=True) + SQRT_HALF_TO_ONE
    b_mantissa = (b_bits & 0x7FFFFF) + SQRT_HALF
    return b_mantissa.to(tl.float32, bitcast=True) - 1.0, ((b_bits >> 23) - 127).to(tl.float32)


@triton.jit
def log_split(b_f, b_e):
    """Natural logarithm of (1 + f) · 2^e; the coefficients are those of the oracle."""
    b_value = b_f * 7.0376836292e-2 - 1.1514610310e-1
    b_value = b_value * b_f + 1.1676998740e-1
    b_value = b_value * b_f - 1.2420140846e-1
    b_value = b_value * b_f + 1.4249322787e-1
    b_value = b_value * b_f - 1.6668057665e-1
    b_value = b_value * b_f + 2.0000714765e-1
    b_value = b_value * b_f - 2.4999993993e-1
    b_value = b_value * b_f + 3.3333331174e-1
    b_square = b_f * b_f
    b_value = b_value * b_f * b_square + b_e * LOG_TWO_LOW - b_square * 0.5
    return b_f + b_value + b_e * LOG_TWO_HIGH


@triton.jit
def gumbel_of_bits(b_bits):
    """Noise of 32 random bits."""
    b_w = b_bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    b_w = tl.where(b_w > LARGEST_UNIFORM, LARGEST_UNIFORM, b_w)
    b_f, b_e = split_float(1.0 - b_w)
    # next to 1 the difference above has lost what w still knows
    b_exponential = -log_split(tl.where(b_e == 0.0, -b_w, b_f), b_e)
    b_f, b_e = split_float(b_exponential)
    return -log_split(b_f, b_e)
