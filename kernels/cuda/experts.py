"""`specc::experts`: the chosen experts of a mixture, in three launches or four.

A pair is a token and one of its experts. Tiles of pairs of one expert are multiplied with that
expert's matrices; which pairs a tile has is found on the device, so a launch follows from shapes
alone: it has as many programs as the least favorable choice of experts needs, and those that find
no tile leave at once.

- Up to FEW pairs every program reads all ids: of an expert's pairs, in their order, the first one
  leads a tile, and every BM-th after that.
- Beyond that, `experts_order_kernel` sorts pairs by expert first, one program an expert.

Then come gate and up with the activation, the second product, and the sum over a token's experts.
Every number is written by one program, and added up in one order: results do not differ from
replay to replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from specc.kernels.cuda.attend_config import MOST_REGISTERS
from specc.kernels.cuda.experts_kernels import (
    experts_down_kernel,
    experts_gate_up_kernel,
    experts_order_kernel,
    experts_sum_kernel,
)
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check
from specc.kernels.reference.fused import ACTIVATIONS, CLAMPED

NAME = "experts"
# pairs that a program looks through by itself
FEW = 256
# pairs and experts that a program reads at a time; experts of a token, and columns of a sum
BLOCK_PAIRS, BLOCK_EXPERTS, BLOCK_TOP, BLOCK_SUM = 1024, 128, 8, 256


@dataclass(frozen=True)
class ExpertTile:
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
_HALF_GATE_UP = (ExpertTile(16, 32, 128, 4, 4), ExpertTile(64, 64, 64, 4, 3))
_HALF_DOWN = (ExpertTile(16, 32, 128, 4, 5), ExpertTile(64, 128, 64, 4, 3))
_FLOAT = (ExpertTile(16, 16, 32, 4, 3), ExpertTile(32, 32, 32, 4, 3))
GATE_UP = {torch.bfloat16: _HALF_GATE_UP, torch.float16: _HALF_GATE_UP, torch.float32: _FLOAT}
DOWN = {torch.bfloat16: _HALF_DOWN, torch.float16: _HALF_DOWN, torch.float32: _FLOAT}


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """See `experts_reference`."""
    _check(x, ids, weights, gate_up, down, activation)
    _check_bias("gate_up_bias", gate_up_bias, gate_up)
    _check_bias("down_bias", down_bias, down)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    num_pairs, num_experts = ids.numel(), gate_up.shape[0]
    out = x.new_empty(x.shape)
    if not num_pairs:
        return out.zero_()
    order = counts = None
    if num_pairs > FEW:
        order = ids.new_empty(num_pairs, dtype=torch.int32)
        counts = ids.new_empty(num_experts, dtype=torch.int32)
        experts_order_kernel[(num_experts,)](
            ids, order, counts, num_pairs, BS=BLOCK_PAIRS, num_warps=4, num_stages=1
        )  # fmt: skip
    places = (ids if order is None else None, order, counts)
    inner = x.new_empty(num_pairs, down.shape[2])
    found = x.new_empty(num_pairs, down.shape[1], dtype=torch.float32)
    _launch_gate_up(x, places, gate_up, gate_up_bias, inner, ids.shape[1], activation)
    _launch_down(inner, places, down, down_bias, found)
    grid = (x.shape[0], triton.cdiv(x.shape[1], BLOCK_SUM))
    experts_sum_kernel[grid](
        found, ids, weights, out, num_experts, ids.shape[1], x.shape[1],
        BT=BLOCK_TOP,
        BH=BLOCK_SUM,
        num_warps=4,
        num_stages=1,
    )  # fmt: skip
    return out


_Places = tuple[Tensor | None, Tensor | None, Tensor | None]


def _launch_gate_up(
    x: Tensor,
    places: _Places,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    top_k: int,
    activation: str,
) -> None:
    num_pairs, size = out.shape
    tile = GATE_UP[x.dtype][num_pairs > FEW]
    grid = (tile.num_tiles(num_pairs, weight.shape[0]), triton.cdiv(size, tile.block_n))
    experts_gate_up_kernel[grid](
        x, *places, weight, out, num_pairs, weight.shape[0], top_k, size, x.shape[1],
        ACTIVATION=activation,
        **_constexprs(tile),
        bias=bias,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **({} if (most := _most_registers(x.dtype, activation)) is None else {"maxnreg": most}),
    )  # fmt: skip


def _launch_down(
    x: Tensor, places: _Places, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    num_pairs, size = out.shape
    tile = DOWN[x.dtype][num_pairs > FEW]
    grid = (tile.num_tiles(num_pairs, weight.shape[0]), triton.cdiv(size, tile.block_n))
    experts_down_kernel[grid](
        x, *places, weight, out, num_pairs, weight.shape[0], size, x.shape[1],
        **_constexprs(tile),
        bias=bias,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def _most_registers(dtype: torch.dtype, activation: str | None) -> int | None:
    """Registers that a thread may have; None leaves it to ptxas.

    Which makes one program more of products in float32 with gpt-oss's gate fit sm_100, and spills.
    """
    return MOST_REGISTERS if (dtype, activation) == (torch.float32, CLAMPED) else None


def _constexprs(tile: ExpertTile) -> dict[str, int]:
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
    known = (*ACTIVATIONS, CLAMPED)
    check(activation in known, NAME, activation, f"one of {', '.join(known)}")


def _check_bias(name: str, bias: Tensor | None, stack: Tensor) -> None:
    if bias is None:
        return
    check(
        bias.shape == stack.shape[:2] and bias.dtype == stack.dtype and bias.is_contiguous(),
        NAME,
        f"{name} {bias.dtype} {list(bias.shape)} of strides {bias.stride()}",
        f"a contiguous one of {stack.dtype} {list(stack.shape[:2])}",
    )


def shipped(capability: int) -> Iterator[Shipped]:
    """Few pairs and more, and every activation; the same for all capabilities."""
    yield Shipped(
        name="order",
        kernel=experts_order_kernel,
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
            # gpt-oss: both products have biases
            yield _product(dtype, number, f"{CLAMPED}-{label}", CLAMPED, has_bias=True)
            yield _product(dtype, number, f"down-bias-{label}", None, has_bias=True)
        for kind in sorted({TYPE_NAMES[dtype], "fp32"}):
            given = {"found": "*fp32", "ids": "*i64", "weights": f"*{kind}"}
            given["out"] = f"*{TYPE_NAMES[dtype]}"
            yield Shipped(
                name=f"{TYPE_NAMES[dtype]}-sum-{kind}",
                kernel=experts_sum_kernel,
                signature=given | dict.fromkeys(("num_experts", "top_k", "size"), "i32"),
                constexprs={"BT": BLOCK_TOP, "BH": BLOCK_SUM},
                num_warps=4,
                num_stages=1,
                divisible=(*given, "size"),
            )


def _product(
    dtype: torch.dtype, number: int, label: str, activation: str | None, *, has_bias: bool = False
) -> Shipped:
    """A product of few pairs (number 0) or of more; without an activation it is the second one."""
    pointer = f"*{TYPE_NAMES[dtype]}"
    tile = (DOWN if activation is None else GATE_UP)[dtype][number]
    places = {"ids": "*i64"} if number == 0 else {"order": "*i32", "counts": "*i32"}
    absent = {name: None for name in ("ids", "order", "counts") if name not in places}
    given = {"x": pointer, "weight": pointer} | places
    given["out"] = "*fp32" if activation is None else pointer
    if has_bias:
        given["bias"] = pointer
    else:
        absent["bias"] = None
    integers = ("num_pairs", "num_experts", "size", "K")
    return Shipped(
        name=f"{pointer[1:]}-{label}",
        kernel=experts_down_kernel if activation is None else experts_gate_up_kernel,
        signature=given
        | dict.fromkeys(integers if activation is None else (*integers, "top_k"), "i32"),
        constexprs=absent
        | _constexprs(tile)
        | ({} if activation is None else {"ACTIVATION": activation}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible=(*given, "size", "K"),
        max_registers=_most_registers(dtype, activation),
    )
