"""The C++ projection by quantized weights: its bits are those of the oracle, on every path."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.artifact.block_formats import FORMATS
from specc.artifact.quantized_layout import QuantizedLayout, pack
from specc.artifact.rounding import quantize
from specc.kernels import native
from specc.kernels.reference.quantized import bits_of_rows, linear_q_reference
from tests.kernel_flags import kernel_flags
from tests.kernels.cpu.quantized_weights import random_weight, whole_columns
from tests.kernels.cpu.test_linear import (
    CANARY,
    DTYPES,
    ISAS,
    before_a_forbidden_page,
    in_poison,
    present,
)
from tests.native_library import load_wrapper
from tests.tiers import checkered, every, only

WRAPPER = """
#include "kernels.h"
#include "team.h"
extern "C" __attribute__((visibility("default"))) void run_linear_q(const specc::LinearQ* a,
                                                                    long count, int n) {
  specc::linear_q(a, count, n);
}
extern "C" __attribute__((visibility("default"))) const void* find_format(const char* name) {
  return specc::block_format(name);
}
// as a program's pass does
extern "C" __attribute__((visibility("default"))) void run_in_team(const specc::LinearQ* a,
                                                                   long count, int n) {
  specc::WeightOrder order;
  specc::with_team(n, order, [&] { specc::linear_q(a, count, n); });
}
"""
# of rows, and of the integers that they become
ROWS = [(torch.float32, 24), (torch.float32, 16), (torch.float32, 8), (torch.bfloat16, 16),
        (torch.bfloat16, 8)]  # fmt: skip
EVERY_ROW = {"argvalues": ROWS, "ids": lambda item: f"{str(item[0])[6:]}-{item[1]}"}
OWN_BITS, FEWER_BITS = (ROWS[0], ROWS[3]), (ROWS[1], ROWS[2], ROWS[4])
NAMES = (
    "int8", "int4-g32", "int4-g32-zeros", "int4-g64", "int4-g64-zeros", "int4-g128",
    "int4-g128-zeros", "int8-g32", "int8-g64", "int8-g128", "int8-zeros", "int8-g64-zeros",
    "mxfp4", "fp8", "fp8-g32", "fp8-g128", *FORMATS, "nvfp4",
)  # fmt: skip
LAYOUTS = [QuantizedLayout.named(name) for name in NAMES]
INTEGERS = [layout for layout in LAYOUTS if not layout.is_float and not layout.format]
OF_GGML = [layout for layout in LAYOUTS if layout.format]
EVERY = {"argvalues": LAYOUTS, "ids": lambda item: item.name}


class LinearQStruct(ctypes.Structure):
    """`specc::LinearQ` of kernels.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("w", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("has_zeros", ctypes.c_bool),
        ("is_float", ctypes.c_bool),
        ("row_bits", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("format", ctypes.c_void_p),
    )


# native is vpdpbusd where the machine has it; each of the others is a library more
@pytest.fixture(scope="module", params=only(("native",), ISAS))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    isa = present(request.param)
    kernels = ("linear_q.cpp", "linear_fp8.cpp")
    each = [kernel_flags(name, isa) for name in kernels]
    assert each[0] == each[1]
    openmp = native.openmp_flags()
    found = load_wrapper(
        tmp_path_factory.mktemp("linear_q"), WRAPPER, each[0], kernels, tuple(openmp)
    )
    found.find_format.restype, found.find_format.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    return found


def run(
    library: ctypes.CDLL,
    x: Tensor,
    stored: Tensor,
    bias: Tensor | None,
    n: int,
    layout: QuantizedLayout,
    *,
    row_bits: int = 0,
    threads: int = 1,
    in_team: bool = False,
    y_stride: int | None = None,
) -> Tensor:
    """Call the kernel; nothing around y may change."""
    arguments, around = product(library, x, stored, bias, n, layout, y_stride, row_bits)
    call = library.run_in_team if in_team else library.run_linear_q
    call(ctypes.byref(arguments), 1, threads)
    return result_of(around, n)


def product(
    library: ctypes.CDLL,
    x: Tensor,
    stored: Tensor,
    bias: Tensor | None,
    n: int,
    layout: QuantizedLayout,
    y_stride: int | None = None,
    row_bits: int = 0,
) -> tuple[LinearQStruct, Tensor]:
    """Arguments of one product, and its result, [rows, n], with canaries around it."""
    rows, k = x.shape
    y_stride = n if y_stride is None else y_stride
    around = torch.full((rows + 2, y_stride), CANARY, dtype=x.dtype)
    around[1:-1, :n] = torch.nan
    arguments = LinearQStruct(
        DTYPES.index(x.dtype),
        rows,
        n,
        k,
        x.data_ptr(),
        x.stride(0),
        stored.data_ptr(),
        layout.bits,
        layout.group,
        layout.has_zeros,
        layout.is_float,
        row_bits or bits_of_rows(x.dtype),
        None if bias is None else bias.data_ptr(),
        around[1:].data_ptr(),
        y_stride,
        library.find_format(layout.format.encode()),
    )
    return arguments, around


def result_of(around: Tensor, n: int) -> Tensor:
    """What lies among the canaries, all of which are left."""
    assert (around[[0, -1]] == CANARY).all()
    assert (around[:, n:] == CANARY).all()
    return around[1:-1, :n].clone()


def oracle(
    x: Tensor, stored: Tensor, bias: Tensor | None, n: int, layout: QuantizedLayout, row_bits=0
):
    return linear_q_reference(x, stored, bias, n, *numbers_of(layout, row_bits))


def numbers_of(layout: QuantizedLayout, row_bits: int = 0) -> tuple[int, int, bool, bool, int, str]:
    """What the operator is told of a layout, and of rows."""
    own = layout.bits, layout.group, layout.has_zeros, layout.is_float
    return (*own, row_bits, layout.format)


def same_bits(found: Tensor, want: Tensor) -> bool:
    kind = torch.int32 if found.dtype == torch.float32 else torch.int16
    return torch.equal(found.isnan(), want.isnan()) and torch.equal(
        found.nan_to_num(7).view(kind), want.nan_to_num(7).view(kind)
    )


def test_every_value_of_a_format(library) -> None:
    """All bits of e4m3 and all codes of e2m1, subnormal ones too, at every place of a unit."""
    for name, count in (("fp8", 256), ("mxfp4", 16)):
        layout = QuantizedLayout.named(name)
        levels = torch.arange(count)
        levels = levels[levels & 127 != 127] if count == 256 else levels
        levels = levels.to(torch.uint8)[:, None].expand(-1, 8).contiguous()
        stored = pack(levels, torch.full((len(levels), 1), 4.0), None, layout)
        found = run(library, torch.eye(8), stored, None, len(levels), layout)
        assert torch.equal(found, 4 * layout.values(levels).T)


def test_every_scale_of_nvfp4(library) -> None:
    """All bits of e4m3 without sign, subnormal ones too, times factors of their outputs."""
    layout = QuantizedLayout.named("nvfp4")
    codes = torch.arange(127).to(torch.uint8)[:, None].expand(-1, 3)
    scales, factors = codes.view(torch.float8_e4m3fn).float(), torch.randn(127, 1)
    # a level of 4 in each group, whose rows are 1 in that group alone
    levels = torch.full((127, 48), 6, dtype=torch.uint8)
    stored = pack(levels, torch.cat([factors, scales], 1), None, layout)
    x = torch.eye(3).repeat_interleave(16, 1) / 64
    found = run(library, x, stored, None, 127, layout)
    assert torch.equal(found, (factors * scales).T)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 40) | st.integers(0, 6),
    n=st.integers(1, 140),
    k=st.integers(1, 140) | st.sampled_from([255, 256, 512, 1040, 2100]),
    layout=st.sampled_from(LAYOUTS),
    kind=st.sampled_from(ROWS),
    has_bias=st.booleans(),
    x_padding=st.integers(0, 5),
    y_padding=st.integers(0, 5),
    threads=st.integers(1, 2),
    spread=st.sampled_from([0, 1, 30]),
    seed=st.integers(0, 2**31),
)
def test_bits_of_the_oracle(
    library, rows, n, k, layout, kind, has_bias, x_padding, y_padding, threads, spread, seed
):
    torch.manual_seed(seed)
    dtype, row_bits = kind
    k = whole_columns(k, layout)
    x = in_poison(rows, k, dtype=dtype, padding=x_padding)
    x *= torch.exp2(spread * torch.randn(rows, k)).to(dtype)  # some are below 2^-64
    stored = random_weight(n, k, layout)
    bias = torch.randn(n).to(dtype) if has_bias else None
    found = run(
        library, x, stored, bias, n, layout, row_bits=row_bits, threads=threads,
        y_stride=n + y_padding,
    )  # fmt: skip
    assert same_bits(found, oracle(x, stored, bias, n, layout, row_bits))


