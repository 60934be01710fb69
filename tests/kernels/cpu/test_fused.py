"""Fused operators of the CPU against their oracles: norms, gates, rotary embedding, attention."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from specc.kernels.native_calls import CODES, call
from specc.kernels.reference import core, fused, kv_rows

pytestmark = pytest.mark.usefixtures("native_operators")

DTYPES = (torch.float32, torch.bfloat16)
# shorter than a register, as long as one, with a rest, and with several sums
WIDTHS = (1, 3, 16, 17, 64, 100, 640, 1000)


def close(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    """Of bfloat16 up to a rounding, of float32 up to the order of a sum."""
    assert found.dtype == wanted.dtype
    if tolerance is None:
        tolerance = 3e-6 if wanted.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(dtype: torch.dtype, width: int) -> None:
    weight, bias = torch.randn(2, width).to(dtype)
    for rows, unit_offset in itertools.product((1, 5, 70), (False, True)):
        x, residual = torch.randn(2, rows, width).to(dtype)
        options = (weight, 1e-6, unit_offset)
        close(call("specc::rms_norm", x, *options), fused.rms_norm_reference(x, *options))
        found = call("specc::add_rms_norm", x, residual, *options)
        wanted = fused.add_rms_norm_reference(x, residual, *options)
        close(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        for pair in ((weight, bias), (weight, None), (None, None)):
            found = call("aten::layer_norm", x, [width], *pair, 1e-5, False)
            close(
                found,
                functional.layer_norm(x, [width], *pair, 1e-5),
                1e-5 * (1 + 999 * (dtype == torch.bfloat16)),
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_another_dtype(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 40).to(dtype), torch.randn(40).bfloat16()
    for given in (weight, weight.float()):
        options = (given, 1e-6, True)
        close(call("specc::rms_norm", x, *options), fused.rms_norm_reference(x, *options))


def test_rows_of_zeros() -> None:
    x = torch.zeros(2, 20)
    for name in ("specc::rms_norm", "aten::rms_norm"):
        others = (torch.ones(20), 1e-6, False) if name.startswith("specc") else ([20], None, 1e-6)
        assert torch.equal(call(name, x, *others), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_anywhere(dtype: torch.dtype) -> None:
    """Heads of a fused projection, as their norms read them: rows apart, in another order."""
    rows = torch.randn(1, 7, 6 * 32).to(dtype)
    x = rows[..., 32 : 5 * 32].view(1, 7, 4, 32).transpose(1, 2)
    weight = torch.randn(32).to(dtype)
    found = call("specc::rms_norm", x, weight, 1e-6, False)
    close(found, fused.rms_norm_reference(x, weight, 1e-6))
    assert found.is_contiguous()
    found = call("specc::act_and_mul", x, "silu")
    close(found, fused.act_and_mul_reference(x, "silu"))
    total = call("specc::add_rms_norm", x, x.contiguous(), weight, 1e-6, False)[1]
    assert torch.equal(total, x + x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
def test_gates(dtype: torch.dtype, activation: str) -> None:
    for rows, width in itertools.product((1, 5, 70), WIDTHS):
        x = torch.randn(rows, 2 * width).to(dtype) * 4
        wanted = fused.act_and_mul_reference(x, activation)
        close(
            call("specc::act_and_mul", x, activation),
            wanted,
            None if dtype != torch.float32 else 1e-5,
        )


@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
def test_activations_far_out(activation: str) -> None:
    gate = torch.cat(
        [torch.linspace(-60, 60, 20001), torch.tensor([0.0, -0.0, 1e-30, -3e38, 3e38])]
    )
    found = call("specc::act_and_mul", torch.cat([gate, torch.ones_like(gate)])[None], activation)
    wanted = fused.ACTIVATIONS[activation](gate.double())
    error = (found[0].double() - wanted).abs()
    # to three units in the last place of what is not tiny, and nowhere by more than a float holds
    assert (error <= 4e-7 * wanted.abs() + 4e-7).all(), error.max()
    assert call("specc::act_and_mul", torch.tensor([[float("nan"), 1.0]]), activation).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(dtype: torch.dtype) -> None:
    for rows, width in itertools.product((1, 5, 70), WIDTHS):
        x = torch.randn(rows, width).to(dtype) * 5
        close(call("aten::softmax.int", x, -1, None), x.softmax(-1))
        close(call("aten::softmax.int", x, 1, CODES[torch.float32]), x.float().softmax(-1))
        close(
            call("aten::log_softmax.int", x, -1, None),
            x.log_softmax(-1),
            2e-2 if dtype != torch.float32 else 1e-5,
        )
    hidden = torch.tensor([[1.0, -float("inf"), 2.0], [-float("inf")] * 3, [float("nan"), 1, 2]])
    torch.testing.assert_close(
        call("aten::softmax.int", hidden, -1, None), hidden.softmax(-1), equal_nan=True
    )


@dataclass
class Pass:
    """Tokens of three sequences, some of them dead, and two that are nobody's."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    q_start: Tensor
    slot: Tensor
    block_table: Tensor
    position: Tensor
    cache_len: Tensor

    @classmethod
    def drawn(
        cls,
        sizes: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        tables: torch.dtype,
        rows: torch.dtype,
    ) -> Pass:
        heads, kv_heads, dim, value_dim, rotated = sizes
        lengths, counts = torch.randint(0, 9, (3,)), torch.randint(0, 6, (3,))
        q_start = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
        tokens = int(q_start[-1]) + 2
        slot, position = torch.full((tokens,), -1).int(), torch.zeros(tokens, dtype=torch.int64)
        for b, (first, last) in enumerate(itertools.pairwise(q_start.tolist())):
            for t in range(first, last):
                position[t] = lengths[b] + t - first
                slot[t] = position[t] if torch.rand(()) > 0.2 else -1
        widths = [heads * dim, kv_heads * dim, kv_heads * value_dim]
        parts = torch.randn(tokens, sum(widths)).to(dtype).split(widths, 1)
        q, k, v = (
            part.view(tokens, -1, size).transpose(0, 1)
            for part, size in zip(parts, (dim, dim, value_dim), strict=True)
        )
        cos, sin = torch.randn(tokens, 2 * rotated).to(tables).chunk(2, 1)
        beside = 4 if rows == torch.int8 else 0
        caches = [torch.zeros(16, 4, kv_heads, x + beside, dtype=rows) for x in (dim, value_dim)]
        table = torch.randperm(16)[:15].view(3, 5).int()
        return cls(q, k, v, cos, sin, *caches, q_start, slot, table, position, lengths.int())

    def copies(self) -> tuple[Tensor, Tensor]:
        return self.k_cache.clone(), self.v_cache.clone()

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_start, self.slot, self.block_table


