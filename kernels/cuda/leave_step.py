"""`specc::leave_step`: what the host reads of a step, and what the next one starts from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda.dependent import launch_options, wait_for_earlier, with_dependent
from specc.kernels.cuda.shipped import Shipped
from specc.kernels.cuda.strided_rows import check, check_tensors, row_strides

NAME = "leave_step"
BLOCK = 64
_STRIDES = ("results_stride", "last_stride", "output_stride", "next_stride")
_COUNTS = ("width", "columns", "num_drafts", "batch", *_STRIDES)


def leave_step(
    results: Tensor,
    last_tokens: Tensor,
    cache_len: Tensor,
    num_accepted: Tensor,
    output_tokens: Tensor,
    next_cache_len: Tensor,
    next_last_tokens: Tensor,
    draft_lens: Tensor | None,
) -> None:
    """See `leave_step_reference`."""
    batch, width = output_tokens.shape
    num_drafts = 0 if draft_lens is None else draft_lens.shape[0]
    rows = {"results": results, "last_tokens": last_tokens, "output_tokens": output_tokens}
    rows |= {"next_last_tokens": next_last_tokens}
    check_tensors(NAME, torch.int64, (batch, "any"), **rows)
    needed = 2 + width + num_drafts
    check(
        results.shape[1] >= needed and next_last_tokens.shape == last_tokens.shape,
        NAME,
        f"results {list(results.shape)}, next_last_tokens {list(next_last_tokens.shape)}",
        f"{needed} columns or more, and {list(last_tokens.shape)}",
    )
    check_tensors(
        NAME, torch.int32, (batch,), is_contiguous=True,
        cache_len=cache_len, num_accepted=num_accepted, next_cache_len=next_cache_len,
    )  # fmt: skip
    if draft_lens is not None:
        shape = (num_drafts, batch)
        check_tensors(NAME, torch.int32, shape, is_contiguous=True, draft_lens=draft_lens)
    if batch:
        leave_step_kernel[(batch,)](
            results, last_tokens, cache_len, num_accepted, output_tokens, next_cache_len,
            next_last_tokens, draft_lens, width, last_tokens.shape[1], num_drafts, batch,
            *row_strides(results, last_tokens, output_tokens, next_last_tokens),
            BLOCK=BLOCK,
            num_warps=1,
            **launch_options(None),
        )  # fmt: skip


def shipped(capability: int) -> Iterator[Shipped]:
    """With and without drafts."""
    wide = ("results", "last_tokens", "output_tokens", "next_last_tokens")
    narrow = ("cache_len", "num_accepted", "next_cache_len", "draft_lens")
    types = {torch.int64: wide, torch.int32: narrow}
    for name, absent in (("off", {"draft_lens": None}), ("drafts", {})):
        item = Shipped.of(name, leave_step_kernel, types, BLOCK=BLOCK, num_warps=1, **absent)
        yield from with_dependent(item, capability, None)


@triton.jit(do_not_specialize=_COUNTS)
def leave_step_kernel(
    results,
    last_tokens,
    cache_len,
    num_accepted,
    output_tokens,
    next_cache_len,
    next_last_tokens,
    draft_lens,
    width,
    columns,
    num_drafts,
    batch,
    results_stride,
    last_stride,
    output_stride,
    next_stride,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_earlier(IS_DEPENDENT)
    i_b = tl.program_id(0).to(tl.int64)
    p_row = results + i_b * results_stride
    length = tl.load(next_cache_len + i_b)
    tl.store(p_row, tl.load(num_accepted + i_b).to(tl.int64))
    tl.store(p_row + 1 + width, length.to(tl.int64))
    # the next step may start before the host has read this one
    tl.store(cache_len + i_b, length)
    for i in range(0, width, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_token = tl.load(output_tokens + i_b * output_stride + o, mask=o < width, other=0)
        tl.store(p_row + 1 + o, b_token, mask=o < width)
    for i in range(0, columns, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_last = tl.load(next_last_tokens + i_b * next_stride + o, mask=o < columns, other=0)
        tl.store(last_tokens + i_b * last_stride + o, b_last, mask=o < columns)
    if draft_lens is not None:
        for i in range(0, num_drafts, BLOCK):
            o = i + tl.arange(0, BLOCK)
            b_len = tl.load(draft_lens + o.to(tl.int64) * batch + i_b, mask=o < num_drafts, other=0)
            tl.store(p_row + 2 + width + o, b_len.to(tl.int64), mask=o < num_drafts)