@pytest.mark.default(
    "native-float32-24-int8",
    "native-float32-24-int4-g32-zeros",
    "native-float32-24-int4-g128-zeros",
    "native-float32-24-mxfp4",
    "native-float32-24-nvfp4",
    "native-float32-24-fp8-g32",
    "native-float32-24-q4_0",
    "native-float32-24-q3_k",
    "native-bfloat16-16-int4-g32",
    "native-bfloat16-16-int8-g32",
    "native-bfloat16-16-q4_1",
    "native-bfloat16-16-q4_k",
    "native-float32-16-int8",
    "native-float32-16-int8-g32",
    "native-float32-16-q5_1",
    "native-float32-8-int8",
    "native-float32-8-int4-g32-zeros",
    "native-float32-8-mxfp4",
    "native-float32-16-nvfp4",
    "native-bfloat16-8-nvfp4",
    "native-float32-8-q6_k",
    "native-bfloat16-8-int8-g32",
    "native-bfloat16-8-q5_1",
)
@pytest.mark.parametrize(
    ("kind", "layout"),
    checkered(
        [pytest.param(kind, id=EVERY_ROW["ids"](kind)) for kind in OWN_BITS],
        [pytest.param(layout, id=layout.name) for layout in LAYOUTS],
    )
    + [(kind, LAYOUTS[i]) for kind in FEWER_BITS for i in (0, 2, 7, 10, 12, 19, 23, 25, 28)],
    ids=lambda item: item.name if isinstance(item, QuantizedLayout) else EVERY_ROW["ids"](item),
)
def test_bits_of_a_row_depend_on_no_other_row_and_no_thread(library, kind, layout):
    k, n = whole_columns(773, layout), 139
    dtype, row_bits = kind
    x, bias = torch.randn(70, k).to(dtype), torch.randn(n).to(dtype)
    stored = random_weight(n, k, layout)
    want = run(library, x, stored, bias, n, layout, row_bits=row_bits)
    assert same_bits(want, oracle(x, stored, bias, n, layout, row_bits))
    more = {"row_bits": row_bits}
    for rows in (*range(1, 10), 12, 16, 17, 31, 32, 33):
        for threads in (1, 2):
            first = 70 - rows
            got = run(library, x[first:], stored, bias, n, layout, threads=threads, **more)
            assert torch.equal(got, want[first:]), f"{rows} rows, {threads} threads"
        got = run(library, x[first:], stored, bias, n, layout, threads=3, in_team=True, **more)
        assert torch.equal(got, want[first:]), f"{rows} rows, a team"


