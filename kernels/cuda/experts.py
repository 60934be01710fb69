"""`specc::experts`: the chosen experts of a mixture, in three launches or four.

A pair is a token and one of its experts. Tiles of pairs of one expert are multiplied with that
expert's matrices; which pairs a tile has is found on the device, so a launch follows from shapes
alone: it has as many programs as the least favorable choice of experts needs, and those that find
no tile leave at once.

- Up to FEW pairs every program reads all ids: of an expert's pairs, in their order, the first one
  leads a tile, and every BM-th after that.
- Beyond that, `_experts_order_kernel` sorts pairs by expert first, one program an expert.

Then come gate and up with the activation, the second product, and the sum over a token's experts.
Every number is written by one program, and added up in one order: results do not differ from
replay to replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.act_and_mul import activate
from specc.kernels.cuda.launch import launcher
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check
from specc.kernels.reference.fused import ACTIVATIONS

NAME = "experts"
# pairs that a program looks through by itself
FEW = 256
# pairs and experts that a program reads at a time; experts of a token, and columns of a sum
BLOCK_PAIRS, BLOCK_EXPERTS, BLOCK_TOP, BLOCK_SUM = 1024, 128, 8, 256


@dataclass(frozen=True)
class Tile:
    """Launch parameters of a product.

    Args:
        block_m: pairs of a tile.
        block_n: columns of a program's result.
        block_k: columns of a step.
        num_warps: of a program.
        num_stages: steps in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"BM": self.block_m, "BN": self.block_n, "BK": self.block_k}

    def num_tiles(self, num_pairs: int, num_experts: int) -> int:
        """Most tiles that this many pairs can make."""
        if num_pairs <= FEW:
            return num_pairs
        num_chosen = min(num_experts, num_pairs)
        return (num_pairs - num_chosen) // self.block_m + num_chosen


# of few pairs, and of more; few pairs read matrices, of which a step of gate and up has two blocks
_HALF_GATE_UP = (Tile(16, 32, 128, 4, 4), Tile(64, 64, 64, 4, 3))
_HALF_DOWN = (Tile(16, 32, 128, 4, 5), Tile(64, 128, 64, 4, 3))
_FLOAT = (Tile(16, 16, 32, 4, 3), Tile(32, 32, 32, 4, 3))
GATE_UP = {torch.bfloat16: _HALF_GATE_UP, torch.float16: _HALF_GATE_UP, torch.float32: _FLOAT}
DOWN = {torch.bfloat16: _HALF_DOWN, torch.float16: _HALF_DOWN, torch.float32: _FLOAT}


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """See `experts_reference`."""
    _check(x, ids, weights, gate_up, down, activation)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    num_pairs, num_experts = ids.numel(), gate_up.shape[0]
    out = x.new_empty(x.shape)
    if not num_pairs:
        return out.zero_()
    order = counts = None
    if num_pairs > FEW:
        order = ids.new_empty(num_pairs, dtype=torch.int32)
        counts = ids.new_empty(num_experts, dtype=torch.int32)
        launcher(_experts_order_kernel)[(num_experts,)](
            *(ids, order, counts, num_pairs), BS=BLOCK_PAIRS, num_warps=4, num_stages=1
        )
    places = (ids if order is None else None, order, counts)
    inner = x.new_empty(num_pairs, down.shape[2])
    found = x.new_empty(num_pairs, down.shape[1], dtype=torch.float32)
    _launch_gate_up(x, places, gate_up, inner, ids.shape[1], activation)
    _launch_down(inner, places, down, found)
    grid = (x.shape[0], triton.cdiv(x.shape[1], BLOCK_SUM))
    launcher(_experts_sum_kernel)[grid](
        *(found, ids, weights, out, num_experts, ids.shape[1], x.shape[1]),
        BT=BLOCK_TOP,
        BH=BLOCK_SUM,
        num_warps=4,
        num_stages=1,
    )
    return out


_Places = tuple[Tensor | None, Tensor | None, Tensor | None]


