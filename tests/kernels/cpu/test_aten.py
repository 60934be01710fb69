"""aten's operators in C++ against torch's own: any sizes, strides and dtypes, drawn by seeds.

Values, dtypes and layouts in memory are torch's. Values are compared bit for bit, but for sums of
floats and for what is made of exponentials.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels import native_calls
from specc.kernels.native_calls import CODES, call

pytestmark = pytest.mark.usefixtures("native_operators")

aten = torch.ops.aten
F32, BF16, I64, I32, BOOL = torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool
FLOATS, INTEGERS = (F32, BF16), (I64, I32)
ROUNDS = 25


class Draw:
    """Tensors and numbers of a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)

    def sizes(self, choices: Sequence[int] = (1, 1, 2, 3, 5, 17, 40), most: int = 4) -> list[int]:
        count = self.random.randrange(most + 1)
        return [self.random.choice(choices) for _ in range(count)]

    def values(self, sizes: Sequence[int], dtype: torch.dtype, positive: bool) -> Tensor:
        if dtype == BOOL:
            return torch.rand(tuple(sizes)) > 0.5
        if not dtype.is_floating_point:
            return torch.randint(1 if positive else -9, 10, tuple(sizes)).to(dtype)
        x = torch.randn(tuple(sizes)) * 3
        return (x.abs() + 0.1 if positive else x).to(dtype)

    def tensor(self, sizes: Sequence[int], *dtypes: torch.dtype, positive: bool = False) -> Tensor:
        """In one piece, permuted, a part of something larger, or every second column of it."""
        dtype, count = self.random.choice(dtypes), len(sizes)
        kind = self.random.randrange(4) if count else 0
        if kind == 1:
            order = self.random.sample(range(count), count)
            x = self.values([sizes[d] for d in order], dtype, positive)
            return x.permute([order.index(d) for d in range(count)])
        if kind == 2:
            larger = [size + self.random.randrange(3) for size in sizes]
            x = self.values(larger, dtype, positive)
            return x[tuple(slice(a - b, a) for a, b in zip(larger, sizes, strict=True))]
        if kind == 3:
            return self.values([*sizes[:-1], 2 * sizes[-1]], dtype, positive)[..., ::2]
        return self.values(sizes, dtype, positive)

    def broadcast(self, sizes: list[int]) -> list[int]:
        """Some of these sizes, others 1, some of the first left out."""
        some = [1 if self.random.random() < 0.25 else size for size in sizes]
        return some[self.random.randrange(len(some) + 1) :] if self.random.random() < 0.3 else some

    def dim(self, count: int) -> int:
        return self.random.randrange(-count, count)


