"""The C++ noise against the oracle, bit for bit, as compiled for this and for older machines."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.kernels.reference.sampling import (
    DRAW_NOISE,
    TOKEN_NOISE,
    gumbel_reference,
    purpose_of_column,
    uniform_reference,
)
from tests.kernel_flags import SOURCE_DIR, kernel_flags, rounded_units, unit_of, units
from tests.kernels.cpu.test_linear import ISAS, present
from tests.native_library import load_wrapper
from tests.tiers import every, only

# everything that is in no header is in reach, too
WRAPPER = """
#include "noise.cpp"
#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace specc;
EXPORT void noises(int64_t seed, int64_t offset, uint32_t purpose, int64_t vocab, float* out) {
  add_noise({DType::kFloat32, out, vocab}, {seed, offset, purpose}, out);
}
EXPORT float uniform_of(int64_t seed, int64_t offset, int64_t column) {
  return uniform({seed, offset, acceptance(column)});
}
// Words first, first + step … of which some bound of their noise does not hold.
EXPORT int64_t count_unbounded(uint64_t first, uint64_t last, uint64_t step) {
  int64_t count = 0;
  constexpr int kMany = 8;
  for (uint64_t word = first; word < last; word += kMany * kWidth * step) {
    UInt bits[kMany];
    Many<kMany> w;
    for (int j = 0; j < kMany; ++j) {
      for (uint64_t i = 0; i < kWidth; ++i)
        bits[j][i] = static_cast<uint32_t>(word + (j * kWidth + i) * step);
      w.at[j] = fraction_of(bits[j]);
    }
    const Many<kMany> noise = gumbel(w);
    for (int j = 0; j < kMany; ++j)
      count += __builtin_popcount(lanes_of(~((bound(bits[j]) >= noise.at[j]) &
                                             (noise.at[j] <= vec::splat(kMostNoise)) &
                                             (noise.at[j] >= vec::splat(kLeastNoise)))));
  }
  return count;
}
"""
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF, 2**32, 2**31)
OFFSETS = (0, 1, 77, 2**31 - 1, 2**31, 2**32 + 5, -3)


# what is compiled for this machine; each of the others is a library more
@pytest.fixture(scope="module", params=only(("native",), ISAS))
def library(request, tmp_path_factory) -> ctypes.CDLL:
    isa = present(request.param)
    flags = kernel_flags("noise.cpp", isa)
    loaded = load_wrapper(tmp_path_factory.mktemp("noise"), WRAPPER, flags)
    loaded.uniform_of.restype = ctypes.c_float
    loaded.count_unbounded.restype = ctypes.c_int64
    return loaded


def noises(library: ctypes.CDLL, seed: int, offset: int, purpose: int, vocab: int) -> Tensor:
    """Noise of the first tokens; nothing around may change."""
    out = torch.full((vocab + 2,), 7.0)
    out[1:-1] = 0.0
    library.noises(
        ctypes.c_int64(seed),
        ctypes.c_int64(offset),
        ctypes.c_uint32(purpose),
        ctypes.c_int64(vocab),
        ctypes.c_void_p(out[1:].data_ptr()),
    )
    assert out[0] == out[-1] == 7.0
    return out[1:-1]


def check(library: ctypes.CDLL, seed: int, offset: int, purpose: int, vocab: int) -> None:
    want = gumbel_reference(
        torch.tensor(seed), torch.tensor(offset), torch.arange(vocab), torch.tensor(purpose)
    )
    # 0 + noise: no -0
    got = noises(library, seed, offset, purpose, vocab)
    assert torch.equal(got.view(torch.int32), (0.0 + want).view(torch.int32))


@pytest.mark.parametrize("seed", every(2, SEEDS))
def test_noise_is_the_oracles(library, seed):
    for offset in OFFSETS:
        for purpose in (TOKEN_NOISE, DRAW_NOISE, DRAW_NOISE + 8 * 63, DRAW_NOISE + 8 * 10**6):
            check(library, seed, offset, purpose, 1500)


def test_noise_of_a_large_vocabulary(library):
    check(library, 5, 1000, TOKEN_NOISE, 152_064)
    check(library, 6, 1001, int(purpose_of_column(DRAW_NOISE, torch.tensor(9))), 128_256)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(-(2**40), 2**40),
    purpose=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 1600),
)
def test_noise_of_any_counter(library, seed, offset, purpose, vocab):
    check(library, seed, offset, purpose, vocab)


def test_uniforms(library):
    for seed in SEEDS:
        for offset in OFFSETS:
            columns = torch.tensor([0, 1, 2, 63, 64, 1000, 2**20])
            want = uniform_reference(torch.tensor(seed), torch.tensor(offset), columns)
            got = [
                library.uniform_of(
                    ctypes.c_int64(seed), ctypes.c_int64(offset), ctypes.c_int64(column)
                )
                for column in columns.tolist()
            ]
            assert got == want.tolist()


def test_bounds_hold_for_every_word(library):
    """What lets a token be passed over. From 2^28 on, 16 neighbors or more round to one float."""
    for first, last, step in ((0, 2**28, 1), (2**28, 2**32, 16), (2**32 - 2**12, 2**32, 1)):
        assert library.count_unbounded(*map(ctypes.c_uint64, (first, last, step))) == 0


def test_what_rounds_like_the_oracle_is_compiled_that_way():
    """Whatever includes `exact_math.h`, also where several sources are compiled as one."""
    includers = {
        path.name
        for path in SOURCE_DIR.glob("*.cpp")
        if '#include "exact_math.h"' in path.read_text(encoding="utf-8")
    }
    assert includers
    assert {unit_of(name) for name in includers} <= rounded_units() <= set(units())
    for name in includers:
        assert "-ffp-contract=off" in kernel_flags(name)
    assert "-ffp-contract=off" not in kernel_flags("linear.cpp")
