"""The C++ linear against float64, as compiled for this machine and for older processors."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.artifact.weight_layout import to_blocks
from specc.kernels import native
from specc.system.machine import isa_flags
from tests.kernel_flags import kernel_flags
from tests.native_library import load_wrapper
from tests.tiers import only

WRAPPER = """
#include "kernels.h"
#include "team.h"
using specc::Linear;
extern "C" {
__attribute__((visibility("default"))) void run_linear(const Linear* a, int count, int threads) {
  specc::linear(a, count, threads);
}
// as a program's pass does
__attribute__((visibility("default"))) void run_in_team(const Linear* a, int count, int threads) {
  specc::WeightOrder order;
  specc::with_team(threads, order, [&] { specc::linear(a, count, threads); });
}
}
"""
# -march and the instructions that running it takes
ISAS = {
    "native": set(),
    "x86-64-v4": {"avx512f", "avx512bw", "avx512vl"},
    "x86-64-v3": {"avx2", "fma"},
    "x86-64": {"sse2"},
}
DTYPES = (torch.float32, torch.bfloat16)
# relative to the sum of the products' magnitudes, and to the result
TOLERANCES = {torch.float32: (64 * 2**-24, 0.0), torch.bfloat16: (64 * 2**-24, 2**-8)}
CANARY = 12345.0


class LinearStruct(ctypes.Structure):
    """`specc::Linear` of kernels.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("w", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
    )


def present(isa: str) -> str:
    """An instruction set of `ISAS` that this machine can run; without it the test is skipped."""
    if isa != "native" and platform.machine() != "x86_64":
        pytest.skip("an x86-64 instruction set")
    if missing := ISAS[isa] - set(isa_flags()):
        pytest.skip(f"no {', '.join(sorted(missing))}")
    return isa


# what is compiled for this machine; each of the others is a library more
@pytest.fixture(scope="module", params=only(("native",), ISAS))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    isa = present(request.param)
    flags = kernel_flags("linear.cpp", isa)
    openmp = native.openmp_flags()
    return load_wrapper(
        tmp_path_factory.mktemp("linear"), WRAPPER, flags, ("linear.cpp",), tuple(openmp)
    )


@pytest.fixture(scope="module")
def operators() -> None:
    native.load()


def run(
    library: ctypes.CDLL,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    threads: int = 1,
    y_stride: int | None = None,
    in_team: bool = False,
) -> Tensor:
    """Call the kernel on a weight [N, K]; nothing around y may change."""
    return run_blocks(
        library, x, to_blocks(weight), bias, weight.shape[0], threads=threads, y_stride=y_stride,
        in_team=in_team,
    )  # fmt: skip


def run_blocks(
    library: ctypes.CDLL,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n: int,
    *,
    threads: int = 1,
    y_stride: int | None = None,
    in_team: bool = False,
) -> Tensor:
    rows, k = x.shape
    y_stride = n if y_stride is None else y_stride
    around = torch.full((rows + 2, y_stride), CANARY, dtype=x.dtype)
    around[1:-1, :n] = torch.nan
    arguments = LinearStruct(
        DTYPES.index(x.dtype),
        rows,
        n,
        k,
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        around[1:].data_ptr(),
        y_stride,
    )
    call = library.run_in_team if in_team else library.run_linear
    call(ctypes.byref(arguments), 1, threads)
    assert (around[[0, -1]] == CANARY).all()
    assert (around[:, n:] == CANARY).all()
    return around[1:-1, :n].clone()


def in_poison(*shape: int, dtype: torch.dtype, padding: int = 0) -> Tensor:
    """Random rows with `padding` NaNs between them, and NaNs before and after."""
    rows, columns = shape
    memory = torch.full((64 + rows * (columns + padding) + 64,), torch.nan, dtype=dtype)
    size, stride = (rows, columns), (columns + padding, 1)
    return memory.as_strided(size, stride, 64).copy_(torch.randn(shape))


