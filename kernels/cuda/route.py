"""`specc::route`: a mixture's router in one launch, from the product to the weights of experts.

A program has some experts and a part of the columns of a sum. The last of those that share a block
of rows adds the parts up, always in their order, and takes the best experts of each row. Whatever
the number of rows, a logit is the same sum, so a row's experts do not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.arrivals import counters, is_last
from specc.kernels.cuda.attend_config import MOST_REGISTERS
from specc.kernels.cuda.dependent import (
    ask_part_and_wait,
    launch_options,
    let_next_start,
    with_dependent,
)
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped
from specc.kernels.cuda.strided_rows import FLOATS, check
from specc.kernels.operators.mixtures import MOST_CHOSEN, MOST_EXPERTS, ROUTE_SPLITS
from specc.kernels.reference.routing import SCORES, route_reference

NAME = "route"
# experts that the last program compares, and of a token
BLOCKS_EXPERTS = (128, MOST_EXPERTS)
# rows of which it takes the best experts at a time: one for each of its warps
BLOCK_CHOICE = 4
# below every number in `_ordered`, and what a NaN is there
_LEAST, _NAN = tl.constexpr(-0x80000000), tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class RouteTile:
    """Experts, rows, and columns of a step of a program; steps in flight."""

    block_n: int
    block_m: int
    block_k: int
    num_stages: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"BN": self.block_n, "BM": self.block_m, "BK": self.block_k}


_HALF = RouteTile(16, 16, 128, 4)
TILES = {
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
    torch.float32: RouteTile(16, 16, 32, 4),
}
# of itself ptxas makes room for one program more, and spills; there are few
_WARPS = 4


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    scores: str,
    top_k: int,
    normalize: bool,
    eps: float,
    scale: float,
    groups: int,
    top_groups: int,
    group_best: int,
    shared: int = 0,
    shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `route_reference`, which runs for more experts than a program compares."""
    chosen = (scores, top_k, normalize, eps, scale, groups, top_groups, group_best)
    _check(x, weight, bias, correction, scores, top_k, groups, top_groups, group_best)
    _check_shared(x, shared, shared_gate)
    num_experts = weight.shape[0]
    if num_experts > MOST_EXPERTS or top_k + shared > MOST_CHOSEN:
        return route_reference(x, weight, bias, correction, *chosen, shared, shared_gate)
    num_rows, width = x.shape
    ids = x.new_empty(num_rows, top_k + shared, dtype=torch.int64)
    weights = x.new_empty(num_rows, top_k + shared, dtype=torch.float32)
    num_logits = num_experts + (shared_gate is not None)
    if not num_rows:
        return ids, weights
    tile = TILES[x.dtype]
    row_blocks = triton.cdiv(num_rows, tile.block_m)
    steps = triton.cdiv(triton.cdiv(width, tile.block_k), ROUTE_SPLITS)
    _route_kernel[(triton.cdiv(num_logits, tile.block_n), ROUTE_SPLITS, row_blocks)](
        x.contiguous(), weight, bias, correction, ids, weights,
        x.new_empty(ROUTE_SPLITS, num_rows, num_logits, dtype=torch.float32),
        # launches over one weight run one after another
        counters(weight, row_blocks),
        num_rows, num_experts, width, steps, top_k, int(normalize), eps, scale,
        num_experts // groups, groups if groups > 1 else 0, top_groups, group_best,
        shared=shared or None,
        shared_gate=shared_gate,
        SCORES=scores,
        **_constexprs(tile, num_experts),
        **launch_options(x.dtype),
        num_warps=_WARPS,
        num_stages=tile.num_stages,
        maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return ids, weights


def _constexprs(tile: RouteTile, num_experts: int) -> dict[str, int]:
    block = next(size for size in BLOCKS_EXPERTS if num_experts <= size)
    return tile.sizes | {"BE": block, "BT": MOST_CHOSEN, "BR": BLOCK_CHOICE}


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    scores: str,
    top_k: int,
    groups: int,
    top_groups: int,
    group_best: int,
) -> None:
    is_rows = x.dim() == 2 and x.dtype in FLOATS and x.shape[1] > 0
    check(is_rows, NAME, f"x {x.dtype} {list(x.shape)}", "[N, H] of floats")
    check(
        weight.dim() == 2 and weight.shape[1] == x.shape[1] and weight.dtype == x.dtype,
        NAME,
        f"weight {weight.dtype} {list(weight.shape)}",
        f"[E, {x.shape[1]}] of {x.dtype}",
    )
    check(weight.is_contiguous(), NAME, f"weight of strides {weight.stride()}", "a contiguous one")
    num_experts = weight.shape[0]
    for name, value, dtypes in (
        ("bias", bias, (x.dtype,)),
        ("correction", correction, (torch.float32, x.dtype)),
    ):
        check(
            value is None
            or (value.shape == (num_experts,) and value.dtype in dtypes and value.is_contiguous()),
            NAME,
            f"{name} {None if value is None else (value.dtype, list(value.shape))}",
            f"contiguous [{num_experts}] of {' or '.join(map(str, dtypes))}",
        )
    check(scores in SCORES, NAME, scores, f"one of {', '.join(SCORES)}")
    check(0 < top_k <= num_experts, NAME, f"top_k {top_k}", f"1 to {num_experts}")
    check(
        groups > 0 and num_experts % groups == 0,
        NAME,
        f"{groups} groups",
        f"as many as divide {num_experts} experts",
    )
    size = num_experts // groups
    check(
        groups == 1 or (0 < top_groups <= groups and top_groups * size >= top_k),
        NAME,
        f"top_groups {top_groups}",
        f"1 to {groups} of {size} experts each, which have {top_k}",
    )
    fits = groups == 1 or (group_best in (1, 2) and group_best <= size)
    check(fits, NAME, f"group_best {group_best}", "1 or 2, and no more than a group has")


