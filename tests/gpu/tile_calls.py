"""Calls of products of few rows with the tile of a candidate, over one weight or another."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specc.kernels.cuda import (
    add_norm_gate_up,
    add_norm_head,
    add_norm_rope_write,
    few_rows,
    skinny_linear,
)
from specc.kernels.cuda.arrivals import counters
from specc.kernels.cuda.dependent import launch_options
from specc.kernels.cuda.experimental import few_rows_variants as variants
from specc.kernels.cuda.few_rows import BLOCK_TOTAL, Tile, precision
from tests.gpu.tile_candidates import Candidate, Shape

EPS = 1e-5
# tokens of a block of the caches, which nothing is written to
BLOCK = 16


class Problem:
    """Operands of a product but its weight; calls leave no trace in them.

    Args:
        shape: of the product.
        rows: of x.
        device: of the tensors.
    """

    def __init__(self, shape: Shape, rows: int, device: torch.device) -> None:
        self.shape, self.rows = shape, rows
        dice = torch.Generator().manual_seed(rows)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=dice).to(device, torch.bfloat16)

        self.x, self.residual = draw(rows, shape.k), draw(rows, shape.k)
        self.gamma = draw(shape.k)
        self.chosen = torch.arange(rows, device=device)
        self.places: tuple[Tensor, ...] = ()
        if shape.head_dim:
            cache = torch.zeros(
                1, BLOCK, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=device
            )
            i32 = {"dtype": torch.int32, "device": device}
            self.places = (
                draw(rows, shape.head_dim), draw(rows, shape.head_dim), cache, cache.clone(),
                torch.tensor([0, rows], **i32), torch.full((rows,), -1, **i32),
                torch.zeros(1, 1, **i32),
            )  # fmt: skip

    @property
    def _normed(self) -> tuple[Any, ...]:
        return self.x, self.residual, self.gamma, EPS, False

    def call(self, candidate: Candidate | None, weight: Tensor) -> tuple[Tensor, ...]:
        """Results with this candidate; None is the library's product beside its own kernels."""
        if candidate is None:
            return self._of_library(weight)
        name = self.shape.operator
        kind = "_now" if candidate.mode == "now" else "_variant"
        return getattr(self, f"{kind}_{name.removeprefix('add_norm_')}")(candidate, weight)

    def _of_library(self, weight: Tensor) -> tuple[Tensor, ...]:
        name = self.shape.operator
        with few_rows.forced(None):
            if name == "skinny_linear":
                return (skinny_linear.skinny_linear(self.x, weight, None),)
            if name == "add_norm_gate_up":
                return add_norm_gate_up.add_norm_gate_up(*self._normed, weight, "silu")
            if name == "add_norm_head":
                return (add_norm_head.add_norm_head(*self._normed, weight, None, self.chosen),)
            q, total = add_norm_rope_write.add_norm_rope_write(
                *self._normed, weight, None, *self.places
            )
            return q.transpose(0, 1), total

    def product_alone(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The library's product, and nothing beside it."""
        return (torch.nn.functional.linear(self.x, weight),)

    def _outputs(self, width: int) -> tuple[Tensor, Tensor]:
        return self.x.new_empty(self.rows, width), torch.empty_like(self.x)

    def _heads(self) -> tuple[Tensor, Tensor]:
        heads = self.shape.n // self.shape.head_dim - 2 * self.shape.kv_heads
        out, total = self._outputs(heads * self.shape.head_dim)
        return out.view(self.rows, heads, self.shape.head_dim), total

    def _now_skinny_linear(self, candidate: Candidate, weight: Tensor) -> tuple[Tensor, ...]:
        out = self.x.new_empty(self.rows, self.shape.n)
        skinny_linear._launch(self.x, weight, None, out, _tile(candidate))
        return (out,)

    def _now_gate_up(self, candidate: Candidate, weight: Tensor) -> tuple[Tensor, ...]:
        out, total = self._outputs(self.shape.n // 2)
        operands = (*self._normed, weight, "silu", out, total)
        add_norm_gate_up._launch(*operands, _tile(candidate))
        return out, total

    def _now_rope_write(self, candidate: Candidate, weight: Tensor) -> tuple[Tensor, ...]:
        out, total = self._heads()
        operands = (*self._normed, weight, None, *self.places, out, total)
        add_norm_rope_write._launch(*operands, _tile(candidate))
        return out, total

    def _now_head(self, candidate: Candidate, weight: Tensor) -> tuple[Tensor, ...]:
        out, tile = self.x.new_empty(self.rows, self.shape.n), _tile(candidate)
        add_norm_head._add_norm_head_kernel[(triton.cdiv(self.shape.n, 2 * tile.block_n),)](
            self.x, self.residual, self.gamma, weight, None, self.chosen, out,
            self.rows, self.rows, self.shape.n, self.shape.k, EPS, 0.0,
            **tile.sizes,
            COPIES=tile.copies(self.gamma.dtype),
            PRECISION=precision(self.x.dtype),
            **launch_options(self.x.dtype),
            **tile.options,
        )  # fmt: skip
        return (out,)

    def _variant_skinny_linear(self, candidate: Candidate, weight: Tensor) -> tuple[Tensor, ...]:
        out, splits = self.x.new_empty(self.rows, self.shape.n), candidate.splits
        blocks = triton.cdiv(self.shape.n, candidate.block_n)
        partial = arrived = None
        if splits > 1:
            partial = self.x.new_empty(splits, self.rows, self.shape.n, dtype=torch.float32)
            arrived = counters(weight, blocks)
        steps = triton.cdiv(triton.cdiv(self.shape.k, candidate.block_k), splits)
        variants.linear_kernel[(blocks, splits)](
            self.x, weight, None, out, partial, arrived, self.rows, self.shape.n, self.shape.k,
            steps,
            **self._options(candidate),
        )  # fmt: skip
        return (out,)

    def _variant_gate_up(self, candidate: Candidate, weight: Tensor) -> tuple[Tensor, ...]:
        size = self.shape.n // 2
        out, total = self._outputs(size)
        variants.gate_up_kernel[(triton.cdiv(size, candidate.block_n),)](
            self.x, self.residual, self.gamma, weight, out, total,
            self.rows, size, self.shape.k, EPS, 0.0,
            ACTIVATION="silu",
            BT=BLOCK_TOTAL,
            COPIES=candidate.copies(),
            **self._options(candidate),
        )  # fmt: skip
        return out, total

    def _variant_head(self, candidate: Candidate, weight: Tensor) -> tuple[Tensor, ...]:
        out = self.x.new_empty(self.rows, self.shape.n)
        variants.head_kernel[(triton.cdiv(self.shape.n, 2 * candidate.block_n),)](
            self.x, self.residual, self.gamma, weight, None, self.chosen, out,
            self.rows, self.rows, self.shape.n, self.shape.k, EPS, 0.0,
            COPIES=candidate.copies(),
            **self._options(candidate),
        )  # fmt: skip
        return (out,)

    def _variant_rope_write(self, candidate: Candidate, weight: Tensor) -> tuple[Tensor, ...]:
        out, total = self._heads()
        cos, sin, k_cache, v_cache, q_start, slot, table = self.places
        num_blocks, block_size, kv_heads, head_dim = k_cache.shape
        heads = out.shape[1]
        per_head = triton.cdiv(head_dim // 2, candidate.block_n)
        variants.rope_write_kernel[((heads + 2 * kv_heads) * per_head,)](
            self.x, self.residual, self.gamma, weight, None, cos, sin, k_cache, v_cache,
            q_start, slot, table, out, total,
            self.rows, 1, heads, kv_heads, num_blocks, 1, block_size, table.stride(0),
            head_dim, self.shape.k, EPS, 0.0,
            cos.stride(0), sin.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
            BT=BLOCK_TOTAL,
            BB=add_norm_rope_write.SEARCH,
            COPIES=candidate.copies(),
            **self._options(candidate),
        )  # fmt: skip
        return out, total

    def _options(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "BM": candidate.block_m,
            "BN": candidate.block_n,
            "BK": candidate.block_k,
            "STAGES": candidate.num_stages,
            "MODE": candidate.mode,
            "IS_EVEN": self.shape.k % candidate.block_k == 0,
            "EVICT": candidate.evict,
            **launch_options(self.x.dtype),
            "num_warps": candidate.num_warps,
            "num_stages": candidate.num_stages,
        }


def _tile(candidate: Candidate) -> Tile:
    return Tile(
        candidate.block_n, candidate.block_k, candidate.num_warps, candidate.num_stages,
        candidate.splits,
    )  # fmt: skip


class Layers:
    """Layers of a model without attention: o, gate_up, down, qkv, each reading what is before it.

    Args:
        shapes: qkv, o, gate_up, down.
        rows: of x.
        device: of the tensors.
    """

    def __init__(self, shapes: tuple[Shape, ...], rows: int, device: torch.device) -> None:
        self.qkv, self.o, self.gate_up, self.down = (Problem(s, rows, device) for s in shapes)

    def run(
        self, chosen: dict[Shape, Candidate | None], weights: list[dict[Shape, Tensor]]
    ) -> Tensor:
        """Results of the last layer's qkv; `weights` are those of each layer."""
        x, rows = self.o.x, self.o.rows
        residual = self.qkv.residual
        for layer in weights:
            self.o.x = x
            (self.gate_up.x,) = self._call(self.o, chosen, layer)
            self.gate_up.residual = residual
            self.down.x, self.qkv.residual = self._call(self.gate_up, chosen, layer)
            (self.qkv.x,) = self._call(self.down, chosen, layer)
            q, residual = self._call(self.qkv, chosen, layer)
            x = q.reshape(rows, -1)
        return x

    @staticmethod
    def _call(
        problem: Problem, chosen: dict[Shape, Candidate | None], layer: dict[Shape, Tensor]
    ) -> tuple[Tensor, ...]:
        return problem.call(chosen[problem.shape], layer[problem.shape])
