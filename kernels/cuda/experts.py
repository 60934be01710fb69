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
Matrices are floats, or quantized as the engine's file has them, and then read as `linear_q` does:
those in fragments, of few tokens, by kernels of their own (`experts_fragments`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout
from specc.kernels.cuda import experts_fragments
from specc.kernels.cuda.arrivals import counters
from specc.kernels.cuda.attend_config import MOST_REGISTERS
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.experts_kernels import (
    experts_down_kernel,
    experts_gate_up_kernel,
    experts_order_kernel,
    experts_sum_kernel,
)
from specc.kernels.cuda.experts_operands import NAME, check_bias, check_operands, fragments
from specc.kernels.cuda.experts_shared import Shared, with_shared
from specc.kernels.cuda.linear_q_parts import format_of, parts_of, pointers_of, width_of
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check
from specc.kernels.operators.mixtures import MOST_CHOSEN
from specc.kernels.reference.fused import ACTIVATIONS, CLAMPED

# whose pairs a program looks through by itself, and experts of each
FEW_TOKENS = 16
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

    def constexprs(self, dtype: torch.dtype, layout: QuantizedLayout | None) -> dict[str, Any]:
        """Of both kernels, with rows of a type, and matrices in a layout or as floats."""
        sizes = {"BT": MOST_CHOSEN, "BE": BLOCK_EXPERTS, "BM": self.block_m, "BN": self.block_n}
        if layout is None:
            return sizes | {"BK": self.block_k} | _OF_FLOATS
        # of e2m1 values times scales are exact, but of mxfp4 in float16
        is_exact = layout.has_factors or (layout.has_byte_scales and dtype != torch.float16)
        columns = self.block_k if is_exact else min(self.block_k, layout.group or self.block_k)
        parts = {"BK": columns, "PARTS": self.block_k // columns}
        return sizes | format_of(layout) | {"WIDTH": width_of(layout)} | parts

    def num_tiles(self, num_pairs: int, num_experts: int) -> int:
        """Most tiles that this many sorted pairs can make."""
        num_chosen = min(num_experts, num_pairs)
        return (num_pairs - num_chosen) // self.block_m + num_chosen


_OF_FLOATS = {"KIND": "", "IN_FRAGMENTS": False, "WIDTH": 0, "PARTS": 1}
# of few tokens, and of more; a step of gate and up has two blocks of a matrix
_HALF_GATE_UP = (ExpertTile(FEW_TOKENS, 32, 128, 4, 4), ExpertTile(64, 64, 64, 4, 3))
_HALF_DOWN = (ExpertTile(FEW_TOKENS, 32, 128, 4, 5), ExpertTile(64, 128, 64, 4, 3))
_FLOAT = (ExpertTile(FEW_TOKENS, 16, 32, 4, 3), ExpertTile(32, 32, 32, 4, 3))
GATE_UP = {torch.bfloat16: _HALF_GATE_UP, torch.float16: _HALF_GATE_UP, torch.float32: _FLOAT}
DOWN = {torch.bfloat16: _HALF_DOWN, torch.float16: _HALF_DOWN, torch.float32: _FLOAT}
# of quantized matrices, in the order of gate and up, and down
_HALF_QUANTIZED = (
    (ExpertTile(FEW_TOKENS, 16, 128, 4, 4), ExpertTile(64, 16, 128, 4, 4)),
    (ExpertTile(FEW_TOKENS, 32, 128, 4, 4), ExpertTile(64, 32, 128, 4, 4)),
)
_QUANTIZED_FLOAT = (ExpertTile(FEW_TOKENS, 16, 32, 4, 3), ExpertTile(32, 16, 32, 4, 3))


def _tile(
    dtype: torch.dtype, is_down: bool, is_few: bool, layout: QuantizedLayout | None
) -> ExpertTile:
    if layout is None:
        return (DOWN if is_down else GATE_UP)[dtype][not is_few]
    if dtype == torch.float32:
        return _QUANTIZED_FLOAT[not is_few]
    return _HALF_QUANTIZED[is_down][not is_few]


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    size: int = 0,
    gate_up_layout: str = "",
    down_layout: str = "",
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    """See `experts_reference`."""
    size = size or (down.shape[-1] if down.dim() else 0)
    layouts = [QuantizedLayout.named(x) if x else None for x in (gate_up_layout, down_layout)]
    num_experts = check_operands(x, ids, weights, (gate_up, down), layouts, size, activation)
    hidden = x.shape[1]
    check_bias("gate_up_bias", gate_up_bias, (num_experts, 2 * size), x.dtype)
    check_bias("down_bias", down_bias, (num_experts, hidden), x.dtype)
    shared = Shared.checked(x, num_experts, size, shared_gate_up, shared_down)
    is_plain = activation != CLAMPED and not any((*layouts, gate_up_bias is not None))
    check(is_plain or not shared.count, NAME, "shared experts", "plain floats without biases")
    num_experts += shared.count
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    num_tokens, top_k = ids.shape
    num_pairs = num_tokens * top_k
    out = x.new_empty(x.shape)
    if not num_pairs:
        return out.zero_()
    is_few = num_tokens <= FEW_TOKENS and top_k <= MOST_CHOSEN
    tiles = [_tile(x.dtype, i > 0, is_few, layout) for i, layout in enumerate(layouts)]
    order = counts = arrived = None
    if is_few:
        # launches over one weight run one after another
        arrived = counters(down, triton.cdiv(hidden, tiles[1].block_n))
    else:
        order = ids.new_empty(num_pairs, dtype=torch.int32)
        counts = ids.new_empty(num_experts, dtype=torch.int32)
        experts_order_kernel[(num_experts,)](
            ids, order, counts, num_pairs, BS=BLOCK_PAIRS, num_warps=4, num_stages=1
        )  # fmt: skip
    places = (ids if is_few else None, order, counts)
    if is_few and (layout := fragments(layouts[0])):
        given = x, ids, gate_up, gate_up_bias, num_experts, size, activation, layout
        inner = experts_fragments.gate_up(*given)
    else:
        inner = x.new_empty(num_pairs, size)
        levels, options = _operand(gate_up, x.dtype, layouts[0], tiles[0])
        experts_gate_up_kernel[_grid(tiles[0], num_pairs, num_experts, size, is_few)](
            x, *places, levels, inner, num_pairs, num_experts, top_k, size, hidden,
            ACTIVATION=activation,
            bias=gate_up_bias,
            **shared.argument(shared_gate_up),
            **options,
            **_options(tiles[0], x.dtype, activation, is_few, layouts[0]),
        )  # fmt: skip
    if arrived is not None and (layout := fragments(layouts[1])):
        experts_fragments.down(
            inner, ids, down, down_bias, num_experts, weights, out, arrived, layout
        )
        return out
    found = x.new_empty(num_pairs, hidden, dtype=torch.float32)
    of_sum = (weights, out, arrived) if is_few else (None, None, None)
    levels, options = _operand(down, x.dtype, layouts[1], tiles[1])
    experts_down_kernel[_grid(tiles[1], num_pairs, num_experts, hidden, is_few)](
        inner, *places, levels, found, *of_sum, num_pairs, num_experts, top_k, hidden, size,
        bias=down_bias,
        **shared.argument(shared_down),
        **options,
        **_options(tiles[1], x.dtype, None, is_few, layouts[1]),
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


def invariant_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    size: int = 0,
    gate_up_layout: str = "",
    down_layout: str = "",
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    """As `experts`: a token has the same bits however many there are.

    All are multiplied as few are, some after others.
    """
    needed = f"at most {MOST_CHOSEN} experts of a token"
    check(ids.shape[1] <= MOST_CHOSEN, "invariant_experts", f"ids {list(ids.shape)}", needed)
    parts = [
        experts(
            *few, gate_up, down, activation, gate_up_bias, down_bias, size,
            gate_up_layout, down_layout, shared_gate_up, shared_down,
        )
        for few in zip(
            x.split(FEW_TOKENS), ids.split(FEW_TOKENS), weights.split(FEW_TOKENS), strict=True
        )
    ]  # fmt: skip
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _operand(
    stack: Tensor, dtype: torch.dtype, layout: QuantizedLayout | None, tile: ExpertTile
) -> tuple[Tensor, dict[str, Any]]:
    """Matrices, and what else a kernel is told of how they lie."""
    own = tile.constexprs(dtype, layout)
    if layout is None:
        return stack, own
    levels, scales, zeros = parts_of(stack, layout)
    return levels, {"scales": scales, "zeros": zeros, **own}


def _grid(
    tile: ExpertTile, num_pairs: int, num_experts: int, size: int, is_few: bool
) -> tuple[int, int]:
    """Tiles of pairs, and blocks of columns."""
    num_tiles = num_pairs if is_few else tile.num_tiles(num_pairs, num_experts)
    return num_tiles, triton.cdiv(size, tile.block_n)


def _options(
    tile: ExpertTile,
    dtype: torch.dtype,
    activation: str | None,
    is_few: bool,
    layout: QuantizedLayout | None,
) -> dict[str, Any]:
    """What both products are launched with."""
    most = _most_registers(is_few, dtype, activation, layout)
    return {
        **launch_options(dtype, is_few),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **({} if most is None else {"maxnreg": most}),
    }


def _most_registers(
    is_few: bool, dtype: torch.dtype, activation: str | None, layout: QuantizedLayout | None
) -> int | None:
    """Registers that a thread may have; None leaves it to ptxas.

    Which of itself makes one program more of few tokens fit sm_120, or of products in float32 with
    gpt-oss's gate, or of fragments, sm_100, and spills.
    """
    is_tight = is_few or (dtype, activation) == (torch.float32, CLAMPED)
    return MOST_REGISTERS if is_tight or fragments(layout) else None


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
            items = [_gate_up(dtype, is_few, activation) for activation in ACTIVATIONS]
            # gpt-oss: both products have biases
            items.append(_gate_up(dtype, is_few, CLAMPED, has_bias=True))
            for has_bias, kind in itertools.product((False, True), kinds if is_few else (None,)):
                items.append(_down(dtype, kind, has_bias=has_bias))
            if dtype == torch.bfloat16:
                # weights of a router that is one launch; of other types compiled when met
                items.append(with_shared(_gate_up(dtype, is_few, "silu")))
                items.append(with_shared(_down(dtype, "fp32" if is_few else None)))
            for name in _names(dtype, is_few):
                layout = QuantizedLayout.named(name)
                items.append(_gate_up(dtype, is_few, "silu", layout))
                items.append(_down(dtype, "fp32" if is_few else None, layout))
                if layout.kind == "mxfp4":
                    items.append(_gate_up(dtype, is_few, CLAMPED, layout, has_bias=True))
                    kind = "fp32" if is_few else None
                    items.append(_down(dtype, kind, layout, has_bias=True))
            for item in items:
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


# layouts with configurations, of other types than bfloat16 the last; others are compiled when met
QUANTIZED = ("int8", "int4-g128", "int4-g32-zeros", "fp8-g128", "nvfp4", "mxfp4")
# of many tokens, and bfloat16
FRAGMENTS = tuple(
    f"{name}-fragments" for name in ("int8", "int4-g128", "fp8-g128", "nvfp4", "mxfp4")
)


def _names(dtype: torch.dtype, is_few: bool) -> tuple[str, ...]:
    if dtype != torch.bfloat16:
        return QUANTIZED[-1:]
    return QUANTIZED if is_few else (*QUANTIZED, *FRAGMENTS)


def _gate_up(
    dtype: torch.dtype,
    is_few: bool,
    activation: str,
    layout: QuantizedLayout | None = None,
    has_bias: bool = False,
) -> Shipped:
    pointer = f"*{TYPE_NAMES[dtype]}"
    item = _product(
        f"{activation}-{'few' if is_few else 'many'}",
        experts_gate_up_kernel,
        dtype,
        _tile(dtype, False, is_few, layout),
        is_few,
        layout,
        {"out": pointer, "bias": pointer if has_bias else None},
    )
    return replace(
        item,
        constexprs={**item.constexprs, "ACTIVATION": activation},
        max_registers=_most_registers(is_few, dtype, activation, layout),
    )


def _down(
    dtype: torch.dtype,
    kind: str | None,
    layout: QuantizedLayout | None = None,
    has_bias: bool = False,
) -> Shipped:
    """Of few tokens with weights of a kind, else of many."""
    pointer, is_few = f"*{TYPE_NAMES[dtype]}", kind is not None
    given: dict[str, str | None] = {"found": "*fp32", "bias": pointer if has_bias else None}
    kinds = {"weights": f"*{kind}", "out": pointer, "arrived": "*i32"}
    of_sum: dict[str, str | None] = {key: kinds[key] if is_few else None for key in kinds}
    item = _product(
        f"down{'-bias' if has_bias else ''}-{f'few-{kind}' if is_few else 'many'}",
        experts_down_kernel,
        dtype,
        _tile(dtype, True, is_few, layout),
        is_few,
        layout,
        given | of_sum,
    )
    return replace(item, max_registers=_most_registers(is_few, dtype, None, layout))


def _product(
    label: str,
    kernel: Any,
    dtype: torch.dtype,
    tile: ExpertTile,
    is_few: bool,
    layout: QuantizedLayout | None,
    given: dict[str, str | None],
) -> Shipped:
    """A product of few tokens or of more, of which these pointers are given, or None, besides."""
    kind = TYPE_NAMES[dtype]
    matrices = {"levels": f"*{kind}"} if layout is None else pointers_of(layout)
    places = {"ids": "*i64"} if is_few else {"order": "*i32", "counts": "*i32"}
    pointers = {"x": f"*{kind}", **matrices, **places}
    pointers |= {key: value for key, value in given.items() if value is not None}
    may_be = ("ids", "order", "counts", "scales", "zeros", "shared", "routed", *given)
    return Shipped(
        name="-".join([kind, label, *([] if layout is None else [layout.name])]),
        kernel=kernel,
        signature=pointers
        | dict.fromkeys(("num_pairs", "num_experts", "top_k", "size", "K"), "i32"),
        constexprs={key: None for key in may_be if key not in pointers}
        | tile.constexprs(dtype, layout),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible=(*pointers, "size", "K"),
    )
