"""`specc::experts`: the chosen experts of a mixture, in two launches of few tokens, four of many.

A pair is a token and one of its experts. Tiles of pairs of one expert are multiplied with that
expert's matrices; which pairs a tile has is found on the device, so a launch follows from shapes
alone: it has as many programs as the least favorable choice of experts needs, and those that find
no tile do nothing.

- Up to FEW_TOKENS tokens every program reads all ids. A tile has a row for each token, which is
  zeros where the token has other experts. The second product adds up, too: of the programs of some
  columns the last to be done does.
- Of more tokens `experts_order_kernel` sorts pairs by expert first, one program an expert, so that
  a tile is full of rows, and `experts_sum_kernel` adds up: as one program's work that would take
  longer than the products.

Every number is written by one program, and a token's experts are added up in its order of them:
results differ neither from replay to replay nor, of few tokens, with what stands beside a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from specc.kernels.cuda.arrivals import counters
from specc.kernels.cuda.attend_config import MOST_REGISTERS
from specc.kernels.cuda.dependent import launch_options, with_dependent
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
# whose pairs a program looks through by itself, and experts of each
FEW_TOKENS, FEW_CHOSEN = 16, 16
# pairs and experts that a program reads at a time, and columns of a sum
BLOCK_PAIRS, BLOCK_EXPERTS, BLOCK_SUM = 1024, 128, 256


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
        """Most tiles that this many sorted pairs can make."""
        num_chosen = min(num_experts, num_pairs)
        return (num_pairs - num_chosen) // self.block_m + num_chosen


# of few tokens, and of more; a step of gate and up has two blocks of a matrix
_HALF_GATE_UP = (ExpertTile(FEW_TOKENS, 32, 128, 4, 4), ExpertTile(64, 64, 64, 4, 3))
_HALF_DOWN = (ExpertTile(FEW_TOKENS, 32, 128, 4, 5), ExpertTile(64, 128, 64, 4, 3))
_FLOAT = (ExpertTile(FEW_TOKENS, 16, 32, 4, 3), ExpertTile(32, 32, 32, 4, 3))
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
    (num_tokens, top_k), (num_experts, hidden, size) = ids.shape, down.shape
    num_pairs = num_tokens * top_k
    out = x.new_empty(x.shape)
    if not num_pairs:
        return out.zero_()
    is_few = num_tokens <= FEW_TOKENS and top_k <= FEW_CHOSEN
    order = counts = arrived = None
    if is_few:
        # launches over one weight run one after another
        arrived = counters(down, triton.cdiv(hidden, DOWN[x.dtype][0].block_n))
    else:
        order = ids.new_empty(num_pairs, dtype=torch.int32)
        counts = ids.new_empty(num_experts, dtype=torch.int32)
        experts_order_kernel[(num_experts,)](
            ids, order, counts, num_pairs, BS=BLOCK_PAIRS, num_warps=4, num_stages=1
        )  # fmt: skip
    places = (ids if is_few else None, order, counts)
    inner = x.new_empty(num_pairs, size)
    tile = GATE_UP[x.dtype][not is_few]
    experts_gate_up_kernel[_grid(tile, num_pairs, num_experts, size, is_few)](
        x, *places, gate_up, inner, num_pairs, num_experts, top_k, size, hidden,
        ACTIVATION=activation,
        bias=gate_up_bias,
        **_options(tile, x.dtype, activation, is_few),
    )  # fmt: skip
    found = x.new_empty(num_pairs, hidden, dtype=torch.float32)
    tile, own = DOWN[x.dtype][not is_few], (weights, out, arrived) if is_few else (None, None, None)
    experts_down_kernel[_grid(tile, num_pairs, num_experts, hidden, is_few)](
        inner, *places, down, found, *own, num_pairs, num_experts, top_k, hidden, size,
        bias=down_bias,
        **_options(tile, x.dtype, None, is_few),
    )  # fmt: skip
    if not is_few:
        experts_sum_kernel[(num_tokens, triton.cdiv(hidden, BLOCK_SUM))](
            found, ids, weights, out, num_experts, top_k, hidden,
            BH=BLOCK_SUM,
            num_warps=4,
            num_stages=1,
            maxnreg=MOST_REGISTERS,
        )  # fmt: skip
    return out


def _grid(
    tile: ExpertTile, num_pairs: int, num_experts: int, size: int, is_few: bool
) -> tuple[int, int]:
    """Tiles of pairs, and blocks of columns."""
    num_tiles = num_pairs if is_few else tile.num_tiles(num_pairs, num_experts)
    return num_tiles, triton.cdiv(size, tile.block_n)


def _options(
    tile: ExpertTile, dtype: torch.dtype, activation: str | None, is_few: bool
) -> dict[str, Any]:
    """What both products are launched with."""
    most = _most_registers(is_few, dtype, activation)
    return {
        **_constexprs(tile),
        **launch_options(dtype, is_few),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **({} if most is None else {"maxnreg": most}),
    }


def _most_registers(is_few: bool, dtype: torch.dtype, activation: str | None) -> int | None:
    """Registers that a thread may have; None leaves it to ptxas.

    Which of itself makes one program more of few tokens fit sm_120, or of products in float32 with
    gpt-oss's gate sm_100, and spills.
    """
    return MOST_REGISTERS if is_few or (dtype, activation) == (torch.float32, CLAMPED) else None


def _constexprs(tile: ExpertTile) -> dict[str, int]:
    return {"BT": FEW_CHOSEN, "BE": BLOCK_EXPERTS} | tile.sizes


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
    """Few tokens and more, and every activation; the same for all capabilities."""
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
        kinds = sorted({TYPE_NAMES[dtype], "fp32"})
        for is_few in (True, False):
            # gpt-oss: both products have biases
            for activation, has_bias in (*((x, False) for x in ACTIVATIONS), (CLAMPED, True)):
                item = _gate_up(dtype, is_few, activation, has_bias)
                yield from with_dependent(item, capability, dtype, is_few)
            for has_bias, kind in itertools.product((False, True), kinds if is_few else (None,)):
                item = _down(dtype, kind, has_bias)
                yield from with_dependent(item, capability, dtype, is_few)
        for kind in kinds:
            given = {"found": "*fp32", "ids": "*i64", "weights": f"*{kind}"}
            given["out"] = f"*{TYPE_NAMES[dtype]}"
            yield Shipped(
                name=f"{TYPE_NAMES[dtype]}-sum-{kind}",
                kernel=experts_sum_kernel,
                signature=given | dict.fromkeys(("num_experts", "top_k", "size"), "i32"),
                constexprs={"BH": BLOCK_SUM},
                num_warps=4,
                num_stages=1,
                divisible=(*given, "size"),
                max_registers=MOST_REGISTERS,
            )


def _gate_up(dtype: torch.dtype, is_few: bool, activation: str, has_bias: bool) -> Shipped:
    pointer = f"*{TYPE_NAMES[dtype]}"
    given: dict[str, str | None] = {"x": pointer, "weight": pointer, "out": pointer}
    given["bias"] = pointer if has_bias else None
    name = f"{pointer[1:]}-{activation}-{'few' if is_few else 'many'}"
    item = _product(name, experts_gate_up_kernel, GATE_UP[dtype], is_few, given)
    return replace(
        item,
        constexprs={**item.constexprs, "ACTIVATION": activation},
        max_registers=_most_registers(is_few, dtype, activation),
    )


def _down(dtype: torch.dtype, kind: str | None, has_bias: bool) -> Shipped:
    """Of few tokens with weights of a kind, else of many."""
    pointer = f"*{TYPE_NAMES[dtype]}"
    given: dict[str, str | None] = {"x": pointer, "weight": pointer, "found": "*fp32"}
    given["bias"] = pointer if has_bias else None
    is_few = kind is not None
    of_sum = {"weights": f"*{kind}", "out": pointer, "arrived": "*i32"}
    given |= of_sum if is_few else dict.fromkeys(of_sum)
    label = f"few-{kind}" if is_few else "many"
    name = f"{pointer[1:]}-down{'-bias' if has_bias else ''}-{label}"
    item = _product(name, experts_down_kernel, DOWN[dtype], is_few, given)
    return replace(item, max_registers=_most_registers(is_few, dtype, None))


def _product(
    name: str,
    kernel: Any,
    tiles: tuple[ExpertTile, ExpertTile],
    is_few: bool,
    given: dict[str, str | None],
) -> Shipped:
    """A product of few tokens or of more, of which these pointers are given, or None."""
    tile = tiles[not is_few]
    places = ("ids",) if is_few else ("order", "counts")
    kinds = {"ids": "*i64", "order": "*i32", "counts": "*i32"}
    given = given | {key: kind if key in places else None for key, kind in kinds.items()}
    pointers = {key: kind for key, kind in given.items() if kind is not None}
    return Shipped(
        name=name,
        kernel=kernel,
        signature=pointers
        | dict.fromkeys(("num_pairs", "num_experts", "top_k", "size", "K"), "i32"),
        constexprs={key: None for key in given if key not in pointers} | _constexprs(tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible=(*pointers, "size", "K"),
    )