def _launch_gate_up(
    x: Tensor, places: _Places, weight: Tensor, out: Tensor, top_k: int, activation: str
) -> None:
    num_pairs, size = out.shape
    tile = GATE_UP[x.dtype][num_pairs > FEW]
    grid = (tile.num_tiles(num_pairs, weight.shape[0]), triton.cdiv(size, tile.block_n))
    launcher(_experts_gate_up_kernel)[grid](
        *(x, *places, weight, out, num_pairs, weight.shape[0], top_k, size, x.shape[1]),
        ACTIVATION=activation,
        **_constexprs(tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _launch_down(x: Tensor, places: _Places, weight: Tensor, out: Tensor) -> None:
    num_pairs, size = out.shape
    tile = DOWN[x.dtype][num_pairs > FEW]
    grid = (tile.num_tiles(num_pairs, weight.shape[0]), triton.cdiv(size, tile.block_n))
    launcher(_experts_down_kernel)[grid](
        *(x, *places, weight, out, num_pairs, weight.shape[0], size, x.shape[1]),
        **_constexprs(tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _constexprs(tile: Tile) -> dict[str, int]:
    return {"BS": FEW, "BE": BLOCK_EXPERTS} | tile.sizes


def _check(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> None:
    is_rows = x.dim() == 2 and x.dtype in FLOATS and x.shape[1] > 0
    check(is_rows, NAME, f"x {x.dtype} {list(x.shape)}", "[N, H] of floats")
    check(
        ids.dim() == 2 and ids.shape[0] == x.shape[0] and ids.dtype == torch.int64,
        NAME,
        f"ids {ids.dtype} {list(ids.shape)}",
        f"[{x.shape[0]}, K] of torch.int64",
    )
    check(
        weights.shape == ids.shape and weights.dtype in (torch.float32, x.dtype),
        NAME,
        f"weights {weights.dtype} {list(weights.shape)}",
        f"{list(ids.shape)} of torch.float32 or {x.dtype}",
    )
    is_stack = gate_up.dim() == down.dim() == 3 and 0 not in (*gate_up.shape, *down.shape)
    hidden, size = x.shape[1], down.shape[-1] if down.dim() else 0
    num_experts = gate_up.shape[0] if gate_up.dim() else 0
    for name, stack, wanted in (
        ("gate_up", gate_up, (num_experts, 2 * size, hidden)),
        ("down", down, (num_experts, hidden, size)),
    ):
        check(
            is_stack and stack.shape == wanted and stack.dtype == x.dtype,
            NAME,
            f"{name} {stack.dtype} {list(stack.shape)}",
            f"gate_up [E, 2 I, {hidden}] and down [E, {hidden}, I] of {x.dtype}",
        )
        check(
            stack.is_contiguous(), NAME, f"{name} of strides {stack.stride()}", "a contiguous one"
        )
    check(activation in ACTIVATIONS, NAME, activation, f"one of {', '.join(ACTIVATIONS)}")


def shipped(capability: int) -> Iterator[Shipped]:
    """Few pairs and more, and every activation; the same for all capabilities."""
    yield Shipped(
        name="order",
        kernel=_experts_order_kernel,
        signature={"ids": "*i64", "order": "*i32", "counts": "*i32", "num_pairs": "i32"},
        constexprs={"BS": BLOCK_PAIRS},
        num_warps=4,
        num_stages=1,
        divisible=("ids", "order", "counts"),
    )
    for dtype in FLOATS:
        for number, label in enumerate(("few", "many")):
            for activation in ACTIVATIONS:
                yield _product(dtype, number, f"{activation}-{label}", activation)
            yield _product(dtype, number, f"down-{label}", None)
        for kind in sorted({TYPE_NAMES[dtype], "fp32"}):
            given = {"found": "*fp32", "ids": "*i64", "weights": f"*{kind}"}
            given["out"] = f"*{TYPE_NAMES[dtype]}"
            yield Shipped(
                name=f"{TYPE_NAMES[dtype]}-sum-{kind}",
                kernel=_experts_sum_kernel,
                signature=given | dict.fromkeys(("num_experts", "top_k", "size"), "i32"),
                constexprs={"BT": BLOCK_TOP, "BH": BLOCK_SUM},
                num_warps=4,
                num_stages=1,
                divisible=(*given, "size"),
            )


def _product(dtype: torch.dtype, number: int, label: str, activation: str | None) -> Shipped:
    """A product of few pairs (number 0) or of more; without an activation it is the second one."""
    pointer = f"*{TYPE_NAMES[dtype]}"
    tile = (DOWN if activation is None else GATE_UP)[dtype][number]
    places = {"ids": "*i64"} if number == 0 else {"order": "*i32", "counts": "*i32"}
    absent = {name: None for name in ("ids", "order", "counts") if name not in places}
    given = {"x": pointer, "weight": pointer} | places
    given["out"] = "*fp32" if activation is None else pointer
    integers = ("num_pairs", "num_experts", "size", "K")
    return Shipped(
        name=f"{pointer[1:]}-{label}",
        kernel=_experts_down_kernel if activation is None else _experts_gate_up_kernel,
        signature=given
        | dict.fromkeys(integers if activation is None else (*integers, "top_k"), "i32"),
        constexprs=absent
        | _constexprs(tile)
        | ({} if activation is None else {"ACTIVATION": activation}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible=(*given, "size", "K"),
    )


@triton.jit(do_not_specialize=["num_pairs"])
def _experts_order_kernel(ids, order, counts, num_pairs, BS: tl.constexpr):
    """Pairs of one expert, after those of all experts before it, and how many they are."""
    i_e = tl.program_id(0)
    o_s = tl.arange(0, BS)
    b_before = tl.zeros([BS], tl.int32)
    b_own = tl.zeros([BS], tl.int32)
    for s in range(0, num_pairs, BS):
        b_id = tl.load(ids + s + o_s, mask=o_s < num_pairs - s, other=-1)
        b_before += ((b_id >= 0) & (b_id < i_e)).to(tl.int32)
        b_own += (b_id == i_e).to(tl.int32)
    place = tl.sum(b_before, 0)
    tl.store(counts + i_e, tl.sum(b_own, 0))
    for s in range(0, num_pairs, BS):
        m_own = tl.load(ids + s + o_s, mask=o_s < num_pairs - s, other=-1) == i_e
        b_own = m_own.to(tl.int32)
        tl.store(order + place + tl.cumsum(b_own, 0) - 1, s + o_s, mask=m_own)
        place += tl.sum(b_own, 0)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "top_k"])
def _experts_gate_up_kernel(
    x,
    ids,
    order,
    counts,
    weight,
    out,
    num_pairs,
    num_experts,
    top_k,
    size,
    K,
    ACTIVATION: tl.constexpr,
    BS: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    expert, b_pair = _tile(ids, order, counts, num_pairs, num_experts, BS, BE, BM)
    if expert < 0:
        return
    o_i = tl.program_id(1) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m = (b_pair >= 0)[:, None]
    o_token = (tl.maximum(b_pair, 0) // top_k).to(tl.int64)
    o_gate = expert.to(tl.int64) * 2 * size + tl.minimum(o_i, size - 1)
    p_x = x + o_token[:, None] * K + o_k[None, :]
    p_gate = weight + o_gate[:, None] * K + o_k[None, :]
    p_up = weight + (o_gate + size)[:, None] * K + o_k[None, :]
    b_gate = tl.zeros([BM, BN], tl.float32)
    b_up = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        m_k = o_k[None, :] < K - k  # [1, BK]
        b_x = tl.load(p_x + k, mask=m_m & m_k, other=0.0)  # [BM, BK]
        b_w = tl.load(p_gate + k, mask=m_k, other=0.0)  # [BN, BK]
        b_gate = tl.dot(b_x, tl.trans(b_w), b_gate, input_precision="ieee")
        b_w = tl.load(p_up + k, mask=m_k, other=0.0)
        b_up = tl.dot(b_x, tl.trans(b_w), b_up, input_precision="ieee")
    b_out = activate(b_gate, ACTIVATION) * b_up
    p_out = out + b_pair.to(tl.int64)[:, None] * size + o_i[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_m & (o_i < size)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _experts_down_kernel(
    x,
    ids,
    order,
    counts,
    weight,
    out,
    num_pairs,
    num_experts,
    size,
    K,
    BS: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    expert, b_pair = _tile(ids, order, counts, num_pairs, num_experts, BS, BE, BM)
    if expert < 0:
        return
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m = (b_pair >= 0)[:, None]
    o_row = expert.to(tl.int64) * size + tl.minimum(o_n, size - 1)
    p_x = x + tl.maximum(b_pair, 0).to(tl.int64)[:, None] * K + o_k[None, :]
    p_w = weight + o_row[:, None] * K + o_k[None, :]
    b_out = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        m_k = o_k[None, :] < K - k  # [1, BK]
        b_x = tl.load(p_x + k, mask=m_m & m_k, other=0.0)  # [BM, BK]
        b_w = tl.load(p_w + k, mask=m_k, other=0.0)  # [BN, BK]
        b_out = tl.dot(b_x, tl.trans(b_w), b_out, input_precision="ieee")
    p_out = out + b_pair.to(tl.int64)[:, None] * size + o_n[None, :]
    tl.store(p_out, b_out, mask=m_m & (o_n < size)[None, :])


@triton.jit(do_not_specialize=["num_experts", "top_k"])
def _experts_sum_kernel(
    found,
    ids,
    weights,
    out,
    num_experts,
    top_k,
    size,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """Columns of one token: what its experts found, each by its weight."""
    i_n = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m_h = o_h < size
    b_out = tl.zeros([BH], tl.float32)
    for t in range(0, top_k, BT):
        o_t = t + tl.arange(0, BT)
        o_pair = i_n * top_k + o_t
        m_t = o_t < top_k
        b_id = tl.load(ids + o_pair, mask=m_t, other=-1)
        b_weight = tl.load(weights + o_pair, mask=m_t, other=0.0).to(tl.float32)
        # of pairs without an expert nothing was written
        m_th = ((b_id >= 0) & (b_id < num_experts))[:, None] & m_h[None, :]  # [BT, BH]
        b_found = tl.load(found + o_pair[:, None] * size + o_h[None, :], mask=m_th, other=0.0)
        b_out += tl.sum(tl.where(m_th, b_found * b_weight[:, None], 0.0), 0)
    tl.store(out + i_n * size + o_h, b_out.to(out.dtype.element_ty), mask=m_h)


@triton.jit
def _tile(
    ids,
    order,
    counts,
    num_pairs,
    num_experts,
    BS: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
):
    """The program's tile: its expert, -1 for none, and the pair of each row [BM], -1 for none."""
    if order is None:
        expert, b_pair = _tile_of_few(ids, num_pairs, num_experts, BS, BM)
    else:
        expert, b_pair = _tile_of_sorted(order, counts, num_experts, BE, BM)
    return expert, b_pair


@triton.jit
def _tile_of_few(ids, num_pairs, num_experts, BS: tl.constexpr, BM: tl.constexpr):
    """Pair i leads a tile if a multiple of BM pairs of its expert come before it."""
    i_t = tl.program_id(0)
    o_s = tl.arange(0, BS)
    b_id = tl.load(ids + o_s, mask=o_s < num_pairs, other=-1)
    own = tl.load(ids + i_t)
    is_expert = (own >= 0) & (own < num_experts)
    m_own = b_id == own
    b_rank = tl.cumsum(m_own.to(tl.int32), 0) - 1
    rank = tl.sum((m_own & (o_s < i_t)).to(tl.int32), 0)
    o_rank = rank + tl.arange(0, BM)
    m_row = m_own[None, :] & (b_rank[None, :] == o_rank[:, None])  # [BM, BS]
    b_pair = tl.max(tl.where(m_row, o_s[None, :], -1), 1)
    return tl.where(is_expert & (rank % BM == 0), own, -1), b_pair


@triton.jit
def _tile_of_sorted(order, counts, num_experts, BE: tl.constexpr, BM: tl.constexpr):
    """Tiles in the order of experts: the one that has tile i, and where its pairs start."""
    i_t = tl.program_id(0)
    expert, tile, first, count = -1, 0, 0, 0
    num_tiles, num_before = 0, 0
    for e in range(0, num_experts, BE):
        o_e = e + tl.arange(0, BE)
        b_count = tl.load(counts + o_e, mask=o_e < num_experts, other=0)
        b_tiles = (b_count + BM - 1) // BM
        b_end = num_tiles + tl.cumsum(b_tiles, 0)
        # of one expert at most
        m_own = (b_end > i_t) & (b_end - b_tiles <= i_t)
        b_first = num_before + tl.cumsum(b_count, 0) - b_count
        expert += tl.sum(tl.where(m_own, o_e + 1, 0), 0)
        tile += tl.sum(tl.where(m_own, i_t - (b_end - b_tiles), 0), 0)
        first += tl.sum(tl.where(m_own, b_first, 0), 0)
        count += tl.sum(tl.where(m_own, b_count, 0), 0)
        num_tiles += tl.sum(b_tiles, 0)
        num_before += tl.sum(b_count, 0)
    o_place = tile * BM + tl.arange(0, BM)
    b_pair = tl.load(order + first + o_place, mask=o_place < count, other=-1)
    return expert, b_pair