SIZES = ((4, 2, 16, 16, 16), (3, 1, 40, 24, 20), (2, 2, 64, 64, 64), (4, 4, 10, 10, 6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_rope_write(sizes: tuple[int, ...], is_int8: bool, dtype: torch.dtype) -> None:
    """Bit for bit: what is rotated, and every row of both caches."""
    for tables in DTYPES:
        given = Pass.drawn(sizes, dtype, tables, torch.int8 if is_int8 else dtype)  # type: ignore[arg-type]
        found, wanted = given.copies(), given.copies()
        inputs = (given.q, given.k, given.v, given.cos, given.sin)
        q = call("specc::rope_write", *inputs, *found, *given.places, is_int8)
        expected = fused.rope_write_reference(*inputs, *wanted, *given.places, is_int8)
        assert torch.equal(q, expected)
        assert q.stride() == expected.stride()
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 17, 24, 96, 256])
def test_hadamard(columns: int, dtype: torch.dtype) -> None:
    """Bit for bit, of rows that lie apart."""
    torch.manual_seed(0)
    for sizes in ((), (0,), (3,), (2, 70)):
        x = torch.randn(*sizes, 2 * columns).to(dtype)[..., :columns]
        assert torch.equal(call("specc::hadamard", x), kv_rows.hadamard_reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_int8", [False, True])
def test_write_kv(is_int8: bool, dtype: torch.dtype) -> None:
    given = Pass.drawn((3, 1, 40, 24, 20), dtype, dtype, torch.int8 if is_int8 else dtype)
    for in_keys in (False,) if is_int8 else (False, True):
        found, wanted = given.copies(), given.copies()
        call("specc::write_kv", given.k, given.v, *found, *given.places, in_keys)
        core.write_kv_reference(given.k, given.v, *wanted, *given.places, values_in_keys=in_keys)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("sizes", SIZES[:3])
def test_attend(sizes: tuple[int, ...], is_int8: bool, dtype: torch.dtype) -> None:
    """The kernel of `tree_attention`, over rows that others have written."""
    given = Pass.drawn(sizes, dtype, dtype, torch.int8 if is_int8 else dtype)  # type: ignore[arg-type]
    caches = given.copies()
    core.write_kv_reference(given.k, given.v, *caches, *given.places)
    inputs = (given.q, *caches, given.q_start, given.position, given.slot, given.cache_len, None)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3 if is_int8 else 1e-5
    plain = {"window": 0, "sink": 0, "softcap": 0.0, "values_in_keys": False}
    plain |= {"rounds_bias": False, "most_rows": 0, "chunk": 0}
    sinks, slopes = torch.randn(sizes[0]).to(dtype), torch.rand(sizes[0])
    for extras, changes in (
        ((None, None), {}),
        ((sinks, None), {"window": 3, "sink": 1, "softcap": 5.0}),
        ((None, slopes), {"chunk": 4, "most_rows": 3}),
        ((None, None), {"values_in_keys": not is_int8}),
    ):
        options = plain | changes
        found = call("specc::attend", *inputs, given.block_table, *extras, 0.3, *options.values())
        wanted = core.attend_reference(
            *inputs,
            given.block_table,
            *extras,
            scale=0.3,
            **options,  # type: ignore[arg-type]
        )
        close(found, wanted, tolerance)
        assert found.stride() == wanted.stride()


def test_a_rows_bits_are_its_own() -> None:
    """However many rows and threads: a row has the bits that it has alone."""
    x, weight = torch.randn(200, 700), torch.randn(700)
    before = torch.get_num_threads()
    runs = {
        "specc::rms_norm": (weight, 1e-6, False),
        "specc::act_and_mul": ("gelu",),
        "aten::layer_norm": ([700], weight, weight, 1e-5, False),
        "aten::softmax.int": (-1, None),
    }
    try:
        for name, others in runs.items():
            alone = torch.cat([call(name, x[i : i + 1], *others) for i in range(200)])
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(call(name, x, *others), alone), name
    finally:
        torch.set_num_threads(before)


def test_what_would_leave_a_cache_is_refused() -> None:
    given = Pass.drawn((4, 2, 16, 16, 16), torch.float32, torch.float32, torch.float32)
    inputs = (given.q, given.k, given.v, given.cos, given.sin, *given.copies())
    q_start, slot, table = given.places
    slot[0], alive = 3, slot.clone()
    q_start[1:] = q_start[1:].clamp(min=1)
    for changed, told in (
        ((q_start, torch.where(alive == 3, 20, alive).int(), table), "slot"),
        ((q_start, alive, torch.full_like(table, 16)), "block_table"),
        ((q_start + 1, alive, table), "q_start"),
        ((q_start, alive[1:], table), "metadata"),
        ((q_start, alive, table.long()), "block_table is"),
    ):
        with pytest.raises(RuntimeError, match=told):
            call("specc::rope_write", *inputs, *changed, False)
        with pytest.raises(RuntimeError, match=told):
            call("specc::write_kv", given.k, given.v, *inputs[5:], *changed, False)
    for name, arguments in (
        ("specc::rms_norm", (torch.zeros(2, 4), torch.zeros(5), 1e-6, False)),
        ("specc::rms_norm", (torch.zeros(4, 2).t(), torch.zeros(4), 1e-6, False)),
        ("specc::rms_norm", (torch.zeros(2, 4).double(), torch.zeros(4), 1e-6, False)),
        ("specc::add_rms_norm", (torch.zeros(2, 4), torch.zeros(4), torch.zeros(4), 1e-6, False)),
        ("specc::act_and_mul", (torch.zeros(2, 5), "silu")),
        ("specc::act_and_mul", (torch.zeros(2, 4), "tanh")),
        ("aten::layer_norm", (torch.zeros(2, 4), [2, 4], None, None, 1e-5, False)),
        ("aten::softmax.int", (torch.zeros(2, 4), 0, None)),
    ):
        with pytest.raises(RuntimeError, match="specc: "):
            call(name, *arguments)