def _check_shared(x: Tensor, shared: int, gate: Tensor | None) -> None:
    check(shared >= 0, NAME, f"{shared} shared experts", "0 or more")
    fits = gate is None or (
        shared > 0
        and gate.shape == (1, x.shape[1])
        and gate.dtype == x.dtype
        and gate.is_contiguous()
    )
    found = f"shared_gate {None if gate is None else (gate.dtype, list(gate.shape))}"
    wanted = f"a contiguous [1, {x.shape[1]}] of {x.dtype}, of shared experts"
    check(fits, NAME, f"{found} of {shared} shared experts", wanted)


def shipped(capability: int) -> Iterator[Shipped]:
    """What routers of models have; the same for all capabilities."""
    for dtype in FLOATS:
        for num_experts in BLOCKS_EXPERTS:
            for scores, more in (*_KINDS, *(_SHARED if dtype == torch.bfloat16 else ())):
                yield from with_dependent(
                    _shipped(dtype, num_experts, scores, more), capability, dtype
                )


# scores, and what else is given; gpt-oss has a bias, DeepSeek V3 a correction
_KINDS = (
    ("softmax", ()),
    ("chosen", ()),
    ("chosen", ("bias",)),
    ("sigmoid", ("correction",)),
)
# with experts that every row takes: DeepSeek V2 and V3, Qwen2-MoE; of other types compiled when met
_SHARED = (
    ("softmax", ("shared",)),
    ("sigmoid", ("correction", "shared")),
    ("softmax", ("shared", "shared_gate")),
)


def _shipped(dtype: torch.dtype, num_experts: int, scores: str, more: tuple[str, ...]) -> Shipped:
    pointer, tile = f"*{TYPE_NAMES[dtype]}", TILES[dtype]
    types = {"bias": pointer, "correction": "*fp32", "shared": "i32", "shared_gate": pointer}
    given = {"x": pointer, "weight": pointer} | {name: types[name] for name in more}
    given |= {"ids": "*i64", "weights": "*fp32", "partial": "*fp32", "arrived": "*i32"}
    return Shipped(
        name="-".join([pointer[1:], scores, *more, f"e{num_experts}"]),
        kernel=_route_kernel,
        signature=given
        | dict.fromkeys(_INTEGERS, "i32")
        | {"K": "i32", "eps": "fp32", "scale": "fp32"},
        constexprs={name: None for name in types if name not in more}
        | {"SCORES": scores}
        | _constexprs(tile, num_experts),
        num_warps=_WARPS,
        num_stages=tile.num_stages,
        divisible=(*(name for name in given if name != "shared"), "K"),
        max_registers=MOST_REGISTERS,
    )


