"""`specc::tree_recurrence` and `specc::fold_recurrence`, one launch each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from specc.kernels.cuda.shipped import Shipped, Types
from specc.kernels.cuda.state_tokens import SLOTS, check_pass, check_path
from specc.kernels.cuda.strided_rows import FLOATS, check
from specc.kernels.cuda.tree_recurrence_kernels import (
    fold_recurrence_kernel,
    tree_recurrence_kernel,
)

# numbers of a state that a program has: 32 registers of a thread
_NUMBERS, _NUM_WARPS = 1024, 1
# of a thread: ptxas would spill for one more resident program
_REGISTERS = 168
_MOST_COLUMNS = 64
# where a state has more rows, too few columns would be read at a time
MAX_KEY_DIM = 256


def config(key_dim: int, value_dim: int) -> dict[str, int]:
    """Blocks of a head's state, whatever is launched: they decide in which order sums are added."""
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(triton.next_power_of_2(value_dim), _MOST_COLUMNS, max(_NUMBERS // block_k, 4))
    return {"DK": key_dim, "DV": value_dim, "BK": block_k, "BV": block_v}


def tree_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: Tensor,
    rows: Tensor,
    q_start: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    states: Tensor,
) -> Tensor:
    """Linear attention with decay along each token's path; see `tree_recurrence_reference`."""
    heads = _Heads.of_tokens(q, k, v, g, beta)
    num_tokens, batch = len(v), len(cache_len)
    check_pass(
        "tree_recurrence", num_tokens, state, rows, q_start, slot, cache_len, ancestors, states
    )
    heads.check("tree_recurrence", state, rows)
    if batch == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    # no graph that specc compiles has other tensors; a copy keeps the operator general
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    g = g if g.dim() == 2 or g.stride(-1) == 1 else g.contiguous()
    sizes = config(heads.key_dim, heads.value_dim)
    words = 0 if ancestors is None else ancestors.shape[1]
    tree_recurrence_kernel[(triton.cdiv(heads.value_dim, sizes["BV"]), heads.heads, batch)](
        q, k, v, g, beta, state, rows, q_start, slot, cache_len, ancestors, states, out,
        num_tokens, batch, len(state), rows.shape[1], words, heads.key_heads,
        heads.heads // heads.key_heads,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g.stride()[:2],
        *((0, 0) if beta is None else beta.stride()),
        0 if ancestors is None else ancestors.stride(0),
        **sizes, BS=SLOTS, BY_ROW=heads.decays_rows, num_warps=_NUM_WARPS, maxnreg=_REGISTERS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def fold_recurrence(
    state: Tensor,
    rows: Tensor,
    source: Tensor,
    cache_len: Tensor,
    states: Tensor,
    *,
    key_heads: int,
    has_beta: bool,
) -> None:
    """Let the states of all layers see accepted nodes; see `fold_recurrence_reference`."""
    check_path("fold_recurrence", state, rows, source, cache_len, states)
    heads = _Heads.of_rows(state, rows, key_heads, has_beta)
    heads.check("fold_recurrence", state, rows)
    if state.numel() == 0 or source.numel() == 0 or rows.shape[2] == 0:
        return
    sizes = config(heads.key_dim, heads.value_dim)
    batch, num_columns = source.shape
    blocks = triton.cdiv(heads.value_dim, sizes["BV"])
    fold_recurrence_kernel[(blocks, heads.heads, len(state) * batch)](
        state, rows, source, cache_len, states,
        batch, state.shape[1], rows.shape[2], num_columns, source.stride(0), key_heads,
        heads.heads // key_heads,
        **sizes, HAS_BETA=has_beta, BY_ROW=heads.decays_rows,
        num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@dataclass(frozen=True)
class _Heads:
    """What heads of a recurrence look like."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    decays_rows: bool
    has_beta: bool

    @classmethod
    def of_tokens(cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> _Heads:
        given = {"q": q, "k": k, "v": v, "g": g} | ({} if beta is None else {"beta": beta})
        found = ", ".join(f"{n} {list(x.shape)} of {x.dtype}" for n, x in given.items())
        is_right = k.dim() == v.dim() == 3 and q.shape == k.shape and len(v) == len(k)
        is_right = is_right and all(x.dtype in FLOATS for x in given.values())
        if is_right:
            of_heads = (*v.shape[:2],)
            is_right = g.shape in (of_heads, (*of_heads, k.shape[2]))
            is_right = is_right and (beta is None or beta.shape == of_heads)
        check(
            is_right, "tree_recurrence", found,
            "q and k [Nt, HK, DK], v [Nt, HV, DV], g [Nt, HV] or [Nt, HV, DK], beta [Nt, HV] of"
            f" {', '.join(map(str, FLOATS))}",
        )  # fmt: skip
        return cls(
            key_heads=k.shape[1], heads=v.shape[1], key_dim=k.shape[2], value_dim=v.shape[2],
            decays_rows=g.dim() == 3, has_beta=beta is not None,
        )  # fmt: skip

    @classmethod
    def of_rows(cls, state: Tensor, rows: Tensor, key_heads: int, has_beta: bool) -> _Heads:
        check(state.dim() == 5, "fold_recurrence", f"state {list(state.shape)}", "5 dimensions")
        heads, key_dim, value_dim = state.shape[2:]
        decays = rows.shape[-1] - key_heads * key_dim - heads * (value_dim + has_beta)
        return cls(key_heads, heads, key_dim, value_dim, decays != heads, has_beta)

    @property
    def row_width(self) -> int:
        of_head = self.value_dim + (self.key_dim if self.decays_rows else 1) + self.has_beta
        return self.key_heads * self.key_dim + self.heads * of_head

    def check(self, operator: str, state: Tensor, rows: Tensor) -> None:
        is_right = self.key_heads > 0 and self.heads % self.key_heads == 0
        is_right = is_right and self.key_dim <= MAX_KEY_DIM
        check(
            is_right, operator, f"{self.key_heads} key heads of {self.key_dim}, {self.heads} heads",
            f"key heads that divide the others, of at most {MAX_KEY_DIM}",
        )  # fmt: skip
        shape = (self.heads, self.key_dim, self.value_dim)
        is_right = state.shape[-3:] == shape and rows.shape[-1] == self.row_width
        is_right = is_right and state.dtype == rows.dtype == torch.float32
        check(
            is_right, operator,
            f"state {list(state.shape)} of {state.dtype}, rows {list(rows.shape)} of {rows.dtype}",
            f"states {[*shape]} and rows of {self.row_width}, both torch.float32",
        )  # fmt: skip


# of models: Qwen3-Next and 3.5; Kimi-Linear; Mamba-2 of Nemotron-H, Bamba and Granite 4. Columns of
# key and value, beta, decay of rows.
SHIPPED = ((128, 128, True, False), (128, 128, True, True), (128, 64, False, False))


def shipped(capability: int) -> Iterator[Shipped]:
    """The same for every compute capability; models compute what comes in in float32."""
    floats = ("q", "k", "v", "g", "beta", "state", "rows", "out")
    tree: Types = {torch.float32: floats, torch.int64: ("ancestors",)}
    tree |= {torch.int32: ("q_start", "slot", "cache_len", "states")}
    fold = {torch.float32: ("state", "rows"), torch.int32: ("source", "cache_len", "states")}
    options: dict[str, Any] = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
    for key_dim, value_dim, has_beta, by_row in SHIPPED:
        sizes = {**config(key_dim, value_dim), "BY_ROW": by_row, **options}
        name = f"k{key_dim}-v{value_dim}{'-beta' * has_beta}{'-rows' * by_row}"
        for words in (False, True):
            absent = {} if has_beta else {"beta": None}
            absent |= {} if words else {"ancestors": None}
            yield Shipped.of(
                f"tree-{name}{'-words' * words}", tree_recurrence_kernel, tree,
                **sizes, BS=SLOTS, **absent, maxnreg=_REGISTERS,
            )  # fmt: skip
        yield Shipped.of(f"fold-{name}", fold_recurrence_kernel, fold, HAS_BETA=has_beta, **sizes)
