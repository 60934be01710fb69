"""Make the Triton kernels the implementations of the `specc::` operators on a device.

`specc.kernels.ops` gives every operator its oracle, whatever the device; an implementation that is
registered for a device's own dispatch key comes before it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specc.kernels import ops as _ops  # noqa: F401  defines the operators
from specc.kernels.cuda.accept import accept
from specc.kernels.cuda.accept_winners import accept_winners
from specc.kernels.cuda.act_and_mul import act_and_mul
from specc.kernels.cuda.add_norm_gate_up import add_norm_gate_up
from specc.kernels.cuda.add_norm_head import add_norm_head
from specc.kernels.cuda.add_norm_linear import add_norm_linear
from specc.kernels.cuda.add_norm_rope_write import add_norm_rope_write
from specc.kernels.cuda.attend import attend as attend_heads
from specc.kernels.cuda.attend_latent import attend_latent
from specc.kernels.cuda.block_mass import block_mass
from specc.kernels.cuda.commit_kv import commit_kv
from specc.kernels.cuda.draft_children import draft_children
from specc.kernels.cuda.embed_norm_rope_write import embed_norm_rope_write
from specc.kernels.cuda.experts import experts
from specc.kernels.cuda.leave_step import leave_step
from specc.kernels.cuda.linear_q import linear_q
from specc.kernels.cuda.lookup import lookup
from specc.kernels.cuda.merge import ancestor_words, merge_trees, rerank_tree
from specc.kernels.cuda.node_winners import node_winners
from specc.kernels.cuda.rms_norm import add_rms_norm, rms_norm
from specc.kernels.cuda.rope_write import rope_write
from specc.kernels.cuda.rows import commit_rows, next_tokens, tree_rows
from specc.kernels.cuda.skinny_linear import skinny_linear
from specc.kernels.cuda.slab_rows import take_rows, write_rows
from specc.kernels.cuda.tree_expand import tree_expand
from specc.kernels.cuda.trees import image_slots, record_tokens, vote_chain
from specc.kernels.cuda.write_kv import write_kv as write_heads


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    slot: Tensor,
    block_table: Tensor,
    *,
    values_in_keys: bool = False,
) -> None:
    """`specc::write_kv`: of latents, one row of any width for each token."""
    if values_in_keys:
        write_rows(k[0], k_cache.squeeze(2), q_start, slot, block_table)
    else:
        write_heads(k, v, k_cache, v_cache, q_start, slot, block_table)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
    sink_logits: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    sink: int = 0,
    values_in_keys: bool = False,
    rounds_bias: bool = False,
    chunk: int = 0,
) -> Tensor:
    """`specc::attend`, by the kernel for heads of keys and values, or by that for latents."""
    # refused when a model is compiled: passes/rewrite/require_supported.py
    assert sink_logits is None, "no sinks on this device"
    places = q_start, position, slot, cache_len, ancestors, block_table
    if values_in_keys:
        # refused when a model is compiled, too
        assert slopes is None, "no slopes over latents"
        assert not chunk, "no chunks over latents"
        rank = v_cache.shape[3]
        return attend_latent(q, k_cache, rank, *places, scale=scale, window=window, sink=sink)
    return attend_heads(
        q,
        k_cache,
        v_cache,
        *places,
        slopes,
        scale=scale,
        window=window,
        sink=sink,
        rounds_bias=rounds_bias,
        chunk=chunk,
    )


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    position: Tensor,
    slot: Tensor,
    cache_len: Tensor,
    ancestors: Tensor | None,
    block_table: Tensor,
    sink_logits: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    sink: int = 0,
    softcap: float = 0.0,
    rounds_bias: bool = False,
    most_rows: int = 0,
    chunk: int = 0,
) -> Tensor:
    """`specc::tree_attention` of graphs that no pass has split: two launches and more."""
    # refused when a model is compiled, as below
    assert not softcap, "no softcap on this device"
    assert not most_rows, "no rows that are expanded on this device"
    write_kv(k, v, k_cache, v_cache, q_start, slot, block_table)
    return attend(
        q,
        k_cache,
        v_cache,
        q_start,
        position,
        slot,
        cache_len,
        ancestors,
        block_table,
        sink_logits,
        slopes,
        scale=scale,
        window=window,
        sink=sink,
        rounds_bias=rounds_bias,
        chunk=chunk,
    )


KERNELS: dict[str, Callable] = {
    kernel.__name__: kernel
    for kernel in (
        accept_winners, act_and_mul, add_rms_norm, attend, block_mass, commit_kv, commit_rows,
        next_tokens, rms_norm, rope_write, tree_attention, tree_expand, tree_rows, write_kv,
        ancestor_words, image_slots, lookup, merge_trees, record_tokens, rerank_tree, vote_chain,
        accept, draft_children, leave_step, node_winners,
        add_norm_gate_up, add_norm_linear, add_norm_rope_write,
        add_norm_head, embed_norm_rope_write, experts, linear_q, skinny_linear,
        take_rows, write_rows,
    )
}  # fmt: skip
_registered: dict[str, torch.library.Library] = {}


def register(dispatch_key: str = "CUDA") -> None:
    """Use the kernels for tensors of this dispatch key, from now on.

    Args:
        dispatch_key: `CUDA`; `CPU` only where Triton interprets, for tests.
    """
    if dispatch_key in _registered:
        return
    library = torch.library.Library("specc", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, dispatch_key)
    _registered[dispatch_key] = library


def unregister(dispatch_key: str) -> None:
    """Go back to the oracles."""
    _registered.pop(dispatch_key)._destroy()
