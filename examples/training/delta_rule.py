"""The gated delta rule of training: transformers' chunked one, in half of its time on a CPU.

A state S [DK, DV] of each head follows S <- e^g S; S <- S + k (beta (v - S^T k))^T, and a token
reads S^T q. Inside a chunk of tokens the corrections solve a triangular system (arXiv:2412.06464),
so that the state is computed once a chunk. Here the system is solved once for both of its right
sides, and what tokens read is computed for all chunks at a time, without copies of single chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

CHUNK = 32


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = CHUNK,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """What tokens read of the states, as transformers' `torch_chunk_gated_delta_rule` has it.

    Args:
        query: [B, T, HK, DK]; scaled here.
        key: [B, T, HK, DK].
        value: [B, T, HV, DV], HK divides HV.
        g: [B, T, HV], logarithms of decays, 0 or less.
        beta: [B, T, HV].
        chunk_size: C.
        initial_state: [B, HV, DK, DV]; None is zero.
        output_final_state: whether the last state is returned, too.
        use_qk_l2norm_in_kernel: whether queries and keys are brought to length 1.
    Returns:
        [B, T, HV, DV] in the queries' dtype; and the state [B, HV, DK, DV] float32 or None.
    """
    with torch.autocast("cpu", enabled=False):
        read, state = _chunked(
            query, key, value, g, beta, chunk_size, initial_state, use_qk_l2norm_in_kernel
        )
    return read.to(query.dtype), state if output_final_state else None


def _chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    size: int,
    state: Tensor | None,
    is_normed: bool,
) -> tuple[Tensor, Tensor]:
    """As `chunked_delta_rule`; everything is float32, N chunks of C tokens."""
    (rows, length, heads, width), values = key.shape, value.shape[-1]
    group = value.shape[2] // heads
    q, k, v, decay, rate = (_in_chunks(x, size) for x in (query, key, value, g, beta))
    if is_normed:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * width**-0.5
    turned = k.transpose(-1, -2)
    q, k, seen, alike = (
        x.repeat_interleave(group, 1) for x in (q, k, q @ turned, k @ turned)
    )  # [B, HV, N, C, DK] twice, [B, HV, N, C, C] twice
    sums = decay.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    kept = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, float("-inf")).exp()
    since_start, whole = sums.exp()[..., None], sums[..., -1].exp()[..., None, None]
    solved = torch.linalg.solve_triangular(
        alike * kept * rate[..., None],
        torch.cat([v, k * since_start], -1) * rate[..., None],
        upper=False,
        unitriangular=True,
    )
    new, old = solved.split([values, width], -1)
    until_end = (k * (sums[..., -1:] - sums).exp()[..., None]).transpose(-1, -2)
    if state is None:
        state = q.new_zeros(rows, group * heads, width, values)
    state = state.float()
    before, changes = [], []
    for chunk_new, chunk_old, keys, factor in zip(
        *(x.unbind(2) for x in (new, old, until_end, whole)), strict=True
    ):
        before.append(state)
        changes.append(chunk_new - chunk_old @ state)
        state = state * factor + keys @ changes[-1]
    read = (q * since_start) @ torch.stack(before, 2) + (seen * kept) @ torch.stack(changes, 2)
    return read.movedim(1, 3).flatten(1, 2)[:, :length], state


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """[B, T, H, …] → [B, H, N, C, …] float32, filled up with zeros, which change no state."""
    missing = -x.shape[1] % size
    x = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, missing))
    return x.unflatten(1, (-1, size)).movedim(3, 1)


@contextmanager
def fast_delta_rule() -> Iterator[None]:
    """Have transformers' Qwen3.5 compute by `chunked_delta_rule`."""
    own = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked_delta_rule
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = own
