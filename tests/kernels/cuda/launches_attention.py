"""What attention launches; see `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specc.artifact.kv_rows import SCALE_BYTES
from specc.kernels.cuda import (
    attend,
    attend_few,
    attend_latent_few,
    attend_wide,
    invariant_attend,
)
from tests.kernels.cuda.meta_tensors import FLOATS, I32, I64, heads, meta


def attend_calls(chunk: int = 0, stored: torch.dtype | None = None) -> Iterator[Any]:
    # one token, a chain, a tree and a chunk of a prompt; dense rows and pages of 16
    for dtype in FLOATS:
        for size in (64, 80, 96, 128, 256):
            for num_tokens in (1, 8, 16, 512):
                for pages in ((1, 4096), (256, 16)):
                    for is_tree in (True, False):
                        for splits in (1, 5):
                            yield _attend(
                                dtype, size, num_tokens, pages, is_tree, splits, 2,
                                chunk=chunk, stored=stored,
                            )  # fmt: skip


def _invariant_attend_calls() -> Iterator[Any]:
    # one token and a prompt, of which a program has one split of the keys or all; with words or not
    for dtype in FLOATS:
        for size in (64, 80, 96, 128, 256):
            for num_tokens in (1, 4096):
                for is_tree in (True, False):
                    yield _attend(
                        dtype, size, num_tokens, (256, 16), is_tree, None, 2,
                        attend=invariant_attend.invariant_attend,
                    )  # fmt: skip


def attend_few_calls(stored: torch.dtype | None = None) -> Iterator[Any]:
    # elsewhere such a call is one of the kernel for all batches
    if attend.machine(torch.device("meta"))[0] not in attend_few.CAPABILITIES:
        return
    for dtype in attend_few.DTYPES:
        for size in attend_few.HEAD_DIMS:
            # three heads to a KV head, so that 15 rows of 5 tokens take room of 20
            for num_tokens in (1, 5):
                for pages in ((1, 4096), (256, 16)):
                    for is_tree in (True, False):
                        for splits in (1, 5):
                            yield _attend(
                                dtype, size, num_tokens, pages, is_tree, splits, 1, 6, stored=stored
                            )


def _attend_wide_calls() -> Iterator[Any]:
    if attend.machine(torch.device("meta"))[0] not in attend_wide.CAPABILITIES:
        return
    for dtype in attend_wide.DTYPES:
        for size in attend_wide.HEAD_DIMS:
            # rows of one group of warps that multiplies, and of two
            for num_tokens in (16, 32):
                for pages in ((1, 4096), (256, 16)):
                    for is_tree in (True, False):
                        for splits in (1, 5):
                            yield _attend(dtype, size, num_tokens, pages, is_tree, splits, 1)


def _attend(
    dtype: torch.dtype,
    size: int,
    num_tokens: int,
    pages: tuple[int, int],
    is_tree: bool,
    splits: int | None,
    num_seqs: int,
    num_heads: int = 8,
    chunk: int = 0,
    stored: torch.dtype | None = None,
    attend: Callable[..., Tensor] = attend.attend,
) -> Tensor:
    num_pages, block_size = pages
    num_tokens *= num_seqs
    columns = size + (SCALE_BYTES if stored else 0)
    cache = meta(num_pages + 3, block_size, 2, columns, dtype=stored or dtype)
    position, slot = meta(num_tokens, dtype=I64), meta(num_tokens, dtype=I32)
    words = meta(num_tokens, -(-num_tokens // 64), dtype=I64) if is_tree else None
    options = {} if splits is None else {"num_splits": splits}
    return attend(
        heads(num_tokens, num_heads, size, dtype), cache, cache,
        meta(num_seqs + 1, dtype=I32), position, slot,
        meta(num_seqs, dtype=I32), words, meta(num_seqs, num_pages, dtype=I32),
        scale=0.125,
        chunk=chunk,
        **options,
    )  # fmt: skip


def _attend_latent_calls() -> Iterator[Any]:
    # a chunk of a prompt
    for dtype in FLOATS:
        yield from _latents(dtype, 16, 512)


def _attend_latent_few_calls() -> Iterator[Any]:
    # few heads, and those of DeepSeek V3
    for num_heads in (16, 128):
        yield from _latents(attend_latent_few.DTYPE, num_heads, 1)


def _latents(dtype: torch.dtype, num_heads: int, num_tokens: int) -> Iterator[Any]:
    for pages in ((1, 4096), (256, 16)):
        for is_tree in (True, False):
            for splits in (1, 5):
                yield _attend_latent(dtype, num_heads, num_tokens, pages, is_tree, splits)


def _attend_latent(
    dtype: torch.dtype,
    num_heads: int,
    num_tokens: int,
    pages: tuple[int, int],
    is_tree: bool,
    splits: int,
) -> Tensor:
    num_pages, block_size = pages
    cache = meta(num_pages + 3, block_size, 1, 576, dtype=dtype)
    position, slot = meta(num_tokens, dtype=I64), meta(num_tokens, dtype=I32)
    words = meta(num_tokens, -(-num_tokens // 64), dtype=I64) if is_tree else None
    return attend.attend(
        meta(num_heads, num_tokens, 576, dtype=dtype), cache, cache[..., :512],
        meta(2, dtype=I32), position, slot,
        meta(1, dtype=I32), words, meta(1, num_pages, dtype=I32),
        scale=0.125,
        values_in_keys=True,
        num_splits=splits,
    )  # fmt: skip


CALLS: dict[str, Callable[[], Iterator[Any]]] = {
    "attend": attend_calls,
    "attend_few": attend_few_calls,
    "attend_latent": _attend_latent_calls,
    "attend_latent_few": _attend_latent_few_calls,
    "attend_wide": _attend_wide_calls,
    "invariant_attend": _invariant_attend_calls,
}
