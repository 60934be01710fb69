"""Sampling options as kernels read them: rows of `sampling_values` and `sampling_words`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.sampling import MIN_TEMPERATURE
from specc.kernels.cuda.strided_rows import check_tensors
from specc.sampling.rows import Rule, Value, Word

COUPLED = tl.constexpr(int(Rule.COUPLED))
DELTA = tl.constexpr(int(Rule.DELTA))
MSS = tl.constexpr(int(Rule.MSS))
SWOR = tl.constexpr(int(Rule.SWOR))
TEMPERATURE = tl.constexpr(int(Value.TEMPERATURE))
TOP_P = tl.constexpr(int(Value.TOP_P))
MIN_P = tl.constexpr(int(Value.MIN_P))
REPETITION = tl.constexpr(int(Value.REPETITION))
PRESENCE = tl.constexpr(int(Value.PRESENCE))
FREQUENCY = tl.constexpr(int(Value.FREQUENCY))
SEED = tl.constexpr(int(Word.SEED))
TOP_K = tl.constexpr(int(Word.TOP_K))
RULE = tl.constexpr(int(Word.RULE))
NUM_PROMPT = tl.constexpr(int(Word.NUM_PROMPT))
NUM_VALUES, NUM_WORDS = len(Value), len(Word)


@triton.jit
def is_sampled(p_values):
    return tl.load(p_values + TEMPERATURE) >= MIN_TEMPERATURE


@triton.jit
def factor_of(p_values):
    """What logits are multiplied with; 1 for greedy rows."""
    heat = tl.load(p_values + TEMPERATURE)
    return tl.div_rn(1.0, tl.where(heat >= MIN_TEMPERATURE, heat, 1.0))


@triton.jit
def has_filter(p_values, p_words, vocab):
    top_k = tl.load(p_words + TOP_K)
    is_cut = (tl.load(p_values + MIN_P) > 0.0) | (tl.load(p_values + TOP_P) < 1.0)
    return is_cut | ((top_k > 0) & (top_k < vocab))


def check_options(
    operator: str, batch: int, values: Tensor, words: Tensor, cache_len: Tensor
) -> None:
    """Refuse sampling options that are not rows [B, …] of one piece."""
    check_tensors(operator, torch.float32, (batch, NUM_VALUES), values=values)
    check_tensors(operator, torch.int64, (batch, NUM_WORDS), words=words)
    check_tensors(operator, torch.int32, (batch,), cache_len=cache_len)