_INTEGERS = (
    "num_rows", "num_experts", "steps", "top_k", "normalize", "group_size", "groups", "top_groups",
    "group_best",
)  # fmt: skip


@triton.jit
def _ordered(b_x):
    """Integers in the order of numbers: -0 is 0, and a NaN is above all."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)
    b_bits = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    return tl.where(b_x == b_x, b_bits, _NAN)


@triton.jit
def _first_best(b_key, o_e, BE: tl.constexpr):
    """The first place of the largest of each row [BR]."""
    b_best = tl.max(b_key, 1)[:, None]
    return tl.min(tl.where(b_key == b_best, o_e[None, :], BE), 1)


@triton.jit
def _of_taken_groups(b_choice, b_key, o_e, size, groups, top_groups, group_best, BE: tl.constexpr):
    """Keys of experts whose group a row takes; others are below all."""
    b_group = tl.full(b_key.shape, _LEAST, tl.int32)  # that of its group, for each expert
    for g in range(groups):
        m_g = (o_e // size == g)[None, :]
        b_own = tl.where(m_g, b_key, _LEAST)
        place = _first_best(b_own, o_e, BE)
        total = _at(b_choice, o_e, place)
        if group_best > 1:
            b_own = tl.where(o_e[None, :] == place[:, None], _LEAST, b_own)
            place = _first_best(b_own, o_e, BE)
            total += _at(b_choice, o_e, place)
        b_group = tl.where(m_g, _ordered(total)[:, None], b_group)
    b_taken = tl.full(b_key.shape, _LEAST, tl.int32)
    for _ in range(top_groups):
        place = _first_best(b_group, o_e, BE)
        m_g = (o_e // size)[None, :] == (place // size)[:, None]
        b_taken = tl.where(m_g, b_key, b_taken)
        b_group = tl.where(m_g, _LEAST, b_group)
    return b_taken


@triton.jit
def _at(b_x, o_e, place):
    """The number of each row [BR] at its place."""
    return tl.sum(tl.where(o_e[None, :] == place[:, None], b_x, 0.0), 1)


@triton.jit
def _softmax(b_x, m_x):
    """Of each row of the numbers of a mask; of a NaN everything is NaN."""
    b_x = tl.where(m_x, b_x, -float("inf"))
    b_x = tl.where(m_x, tl.exp(b_x - tl.max(b_x, 1)[:, None]), 0.0)
    return b_x / tl.sum(b_x, 1)[:, None]


@triton.jit(do_not_specialize=[*_INTEGERS, "shared"])
def _route_kernel(
    x,
    weight,
    bias,
    correction,
    ids,
    weights,
    partial,
    arrived,
    num_rows,
    num_experts,
    K,
    steps,
    top_k,
    normalize,
    eps,
    scale,
    group_size,
    groups,
    top_groups,
    group_best,
    SCORES: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BE: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    shared=None,  # experts that every row takes after its best ones, or none
    shared_gate=None,  # [K], of their weight, or none
):
    i_n, i_k, i_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    o_n = i_n * BN + tl.arange(0, BN)
    o_m = i_m.to(tl.int64) * BM + tl.arange(0, BM)
    o_k = tl.arange(0, BK)
    m_m = (o_m < num_rows)[:, None]
    p_x = x + o_m[:, None] * K + o_k[None, :]
    o_w = tl.minimum(o_n, num_experts - 1)
    p_w = weight + o_w.to(tl.int64)[:, None] * K + o_k[None, :]
    num_logits = num_experts
    if shared_gate is not None:
        # a row after those of experts
        num_logits += 1
        p_w = tl.where((o_n < num_experts)[:, None], p_w, shared_gate + o_k[None, :])
    b_t = tl.zeros([BN, BM], tl.float32)
    begin = i_k * steps * BK
    ask_part_and_wait(weight, o_w, begin, K, IS_DEPENDENT)
    for k in range(begin, tl.minimum(begin + steps * BK, K), BK):
        m_k = o_k[None, :] < K - k
        b_x = tl.load(p_x + k, mask=m_m & m_k, other=0.0)  # [BM, BK]
        b_w = tl.load(p_w + k, mask=m_k, other=0.0)  # [BN, BK]
        b_t = tl.dot(b_w, tl.trans(b_x), b_t, input_precision="ieee")
    let_next_start(IS_DEPENDENT)
    part = num_rows.to(tl.int64) * num_logits
    o_logit = o_m[:, None] * num_logits + o_n[None, :]
    tl.store(partial + i_k * part + o_logit, tl.trans(b_t), mask=m_m & (o_n < num_logits)[None, :])
    if not is_last(arrived + i_m, tl.num_programs(0) * splits):
        return
    o_e, o_t = tl.arange(0, BE), tl.arange(0, BT)
    m_e = (o_e < num_experts)[None, :]
    for r in range(0, BM, BR):
        o_r = i_m.to(tl.int64) * BM + r + tl.arange(0, BR)
        m_r = (o_r < num_rows)[:, None]
        p_logit = partial + o_r[:, None] * num_logits + o_e[None, :]
        b_score = tl.zeros([BR, BE], tl.float32)
        for i in range(splits):
            b_score += tl.load(p_logit + i * part, mask=m_r & m_e, other=0.0)
        if bias is not None:
            b_score += tl.load(bias + o_e, mask=o_e < num_experts, other=0.0).to(tl.float32)[None]
        if SCORES == "softmax":
            b_score = _softmax(b_score, m_e)
        elif SCORES == "sigmoid":
            b_score = 1.0 / (1.0 + tl.exp(-b_score))
        b_choice = b_score
        if correction is not None:
            b_more = tl.load(correction + o_e, mask=o_e < num_experts, other=0.0).to(tl.float32)
            b_choice = b_score + b_more[None, :]
        b_key = tl.where(m_e, _ordered(b_choice), _LEAST)
        if groups > 0:
            b_key = _of_taken_groups(
                b_choice, b_key, o_e, group_size, groups, top_groups, group_best, BE
            )
        b_id = tl.zeros([BR, BT], tl.int32)
        b_weight = tl.zeros([BR, BT], tl.float32)
        for t in range(top_k):
            place = _first_best(b_key, o_e, BE)
            m_t = (o_t == t)[None, :]
            b_id = tl.where(m_t, place[:, None], b_id)
            b_weight = tl.where(m_t, _at(b_score, o_e, place)[:, None], b_weight)
            b_key = tl.where(o_e[None, :] == place[:, None], _LEAST, b_key)
        m_t = (o_t < top_k)[None, :]
        if SCORES == "chosen":
            b_weight = _softmax(b_weight, m_t)
        if normalize != 0:
            b_weight /= (tl.sum(tl.where(m_t, b_weight, 0.0), 1) + eps)[:, None]
        b_weight *= scale
        count = top_k
        m_out = m_t
        if shared is not None:
            # after the chosen experts those that every row takes
            b_gate = tl.full([BR], 1.0, tl.float32)
            if shared_gate is not None:
                p_gate = partial + o_r * num_logits + num_experts
                b_gate = tl.zeros([BR], tl.float32)
                for k in range(splits):
                    b_gate += tl.load(p_gate + k * part, mask=o_r < num_rows, other=0.0)
                b_gate = 1.0 / (1.0 + tl.exp(-b_gate))
            b_id = tl.where(m_t, b_id, num_experts - top_k + o_t[None, :])
            b_weight = tl.where(m_t, b_weight, b_gate[:, None])
            count = top_k + shared
            m_out = (o_t < count)[None, :]
        o_out = o_r[:, None] * count + o_t[None, :]
        tl.store(ids + o_out, b_id.to(tl.int64), mask=m_r & m_out)
        tl.store(weights + o_out, b_weight, mask=m_r & m_out)
