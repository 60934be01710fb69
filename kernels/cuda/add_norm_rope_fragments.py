"""`specc::add_norm_rope_write`, by weights in fragments too: their launches.

Few rows are one launch; more are the norm, `linear_q` and `rope_write`. No GPU has run the kernel:
it is compiled for all capabilities, and emulated.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.kernels.cuda import add_norm_rope_write as plain
from specc.kernels.cuda.add_norm_fragments import (
    checked_layout,
    constexprs_of,
    num_programs,
    tile_name,
    unfused,
)
from specc.kernels.cuda.add_norm_rope_fragments_kernels import add_norm_rope_fragments_kernel
from specc.kernels.cuda.dependent import launch_options, with_dependent
from specc.kernels.cuda.few_rows import in_rows, normed_tile_for
from specc.kernels.cuda.few_rows_tiles import FRAGMENT_LAYOUTS, all_normed_tiles
from specc.kernels.cuda.linear_q_fragments import DTYPE
from specc.kernels.cuda.rope_write import rope_write
from specc.kernels.cuda.shipped import TYPE_NAMES, Shipped


def add_norm_rope_write(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    unit_offset: bool,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
    layout: str = "",
) -> tuple[Tensor, Tensor]:
    """See `add_norm_rope_write_reference`."""
    operands = x, residual, gamma, eps, unit_offset, weight, bias
    places = k_cache, v_cache, q_start, slot, block_table
    if not layout:
        return plain.add_norm_rope_write(*operands, cos, sin, *places)
    num_tokens, size = x.shape[:-1].numel(), weight.shape[0] * BLOCK
    # what has as many outputs
    outputs = weight.new_empty(size, 0)
    num_heads, kv_heads, head_dim = plain.heads_of(plain.NAME, num_tokens, outputs, k_cache, slot)
    order = checked_layout(plain.NAME, x, residual, gamma, weight, bias, layout, head_dim // 2)
    tile = normed_tile_for(plain.NAME, x, size, order.unpaired.name)
    if tile is None:
        y, total = unfused(*operands, order)
        heads = y.view(num_tokens, -1, head_dim).transpose(0, 1)
        q, k, v = heads.split([num_heads, kv_heads, kv_heads])
        return rope_write(q, k, v, cos, sin, *places), total
    plain.check_places(plain.NAME, x, cos, sin, *places)
    out, total = x.new_empty(num_tokens, num_heads, head_dim), x.new_empty(x.shape)
    if x.numel():
        rows, (num_blocks, block_size) = in_rows(x), k_cache.shape[:2]
        num_seqs, num_pages = block_table.shape
        add_norm_rope_fragments_kernel[(num_programs(tile, size, x.device),)](
            rows, in_rows(residual), gamma, weight.view(torch.int32), weight.view(torch.float32),
            rows if bias is None else bias, cos, sin, *places, out, total,
            num_tokens, num_seqs, num_heads, kv_heads, num_blocks, num_pages, block_size,
            block_table.stride(0), 0 if bias is None else size, head_dim, rows.shape[1],
            float(eps), float(unit_offset),
            cos.stride(0), sin.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
            **constexprs_of(order, tile),
            num_warps=tile.num_warps,
            maxnreg=tile.registers,
            **launch_options(x.dtype, tile.starts_early),
        )  # fmt: skip
    return out.transpose(0, 1), total


def shipped(capability: int) -> Iterator[Shipped]:
    """Every tile of every layout that has them."""
    names = ("x", "residual", "gamma", "bias", "cos", "sin", "k_cache", "v_cache", "out", "total")
    places = ("q_start", "slot", "block_table")
    for name in FRAGMENT_LAYOUTS:
        layout = QuantizedLayout.named(name)
        pointers = dict.fromkeys(names, f"*{TYPE_NAMES[DTYPE]}") | dict.fromkeys(places, "*i32")
        pointers |= {"weight": "*i32", "scales": "*fp32"}
        integers = (*plain.COUNTS, "bias_size", "D", "K", *plain.STRIDES)
        for tile in all_normed_tiles(layout.name, capability):
            item = Shipped(
                name=f"{layout.name}-{tile_name(tile)}",
                kernel=add_norm_rope_fragments_kernel,
                signature=pointers
                | dict.fromkeys(integers, "i32")
                | {"eps": "fp32", "offset": "fp32"},
                constexprs=constexprs_of(layout, tile),
                num_warps=tile.num_warps,
                num_stages=3,
                max_registers=tile.registers,
                divisible=(*pointers, "D", "K", *plain.STRIDES),
            )
            yield from with_dependent(item, capability, DTYPE)