def assert_close(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    x, weight = x.double(), weight.double()
    want, magnitude = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        want, magnitude = want + bias.double(), magnitude + bias.double().abs()
    of_sum, of_result = TOLERANCES[y.dtype]
    error = (y.double() - want).abs()
    excess = error - of_sum * magnitude - of_result * want.abs()
    assert not (~(excess <= 0)).any(), f"error {error.max().item()}, excess {excess.max().item()}"


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40) | st.integers(0, 6),
    n=st.integers(1, 140),
    k=st.integers(0, 70) | st.sampled_from([127, 128, 512, 520, 1024, 1040, 1100, 1537, 2100]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    x_padding=st.integers(0, 5),
    y_padding=st.integers(0, 5),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
def test_equals_float64(library, rows, n, k, dtype, has_bias, x_padding, y_padding, threads, seed):
    torch.manual_seed(seed)
    x = in_poison(rows, k, dtype=dtype, padding=x_padding)
    weight = in_poison(n, k, dtype=dtype)
    bias = torch.randn(n).to(dtype) if has_bias else None
    y = run(library, x, weight, bias, threads=threads, y_stride=n + y_padding)
    assert_close(y, x, weight, bias)


@pytest.mark.parametrize("threads", [1, 2], ids="threads{}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [33, 64, 101], ids="rows{}".format)
def test_prefill_chunks(library, rows, dtype, threads):
    x = in_poison(rows, 770, dtype=dtype, padding=3)
    weight = in_poison(131, 770, dtype=dtype)
    assert_close(run(library, x, weight, threads=threads), x, weight, None)


def before_a_forbidden_page(*shape: int, dtype: torch.dtype) -> Tensor:
    """Ones, as at the end of a mapped file: reading on ends the process."""
    pages, protect_none = 64 * mmap.PAGESIZE, 0
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert libc.mprotect(address + pages, mmap.PAGESIZE, protect_none) == 0
    floats = torch.frombuffer(memory, dtype=dtype, count=pages // dtype.itemsize)
    return floats[-shape[0] * shape[1] :].view(shape).fill_(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [3, 64, 200], ids="k{}".format)
def test_reads_nothing_beyond_x_and_weight(library, k, dtype):
    x = before_a_forbidden_page(5, k, dtype=dtype)
    packed = to_blocks(torch.ones(39, k, dtype=dtype))
    weight = before_a_forbidden_page(1, packed.numel(), dtype=dtype).copy_(packed.view(1, -1))
    child = os.fork()
    if child == 0:
        right = bool((run_blocks(library, x, weight, None, 39) == k).all())
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [128, 773, 2100], ids="k{}".format)
def test_bits_of_a_row_depend_on_no_other_row_and_no_thread(library, k, dtype):
    x, weight, bias = torch.randn(70, k), torch.randn(139, k), torch.randn(139)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    want = run(library, x, weight, bias)
    for rows in range(1, 34):
        for threads in (1, 2):
            first = 70 - rows
            got = run(library, x[first:], weight, bias, threads=threads)
            assert torch.equal(got, want[first:]), f"{rows} rows, {threads} threads"
        got = run(library, x[first:], weight, bias, threads=3, in_team=True)
        assert torch.equal(got, want[first:]), f"{rows} rows, a team"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [(1, 40, 3, 1), (70,), (2, 2, 2, 2, 2, 2, 2), ()], ids=str)
def test_products_have_the_bits_of_each_alone(library, counts, dtype):
    """Those of a mixture's experts: threads share the blocks of all weights."""
    k, n = 773, 139
    inputs = [in_poison(rows, k, dtype=dtype, padding=3) for rows in counts]
    blocks = [to_blocks(torch.randn(n, k).to(dtype)) for _ in counts]
    pairs = list(zip(inputs, blocks, strict=True))
    want = [run_blocks(library, x, weight, None, n) for x, weight in pairs]
    for threads in (1, 2, 3, 5, 40):
        for call in (library.run_linear, library.run_in_team):
            found = [torch.full((len(x) + 1, n), CANARY, dtype=dtype) for x in inputs]
            arguments = [
                LinearStruct(
                    DTYPES.index(dtype), len(x), n, k, x.data_ptr(), x.stride(0),
                    weight.data_ptr(), None, y.data_ptr(), n,
                )
                for (x, weight), y in zip(pairs, found, strict=True)
            ]  # fmt: skip
            call((LinearStruct * len(counts))(*arguments), len(counts), threads)
            for y, alone in zip(found, want, strict=True):
                assert torch.equal(y[:-1], alone), f"{threads} threads"
                assert (y[-1] == CANARY).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_row(library, poison, dtype):
    x, weight = torch.rand(5, 133).to(dtype), torch.rand(9, 133).to(dtype)
    x[2, 131] = poison
    y = run(library, x, weight)
    assert (~y[2].isfinite()).all()
    assert y[2].isnan().any() == (poison != torch.inf)
    assert y[[0, 1, 3, 4]].isfinite().all()


def test_bfloat16_results_round_once_to_nearest_even(library):
    # 1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between 1 + 2^-7 and 1 + 2^-6
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    x = torch.tensor([[1, 2**-8], [1, 3 * 2**-8]], dtype=torch.bfloat16)
    want = torch.tensor([[1.0], [1 + 2**-6]]).expand(2, 2)
    assert torch.equal(run(library, x, weight).float(), want)
    # the bias joins before the only rounding
    bias = torch.full((2,), -1.0, dtype=torch.bfloat16)
    want = torch.tensor([[2**-8], [3 * 2**-8]]).expand(2, 2)
    assert torch.equal(run(library, x, weight, bias).float(), want)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operator(dtype):
    x = in_poison(7, 48, dtype=dtype, padding=16)
    weight = in_poison(100, 48, dtype=dtype)
    bias = torch.randn(100).to(dtype)
    project, blocks = torch.ops.specc_cpu.linear, to_blocks(weight)
    assert_close(project(x, blocks, bias, 100), x, weight, bias)
    assert_close(project(x, blocks, None, 100), x, weight, None)
    assert project(x[:0], blocks, None, 100).shape == (0, 100)
    for wrong in (weight, blocks.transpose(1, 2), blocks[:-1], blocks[:, :-1]):
        with pytest.raises(RuntimeError, match=r"blocks|contiguous"):
            project(x, wrong, None, 100)
    with pytest.raises(RuntimeError, match="blocks"):
        project(x, blocks, None, 96)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 6), (64, 7), (1, 1)], ids=str)
def test_embedding_of_blocks(shape, dtype):
    table = torch.randn(shape).to(dtype)
    look_up, blocks = torch.ops.specc_cpu.embedding_of_blocks, to_blocks(table)
    tokens = torch.cat([torch.randint(0, shape[0], (9,)), torch.tensor([0, shape[0] - 1])])
    assert torch.equal(look_up(blocks, tokens, *shape), table[tokens])
    assert look_up(blocks, tokens[:0], *shape).shape == (0, shape[1])
    for wrong in (-1, shape[0]):
        with pytest.raises(RuntimeError, match="outside of the embedding"):
            look_up(blocks, torch.tensor([0, wrong]), *shape)
    with pytest.raises(RuntimeError, match="blocks"):
        look_up(blocks, tokens, shape[0] + 32, shape[1])


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000])
def test_sum_floats_reads_every_float_once(count):
    data = torch.randint(-8, 8, (count + 1,)).float()[1:]
    assert native.sum_floats(data) == data.sum()