def same(found: Any, wanted: Any, tolerance: float = 0, strides: bool = True) -> None:
    if isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other, tolerance, strides)
        return
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if strides and wanted.numel():
        kept = [d for d in range(wanted.dim()) if wanted.shape[d] > 1]
        assert [found.stride(d) for d in kept] == [wanted.stride(d) for d in kept]
    if wanted.dtype == BF16 and tolerance:
        tolerance = max(tolerance, 1e-2)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def parts(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


# name → dtypes, tolerance, whether operands are positive
UNARY: dict[str, tuple[tuple[torch.dtype, ...], float, bool]] = {
    "neg": ((*FLOATS, *INTEGERS), 0, False),
    "abs": ((*FLOATS, I64), 0, False),
    "square": ((*FLOATS, I64), 0, False),
    "relu": ((*FLOATS, I64), 0, False),
    "floor": ((*FLOATS, I64), 0, False),
    "bitwise_not": ((*INTEGERS, BOOL), 0, False),
    "logical_not": ((BOOL,), 0, False),
    "reciprocal": ((*FLOATS, I64), 0, True),
    "sqrt": (FLOATS, 1e-6, True),
    "rsqrt": (FLOATS, 1e-6, True),
    "tanh": (FLOATS, 1e-6, False),
    "sigmoid": (FLOATS, 1e-6, False),
    "silu": (FLOATS, 3e-6, False),
    "exp": (FLOATS, 1e-6, False),
    "expm1": (FLOATS, 1e-6, False),
    "log": (FLOATS, 1e-6, True),
    "log1p": ((F32,), 1e-6, True),
    "sin": (FLOATS, 1e-6, False),
    "cos": (FLOATS, 1e-6, False),
}


def unary(draw: Draw) -> None:
    for name, (dtypes, tolerance, positive) in UNARY.items():
        x = draw.tensor(draw.sizes(), *dtypes, positive=positive)
        same(call(f"aten::{name}", x), getattr(aten, name)(x), tolerance)
    x = draw.tensor(draw.sizes(), *FLOATS)
    for approximate in ("none", "tanh"):
        same(call("aten::gelu", x, approximate), aten.gelu(x, approximate=approximate), 3e-6)
    same(call("aten::softplus", x, 1, 20), aten.softplus(x), 3e-6)
    x = x.abs() + 0.5
    for exponent in (1, 2, 3.0, -1, 0.5, -0.5, 1.7):
        tolerance = 0 if exponent in (1, 2, 3.0, -1) else 3e-6
        same(call("aten::pow.Tensor_Scalar", x, exponent), aten.pow(x, exponent), tolerance)
    same(call("aten::pow.Scalar", 2.5, x), aten.pow(2.5, x), 1e-5, strides=False)


# name → dtypes, whether operands are positive
BINARY: dict[str, tuple[tuple[torch.dtype, ...], bool]] = {
    "add": ((*FLOATS, *INTEGERS, BOOL), False),
    "sub": ((*FLOATS, *INTEGERS), False),
    "mul": ((*FLOATS, *INTEGERS, BOOL), False),
    "div": ((*FLOATS, I64), True),
    "floor_divide": ((F32, *INTEGERS), True),
    "remainder": ((F32, *INTEGERS), True),
    "maximum": ((*FLOATS, I64), False),
    "minimum": ((*FLOATS, I64), False),
    "eq": ((*FLOATS, *INTEGERS, BOOL), False),
    "ne": ((I64, BOOL), False),
    "lt": ((*FLOATS, I64), False),
    "le": ((F32, I64), False),
    "gt": ((*FLOATS, I64), False),
    "ge": ((*FLOATS, I64), False),
    "bitwise_and": ((*INTEGERS, BOOL), False),
    "bitwise_or": ((*INTEGERS, BOOL), False),
    "logical_and": ((BOOL,), False),
}
ONE_OVERLOAD = ("maximum", "minimum", "floor_divide", "logical_and")


def binary(draw: Draw) -> None:
    for name, (dtypes, positive) in BINARY.items():
        sizes = draw.sizes()
        x = draw.tensor(draw.broadcast(sizes), *dtypes, positive=positive)
        y: Any = draw.tensor(draw.broadcast(sizes), *dtypes, positive=positive)
        takes_numbers = name not in (
            "maximum",
            "minimum",
            "bitwise_and",
            "bitwise_or",
            "logical_and",
        )
        if takes_numbers and draw.random.random() < 0.25:
            reals = (0.1, 0.3, 2.5, 1e-6, 1) if x.dtype in FLOATS else (2, 3, 7)
            y = draw.random.choice(reals)
        if name == "sub" and x.dtype == BOOL:
            continue
        kind = "" if name in ONE_OVERLOAD else ".Tensor" if isinstance(y, Tensor) else ".Scalar"
        more = (1,) if name in ("add", "sub") else ()
        same(call(f"aten::{name}{kind}", x, y, *more), getattr(aten, name)(x, y))
        if name == "sub":
            same(call(f"aten::rsub{kind}", x, y, 1), aten.rsub(x, y))
        wanted = getattr(aten, name)(x, y)
        if more and wanted.dtype not in (BF16, BOOL):
            alpha = draw.random.choice((2, -1, 3))
            wanted = getattr(aten, name)(x, y, alpha=alpha)
            same(call(f"aten::{name}{kind}", x, y, alpha), wanted, 3e-6)
        if name == "div" and wanted.dtype == F32:
            for mode in ("floor", "trunc"):
                wanted = aten.div(x, y, rounding_mode=mode)
                same(call(f"aten::div{kind}_mode", x, y, mode), wanted)


def choices(draw: Draw) -> None:
    sizes = draw.sizes()
    condition = draw.tensor(draw.broadcast(sizes), BOOL)
    dtypes = draw.random.choice(((F32, BF16), INTEGERS, (F32, I64), (BOOL,)))
    x, y = (draw.tensor(draw.broadcast(sizes), *dtypes) for _ in range(2))
    same(call("aten::where.self", condition, x, y), aten.where(condition, x, y))
    same(call("aten::where.ScalarOther", condition, x, -3), aten.where(condition, x, -3))
    same(call("aten::where.Scalar", condition, 1, 0), aten.where(condition, 1, 0))
    x = draw.tensor(sizes, *FLOATS, I64)
    fills = (-2, -float("inf")) if x.dtype in FLOATS else (-2,)
    for fill in fills:
        wanted = aten.masked_fill(x, condition, fill)
        same(call("aten::masked_fill.Scalar", x, condition, fill), wanted)
    for least, most in ((-1, None), (None, 2), (-1, 2)):
        same(call("aten::clamp", x, least, most), aten.clamp(x, least, most))
    bound = draw.tensor(draw.broadcast(sizes), x.dtype)
    same(call("aten::clamp.Tensor", x, None, bound), aten.clamp(x, None, bound))


def copies(draw: Draw) -> None:
    x = draw.tensor(draw.sizes(), *FLOATS, *INTEGERS, BOOL)
    same(call("aten::contiguous", x, None), x.contiguous())
    same(call("aten::clone", x, None), x.clone())
    same(call("aten::clone", x, 0), x.clone(memory_format=torch.contiguous_format))
    for dtype in (*FLOATS, *INTEGERS, BOOL):
        same(call("aten::to.dtype", x, CODES[dtype], False, False, None), x.to(dtype))
    for sizes in _other_sizes(x):
        same(call("aten::reshape", x, sizes), x.reshape(sizes))
    if not x.dim():
        return
    first = draw.random.randrange(x.dim())
    last = draw.random.randrange(first, x.dim())
    same(call("aten::flatten.using_ints", x, first, last), x.flatten(first, last))
    dim = draw.dim(x.dim())
    joined = []
    for _ in range(draw.random.randrange(1, 4)):
        sizes = [*x.shape]
        sizes[dim] = draw.random.randrange(4)
        joined.append(draw.tensor(sizes, x.dtype))
    same(call("aten::cat", joined, dim), torch.cat(joined, dim))
    same(call("aten::stack", [x, x, x], dim), torch.stack([x, x, x], dim))
    times = draw.random.randrange(4)
    wanted = x.repeat_interleave(times, dim)
    same(call("aten::repeat_interleave.self_int", x, times, dim, None), wanted)
    repeats = [draw.random.randrange(1, 3) for _ in range(x.dim() + draw.random.randrange(2))]
    same(call("aten::repeat", x, repeats), x.repeat(repeats))
    cut = (dim, draw.random.randrange(-3, 4), draw.random.choice((None, 2, -1, 2**63 - 1)), 2)
    source = draw.tensor([*aten.slice(x, *cut).shape], x.dtype)
    wanted = aten.slice_scatter(x, source, *cut)
    same(call("aten::slice_scatter", x, source, *cut), wanted, strides=False)


def _other_sizes(x: Tensor) -> list[list[int]]:
    count = x.numel()
    found = [[count], [-1], [1, count], [*x.shape, 1]]
    if x.dim() > 1:
        found += [[x.shape[0], -1], [-1, x.shape[-1]]]
    for factor in (2, 3, 5):
        if count % factor == 0:
            found += [[factor, count // factor], [factor, -1], [count // factor, 1, factor]]
    return found


def views(draw: Draw) -> None:
    x = draw.tensor(draw.sizes(), *FLOATS, I64)
    place = draw.dim(x.dim() + 1)
    same(call("aten::unsqueeze", x, place), x.unsqueeze(place))
    larger = [draw.random.randrange(1, 3) for _ in range(draw.random.randrange(2))]
    larger += [draw.random.randrange(1, 4) if size == 1 else size for size in x.shape]
    same(call("aten::expand", x, larger, False), x.expand(larger))
    same(call("aten::squeeze", x), x.squeeze())
    if not x.dim():
        return
    dim, other = draw.dim(x.dim()), draw.dim(x.dim())
    cut = (dim, draw.random.randrange(-3, 4), draw.random.choice((None, 2, -1, 2**63 - 1)), 2)
    same(call("aten::slice.Tensor", x, *cut), aten.slice(x, *cut))
    index = draw.dim(x.shape[dim])
    same(call("aten::select.int", x, dim, index), x.select(dim, index))
    same(call("aten::transpose.int", x, dim, other), x.transpose(dim, other))
    order = draw.random.sample(range(x.dim()), x.dim())
    same(call("aten::permute", x, order), x.permute(order))
    same(call("aten::squeeze.dim", x, dim), x.squeeze(dim))
    count = draw.random.randrange(1, 4)
    same(parts(call("aten::chunk", x, count, dim)), x.chunk(count, dim))
    size = -(-x.shape[dim] // 4)
    same(parts(call("aten::split.Tensor", x, size, dim)), x.split(size, dim))
    rest = [1, x.shape[dim] - 1]
    same(parts(call("aten::split_with_sizes", x, rest, dim)), x.split(rest, dim))
    for sizes in _other_sizes(x):
        try:
            wanted = x.view(sizes)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="a view has no sizes that take a copy"):
                call("aten::view", x, sizes)
        else:
            same(call("aten::view", x, sizes), wanted)


def rows(draw: Draw) -> None:
    sizes = [draw.random.randrange(1, 6) for _ in range(draw.random.randrange(1, 5))]
    x, dim = draw.tensor(sizes, *FLOATS, I64), draw.dim(len(sizes))
    index = torch.randint(0, sizes[dim], (draw.random.randrange(6),))
    same(call("aten::index_select", x, dim, index), x.index_select(dim, index))
    table = draw.tensor([7, draw.random.choice((1, 5, 33))], *FLOATS)
    index = draw.tensor([draw.random.randrange(1, 3), 4], I64).abs() % 7
    wanted = aten.embedding(table, index)
    same(call("aten::embedding", table, index, -1, False, False), wanted)
    index = torch.randint(-sizes[0], sizes[0], (draw.random.randrange(3), 2))
    same(call("aten::index.Tensor", x, [index]), x[index], strides=False)
    index = torch.randperm(sizes[0])[: draw.random.randrange(sizes[0] + 1)]
    values = draw.tensor([len(index), *sizes[1:]], x.dtype)
    wanted = aten.index_put(x, [index], values)
    same(call("aten::index_put", x, [index], values, False), wanted, strides=False)
    index = torch.randint(0, sizes[dim], [draw.random.randrange(size + 1) for size in sizes])
    same(call("aten::gather", x, dim, index, False), x.gather(dim, index))
    wanted = aten.scatter(x, dim, index, 2)
    same(call("aten::scatter.value", x, dim, index, 2), wanted, strides=False)
    # each place once: torch does not say which of two stays
    index = torch.arange(min(sizes[dim], 2)).view(
        -1, *[1] * (-dim - 1 if dim < 0 else len(sizes) - dim - 1)
    )
    index = index.expand([min(size, 2) for size in sizes]).contiguous()
    source = draw.tensor(sizes, x.dtype)
    wanted = aten.scatter(x, dim, index, source)
    same(call("aten::scatter.src", x, dim, index, source), wanted, strides=False)


def reductions(draw: Draw) -> None:
    sizes = [draw.random.choice((1, 2, 3, 17, 70)) for _ in range(draw.random.randrange(1, 4))]
    x = draw.tensor(sizes, *FLOATS, *INTEGERS, BOOL)
    dims = draw.random.sample(range(len(sizes)), draw.random.randrange(1, len(sizes) + 1))
    keeps, tolerance = draw.random.random() < 0.5, 1e-4 if x.dtype in FLOATS else 0
    wanted = aten.sum(x, dims, keeps)
    same(call("aten::sum.dim_IntList", x, dims, keeps, None), wanted, tolerance, strides=False)
    if x.dtype in FLOATS:
        wanted = aten.mean(x, dims, keeps)
        same(call("aten::mean.dim", x, dims, keeps, None), wanted, 1e-5, strides=False)
    else:
        wanted = x.cumsum(dims[0])
        same(call("aten::cumsum", x, dims[0], None), wanted, strides=False)
    if x.dtype == BOOL:
        return
    dim = dims[0] - len(sizes)
    for descends in (False, True):
        wanted = aten.sort(x, stable=True, dim=dim, descending=descends)
        same(call("aten::sort.stable", x, True, dim, descends), wanted, strides=False)
    for name, kept in (("max", "max.dim"), ("min", "min.dim")):
        wanted = getattr(x, name)(dim, keeps)
        same(call(f"aten::{kept}", x, dim, keeps), wanted, strides=False)
    same(call("aten::argmax", x, dim, keeps), x.argmax(dim, keeps), strides=False)
    same(call("aten::amax", x, [dim], keeps), x.amax([dim], keeps), strides=False)
    # without ties, of which torch takes any
    x = torch.randperm(x.numel()).view(sizes).to(draw.random.choice((F32, I64)))
    count = draw.random.randrange(sizes[dim] + 1)
    same(call("aten::topk", x, count, dim, True, True), x.topk(count, dim), strides=False)


def products(draw: Draw) -> None:
    batch, rows, inner, columns = (draw.random.choice((1, 2, 3, 17, 40, 70)) for _ in range(4))
    dtype = draw.random.choice(FLOATS)
    x, y = draw.tensor([batch, rows, inner], dtype), draw.tensor([batch, inner, columns], dtype)
    if draw.random.random() < 0.5:
        y = draw.tensor([batch, columns, inner], dtype).transpose(1, 2)
    found = call("aten::bmm", x, y)
    same(found, aten.bmm(x, y), 1e-4)
    # a row alone, as it is among others
    assert torch.equal(call("aten::bmm", x[:, -1:], y), found[:, -1:])


CHECKS = [unary, binary, choices, copies, views, rows, reductions, products]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("check", CHECKS, ids=lambda x: x.__name__)
def test_as_torch_computes(check: Callable[[Draw], None], seed: int) -> None:
    for number in range(ROUNDS):
        check(Draw(1000 * seed + number))


def test_ranges_and_constants() -> None:
    none = (None,) * 4
    for end in (0, 5):
        same(call("aten::arange", end, *none), torch.arange(end))
    same(call("aten::arange.start_step", 1, 9, 3, *none), torch.arange(1, 9, 3))
    same(call("aten::arange", 4, CODES[I32], None, None, None), torch.arange(4, dtype=I32))
    same(call("aten::full", [2, 3], 1.5, *none), torch.full([2, 3], 1.5))
    x = torch.zeros(2, 3, dtype=BF16)
    same(call("aten::ones_like", x, None, *none), torch.ones_like(x))
    same(call("aten::full_like", x, 3, CODES[I64], *none), torch.full_like(x, 3, dtype=I64))


def test_what_is_no_number() -> None:
    """NaN, infinities and zeros of both signs compare and order as torch's do."""
    x = torch.tensor([2.0, float("nan"), -0.0, 0.0, -float("inf"), float("inf"), -1.0])
    for descends in (False, True):
        found = call("aten::sort.stable", x, True, 0, descends)
        same(found, aten.sort(x, stable=True, dim=0, descending=descends))
    y = x.roll(1)
    for name in ("maximum", "minimum"):
        same(call(f"aten::{name}", x, y), getattr(aten, name)(x, y))
    for name in ("max", "min"):
        same(call(f"aten::{name}.dim", x, 0, False), getattr(x, name)(0))
    for name in ("relu", "neg", "sigmoid", "tanh", "abs"):
        same(call(f"aten::{name}", x), getattr(aten, name)(x), 1e-6)
    assert call("aten::to.dtype", x, CODES[I64], False, False, None).dtype == I64


def test_parts_know_their_memory() -> None:
    """A view ends where its tensor's memory ends, so that no view of it can reach further."""
    x = torch.zeros(4, 6)
    for name, arguments, offset in (
        ("aten::slice.Tensor", (x, 0, 1, 3, 1), 24),
        ("aten::select.int", (x, 1, 2), 8),
        ("aten::narrow", (x, 1, 3, 2), 12),
    ):
        call(name, *arguments)
        found = native_calls.TENSOR.unpack_from(native_calls._buffers.results, 0)
        assert (found[0] - x.data_ptr(), found[-1]) == (offset, x.nbytes - offset)


def test_what_is_refused() -> None:
    x, index = torch.zeros(3, 4), torch.tensor([0, 3])
    for name, arguments in (
        ("aten::index_select", (x, 0, index)),
        ("aten::index_select", (x, 0, -index)),
        ("aten::embedding", (x, index, -1, False, False)),
        ("aten::index.Tensor", (x, [index])),
        ("aten::index_put", (x, [index], x[:2], False)),
        ("aten::gather", (x, 0, torch.full((1, 1), 3), False)),
        ("aten::gather", (x, 0, torch.zeros(1, 5, dtype=I64), False)),
        ("aten::scatter.value", (x, 1, torch.full((1, 1), -1), 1)),
        ("aten::scatter.src", (x, 1, torch.zeros(3, 2, dtype=I64), x[:, :1])),
        ("aten::add.Tensor", (x, torch.zeros(3), 1)),
        ("aten::view", (x, [5, -1])),
        ("aten::view", (x, [-1, -1])),
        ("aten::view", (x, [2**62, 4])),
        ("aten::reshape", (x, [0, -1])),
        ("aten::expand", (x, [2, 4], False)),
        ("aten::expand", (x, [-1, 3, 4], False)),
        ("aten::repeat", (x, [2**40, 2**40])),
        ("aten::full", ([2**40, 2**40], 1.0, None, None, None, None)),
        ("aten::select.int", (x, 0, 3)),
        ("aten::slice.Tensor", (x, 2, 0, 1, 1)),
        ("aten::slice.Tensor", (x, 0, 0, 1, 0)),
        ("aten::split_with_sizes", (x, [1, 1], 0)),
        ("aten::split_with_sizes", (x, [-1, 4], 0)),
        ("aten::narrow", (x, 0, 2, 2)),
        ("aten::cat", ([x, x[:, :2]], 0)),
        ("aten::cat", ([], 0)),
        ("aten::topk", (x, 5, 1, True, True)),
        ("aten::floor_divide", (torch.tensor([1]), 0)),
        ("aten::div.Tensor_mode", (torch.tensor([1]), torch.tensor([0]), "trunc")),
        ("aten::permute", (x, [0, 0])),
        ("aten::max.dim", (x[:, :0], 1, False)),
        ("aten::to.dtype", (x, 77, False, False, None)),
        ("aten::arange", (2**40, None, None, None, None)),
        ("aten::sqrt", (x.double(),)),
    ):
        with pytest.raises(RuntimeError, match="specc: "):
            call(name, *arguments)
