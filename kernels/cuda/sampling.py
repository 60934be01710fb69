"""`specc::sample` in two launches: argmax of logits and noise over parts of a row, then over parts.

The noise is that of `gumbel_reference` to the last bit: 32-bit integers, then additions and
multiplications that no compiler may fuse (`enable_fp_fusion=False` at every launch).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped, with_any_vocab
from specc.kernels.cuda.tree_expand import DTYPES, NO_KEY, check_logits, order_key, token_of
from specc.kernels.reference import sampling as facts


class Unfused(Shipped):
    """Compiled as it is launched: no multiplication is fused with an addition."""

    @property
    def options(self) -> dict[str, int]:
        return {**super().options, "enable_fp_fusion": False}


# programs beyond this many gain nothing: parts of rows grow instead
MAX_PROGRAMS = 2048
LANES = tl.constexpr(facts.LANES)
TOKEN_NOISE = tl.constexpr(facts.TOKEN_NOISE)
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


@triton.jit
def token_bits(seed, offset, o_counter):
    """Random bits of four tokens a counter.

    Token t takes word t / LANES mod 4 of counter t / (4 LANES) · LANES + t mod LANES.
    """
    high = (offset >> 32).to(tl.uint32)
    return tl.philox(seed, o_counter.to(tl.uint32), TOKEN_NOISE, offset.to(tl.uint32), high)


@triton.jit(do_not_specialize=["temperature_stride", "seed_stride", "offset_stride", "num_parts"])
def sample_parts_kernel(
    logits,
    temperature,
    seed,
    offset,
    best,
    row_stride,
    temperature_stride,
    seed_stride,
    offset_stride,
    vocab,
    num_parts,
    NUM_BLOCKS: tl.constexpr,
    BQ: tl.constexpr,
):
    i_r = (tl.program_id(0) // num_parts).to(tl.int64)
    i_p = tl.program_id(0) % num_parts
    heat = tl.load(temperature + i_r * temperature_stride)
    i_seed = tl.load(seed + i_r * seed_stride)
    i_offset = tl.load(offset + i_r * offset_stride)
    is_sampled = heat >= MIN_TEMPERATURE
    factor = tl.div_rn(1.0, tl.where(is_sampled, heat, 1.0))
    p_row = logits + i_r * row_stride
    b_best = tl.full([BQ], NO_KEY, tl.int64)
    for i in range(NUM_BLOCKS):
        o_q = (i_p * NUM_BLOCKS + i) * BQ + tl.arange(0, BQ)
        # first of the four tokens of a counter
        o_t = o_q // LANES * (4 * LANES) + o_q % LANES
        b_first = tl.load(p_row + o_t, mask=o_t < vocab, other=0.0).to(tl.float32)
        o_u = o_t + LANES
        b_second = tl.load(p_row + o_u, mask=o_u < vocab, other=0.0).to(tl.float32)
        o_v = o_t + 2 * LANES
        b_third = tl.load(p_row + o_v, mask=o_v < vocab, other=0.0).to(tl.float32)
        o_w = o_t + 3 * LANES
        b_fourth = tl.load(p_row + o_w, mask=o_w < vocab, other=0.0).to(tl.float32)
        if is_sampled:
            b_0, b_1, b_2, b_3 = token_bits(i_seed, i_offset, o_q)
            b_first = b_first * factor + gumbel_of_bits(b_0)
            b_second = b_second * factor + gumbel_of_bits(b_1)
            b_third = b_third * factor + gumbel_of_bits(b_2)
            b_fourth = b_fourth * factor + gumbel_of_bits(b_3)
        b_first = tl.where(o_t < vocab, order_key(b_first, o_t), NO_KEY)
        b_second = tl.where(o_u < vocab, order_key(b_second, o_u), NO_KEY)
        b_third = tl.where(o_v < vocab, order_key(b_third, o_v), NO_KEY)
        b_fourth = tl.where(o_w < vocab, order_key(b_fourth, o_w), NO_KEY)
        b_pair = tl.maximum(tl.maximum(b_first, b_second), tl.maximum(b_third, b_fourth))
        b_best = tl.maximum(b_best, b_pair)
    tl.store(best + i_r * num_parts + i_p, tl.max(b_best, 0))


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def sample_merge_kernel(best, out, num_parts, num_rows, BR: tl.constexpr, BS: tl.constexpr):
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_s = tl.arange(0, BS)
    m_r = o_r < num_rows
    m = m_r[:, None] & (o_s < num_parts)[None, :]
    p_best = best + o_r.to(tl.int64)[:, None] * num_parts + o_s
    b_key = tl.max(tl.load(p_best, mask=m, other=NO_KEY), 1)  # [BR]
    tl.store(out + o_r, token_of(b_key), mask=m_r)


def config(num_rows: int, vocab: int) -> dict[str, int]:
    """Counters of a block, blocks of a part, and rows of a program that merges parts."""
    block = 128 if vocab <= 4096 else 512
    total = triton.cdiv(vocab, 4 * block)
    num_blocks = 1
    while num_blocks < total and num_rows * triton.cdiv(total, num_blocks) > MAX_PROGRAMS:
        num_blocks *= 2
    num_parts = triton.cdiv(total, num_blocks)
    block_s = triton.next_power_of_2(num_parts)
    return {
        "BQ": block,
        "NUM_BLOCKS": num_blocks,
        "num_parts": num_parts,
        "BS": block_s,
        "BR": max(1, 1024 // block_s),
        "num_warps": 4,
    }


def sample(logits: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    check_logits(logits)
    num_rows, vocab = logits.shape
    rows = {"temperature": temperature, "seed": seed, "offset": offset}
    for name, tensor in rows.items():
        dtype = torch.float32 if name == "temperature" else torch.int64
        if tensor.shape != (num_rows,) or tensor.dtype != dtype:
            raise ValueError(
                f"sample: found {name} {list(tensor.shape)} of {tensor.dtype};"
                f" needed [{num_rows}] of {dtype}"
            )
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    sizes = config(num_rows, vocab)
    num_parts = sizes["num_parts"]
    best = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    sample_parts_kernel[(num_rows * num_parts,)](
        logits,
        temperature,
        seed,
        offset,
        best,
        logits.stride(0),
        temperature.stride(0),
        seed.stride(0),
        offset.stride(0),
        vocab,
        num_parts,
        NUM_BLOCKS=sizes["NUM_BLOCKS"],
        BQ=sizes["BQ"],
        num_warps=sizes["num_warps"],
        enable_fp_fusion=False,
    )
    sample_merge_kernel[(triton.cdiv(num_rows, sizes["BR"]),)](
        best, out, num_parts, num_rows, BR=sizes["BR"], BS=sizes["BS"], num_warps=4
    )
    return out


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability."""
    for dtype in DTYPES:
        for num_blocks in (1, 2, 4, 8, 16, 32, 64, 128):
            parts = Unfused(
                name=f"parts-{TYPE_NAMES[dtype]}-blocks{num_blocks}",
                kernel=sample_parts_kernel,
                signature={
                    "logits": f"*{TYPE_NAMES[dtype]}",
                    "temperature": "*fp32",
                    **dict.fromkeys(("seed", "offset", "best"), "*i64"),
                    **dict.fromkeys(("row_stride", "vocab", "num_parts"), "i32"),
                    **dict.fromkeys(("temperature_stride", "seed_stride", "offset_stride"), "i32"),
                },
                constexprs={"NUM_BLOCKS": num_blocks, "BQ": 512},
                num_warps=4,
                num_stages=3,
                divisible=(
                    "logits", "temperature", "seed", "offset", "best", "row_stride", "vocab",
                ),
            )  # fmt: skip
            yield from with_any_vocab(parts)
    for block_s in (1, 2, 4, 8, 16, 32, 64, 128):
        yield Shipped(
            name=f"merge-parts{block_s}",
            kernel=sample_merge_kernel,
            signature={
                **dict.fromkeys(("best", "out"), "*i64"),
                **dict.fromkeys(("num_parts", "num_rows"), "i32"),
            },
            constexprs={"BR": max(1, 1024 // block_s), "BS": block_s},
            num_warps=4,
            num_stages=3,
            divisible=("best", "out"),
        )