@pytest.mark.parametrize(
    "layout", [LAYOUTS[i] for i in (0, 2, 12, 14, 23, 25)], ids=lambda i: i.name
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_a_mixture_have_the_bits_of_each(library, dtype, layout):
    """Experts of 0 to 40 rows in one call: whichever thread has which of their blocks."""
    k, n, counts = whole_columns(200, layout), 139, (1, 0, 40, 3, 1)
    rows = [torch.randn(count, k).to(dtype) for count in counts]
    stored = [random_weight(n, k, layout) for _ in counts]
    want = [oracle(x, own, None, n, layout) for x, own in zip(rows, stored, strict=True)]
    for threads in (1, 2, 3, 7):
        pairs = zip(rows, stored, strict=True)
        made = [product(library, x, own, None, n, layout) for x, own in pairs]
        every = (LinearQStruct * len(made))(*(arguments for arguments, _ in made))
        library.run_linear_q(every, len(made), threads)
        for (_, around), own in zip(made, want, strict=True):
            assert same_bits(result_of(around, n), own)


@pytest.mark.default(
    "native-1-float32-24-int8",
    "native-1-float32-24-int4-g64",
    "native-1-float32-24-int8-g128",
    "native-1-float32-16-int4-g64",
    "native-1-float32-8-int8",
    "native-1-float32-8-int4-g128-zeros",
    "native-1-bfloat16-16-int8",
    "native-1-bfloat16-16-int8-g128",
    "native-1-bfloat16-8-int4-g64",
)
@pytest.mark.parametrize("layout", every(3, INTEGERS), ids=lambda item: item.name)
@pytest.mark.parametrize("kind", **EVERY_ROW)
@pytest.mark.parametrize("sign", [1, pytest.param(-1, marks=pytest.mark.slow)])
def test_sums_at_the_ends_of_their_range(library, sign, kind, layout):
    """Every integer is the largest there is: 8192 columns in one sum would not fit 32 bits."""
    k, n = 8192, 33
    dtype, row_bits = kind
    most = {8: 127, 16: 32639, 24: 8355711}[row_bits]
    x = torch.full((3, k), sign * most).to(dtype)
    if dtype == torch.bfloat16:
        x = torch.full((3, k), sign * 32512.0).to(dtype)  # the largest of 8 bits
    for level in (0, (1 << layout.bits) - 1):
        levels, groups = torch.full((n, k), level, dtype=torch.uint8), layout.num_groups(k)
        zero = (1 << layout.bits) - 1 - level
        zeros = torch.full((n, groups), zero) if layout.has_zeros else None
        stored = pack(levels, torch.ones(n, groups), zeros, layout)
        found = run(library, x, stored, None, n, layout, row_bits=row_bits)
        assert same_bits(found, oracle(x, stored, None, n, layout, row_bits))
        middle = layout.middle if zeros is None else zero
        want = (level - middle) * x[0].double().sum()
        assert abs(found[0, 0].double() - want) <= abs(want) * 2.0 ** (
            -8 if dtype == torch.bfloat16 else -16
        )


@pytest.mark.default(
    "native-float32-24-q4_0",
    "native-float32-24-q5_0",
    "native-float32-24-q8_0",
    "native-float32-24-q3_k",
    "native-float32-24-q4_k",
    "native-float32-24-iq4_nl",
    "native-bfloat16-16-q4_0",
    "native-bfloat16-16-q5_0",
    "native-bfloat16-16-q2_k",
    "native-bfloat16-16-q4_k",
    "native-bfloat16-16-q6_k",
)
@pytest.mark.parametrize("layout", OF_GGML, ids=lambda item: item.name)
@pytest.mark.parametrize("kind", [ROWS[0], ROWS[3]], ids=EVERY_ROW["ids"])
def test_sums_of_blocks_at_the_ends_of_their_range(library, kind, layout):
    """Rows of the largest integers, levels and scales at both ends."""
    (dtype, row_bits), k, n, own = kind, 2048, 33, layout.blocks
    x = torch.full((2, k), 8355711.0 if row_bits == 24 else 32512.0).to(dtype)
    x[1] *= -1
    headers = torch.randint(0, 256, (n, k // own.columns, own.header_bytes)).to(torch.uint8)
    headers[1::3], headers[2::3] = 0, 255
    headers[..., :4] = torch.tensor([1.5, 0.75]).half().view(torch.uint8)[: own.header_bytes]
    for level in (0, (1 << own.bits) - 1):
        stored = pack(torch.full((n, k), level, dtype=torch.uint8), headers, None, layout)
        found = run(library, x, stored, None, n, layout, row_bits=row_bits)
        assert same_bits(found, oracle(x, stored, None, n, layout, row_bits))


@pytest.mark.parametrize("layout", OF_GGML, ids=lambda item: item.name)
def test_every_scale_in_fp16(library, layout):
    """Subnormal ones, too; what is not finite is in no file that is compiled."""
    own = layout.blocks
    halves = torch.arange(1 << 16, dtype=torch.int32).short().view(torch.float16)
    halves = halves[halves.isfinite()][:: 1 if own.name == "q4_1" else 37].contiguous()
    n = len(halves)
    headers = torch.full((n, 1, own.header_bytes), 33, dtype=torch.uint8)
    headers[:, 0, :2] = halves.view(n, 1).view(torch.uint8)
    if own.has_minimum:
        headers[:, 0, 2:4] = halves.flip(0).clone().view(n, 1).view(torch.uint8)
    levels = torch.full((n, own.columns), (1 << own.bits) - 1, dtype=torch.uint8)
    stored, x = pack(levels, headers, None, layout), torch.zeros(1, own.columns)
    x[0, 0] = 1
    found = run(library, x, stored, None, n, layout)
    assert same_bits(found, oracle(x, stored, None, n, layout))


@pytest.mark.parametrize("kind", **EVERY_ROW)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_row(library, poison, kind):
    layout = QuantizedLayout(4, 32)
    dtype, row_bits = kind
    x, stored = torch.rand(5, 133).to(dtype), quantize(torch.rand(9, 133), layout)
    x[2, 131] = poison
    y = run(library, x, stored, None, 9, layout, row_bits=row_bits)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("least", [2.0**-100, 2.0**-140])
@pytest.mark.parametrize("row_bits", [8, 16, 24])
def test_what_is_below_any_step_is_zero(library, row_bits, least):
    """Down to the smallest numbers, whose inverse is beyond float32."""
    layout = QuantizedLayout(4, 32)
    x, stored = torch.full((3, 64), least), quantize(torch.rand(9, 64) + 1, layout)
    x[1, 32:] = 1
    y = run(library, x, stored, None, 9, layout, row_bits=row_bits)
    assert same_bits(y, oracle(x, stored, None, 9, layout, row_bits))
    assert (y[[0, 2]] == 0).all()
    assert (y[1] > 10).all()


@pytest.mark.default(
    "native-k3-int8",
    "native-k3-int4-g128",
    "native-k3-q5_0",
    "native-k200-int8",
    "native-k200-int4-g128",
    "native-k200-q5_0",
)
@pytest.mark.parametrize(
    "layout", [LAYOUTS[i] for i in (0, 2, 5, 12, 14, 18, 23, 25)], ids=lambda i: i.name
)
@pytest.mark.parametrize("k", [3, pytest.param(64, marks=pytest.mark.slow), 200], ids="k{}".format)
def test_reads_nothing_beyond_x_and_weight(library, k, layout):
    k = whole_columns(k, layout)
    packed = random_weight(39, k, layout)
    x = before_a_forbidden_page(5, k, dtype=torch.float32)
    stored = before_a_forbidden_page(*packed.shape, dtype=torch.uint8).copy_(packed)
    want = oracle(x, stored, None, 39, layout)
    child = os.fork()
    if child == 0:
        os._exit(0 if same_bits(run(library, x, stored, None, 39, layout), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_are_told_how_many_bits_rows_have(dtype):
    native.load()
    x, layout = torch.randn(6, 100).to(dtype), LAYOUTS[2]
    arguments = (70, *numbers_of(layout)[:4])
    stored = random_weight(70, 100, layout)
    ends, both = torch.tensor([2, 6], dtype=torch.int32), torch.cat((stored, stored))
    made = []
    for row_bits in (bits for kind, bits in ROWS if kind == dtype):
        own, oracles = torch.ops.specc_cpu, torch.ops.specc
        made.append(own.linear_q(x, stored, None, *arguments, row_bits))
        assert same_bits(made[-1], oracles.linear_q(x, stored, None, *arguments, row_bits))
        assert same_bits(made[-1], own.grouped_mm_q(x, both, ends, *arguments, row_bits))
        assert same_bits(made[-1], oracles.grouped_mm_q(x, both, ends, *arguments, row_bits))
    assert same_bits(made[0], torch.ops.specc_cpu.linear_q(x, stored, None, *arguments))
    assert all(not torch.equal(made[0], other) for other in made[1:])
    for wrong in (4, -8, 32) if dtype == torch.float32 else (24,):
        with pytest.raises(RuntimeError, match="rows have 8 or 16 bits"):
            torch.ops.specc_cpu.linear_q(x, stored, None, *arguments, wrong)


@pytest.mark.parametrize("layout", **EVERY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operator(dtype, layout):
    native.load()
    k = whole_columns(48, layout)
    x = in_poison(7, k, dtype=dtype, padding=16)
    stored, bias = random_weight(100, k, layout), torch.randn(100).to(dtype)
    arguments = (100, *numbers_of(layout))
    for own in (bias, None):
        found = torch.ops.specc_cpu.linear_q(x, stored, own, *arguments)
        assert same_bits(found, torch.ops.specc.linear_q(x, stored, own, *arguments))
    assert torch.ops.specc_cpu.linear_q(x[:0], stored, None, *arguments).shape == (0, 100)
    for wrong in (stored.int(), stored[:-1], stored[:, :-1], stored[:, ::2], stored[0]):
        with pytest.raises(RuntimeError, match=r"blocks|quantized weight"):
            torch.ops.specc_cpu.linear_q(x, wrong, None, *arguments)
    for wrong in (
        (96, *arguments[1:]),
        (*arguments[:-1], "q9_9"),
        (*arguments[:-1], "q4_k" if layout.format != "q4_k" else "q6_k"),
        (100, 8, 16, False, False),
        (100, 4, 48, False, False),
        (100, 5, 32, True, False),
        (100, 8, 0, True, True),
        (100, 4, 64, False, True),
    ):
        with pytest.raises(RuntimeError, match=r"blocks|no kernel"):
            torch.ops.specc_cpu.linear_q(x, stored, None, *wrong)
