"""What layers that keep states launch; see `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specc.kernels.cuda import tree_conv, tree_recurrence
from tests.kernels.cuda.meta_tensors import I32, I64, meta

# tokens of a pass, sequences: a chunk of a prompt, plain decoding, trees; nothing that is 1, or a
# multiple of 16, makes another binary
_PASSES = ((512, 1), (1, 1), (16, 16), (48, 4))
_NUM_ROWS = 11


def _where(num_tokens: int, batch: int, words: bool) -> tuple[Tensor | None, ...]:
    return (
        meta(batch + 1, dtype=I32), meta(num_tokens, dtype=I32), meta(batch, dtype=I32),
        meta(num_tokens, 1, dtype=I64) if words else None, meta(batch, 2, dtype=I32),
    )  # fmt: skip


def _paths() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for batch, num_columns in ((1, 1), (16, 16), (3, 8), (4, 1024)):
        source, length = meta(batch, num_columns, dtype=I32), meta(batch, dtype=I32)
        yield source, length, meta(batch, 2, dtype=I32)


def _tree_conv_calls() -> Iterator[Any]:
    dtype = torch.bfloat16
    for width, has_bias, is_silu in tree_conv.SHIPPED:
        state = meta(2, 5, width - 1, 640, dtype=dtype)
        rows = meta(2, 5, _NUM_ROWS, 640, dtype=dtype)
        weight = meta(640, width, dtype=dtype)
        bias = meta(640, dtype=dtype) if has_bias else None
        for num_tokens, batch in _PASSES:
            # the first of several projections
            x = meta(num_tokens, 1024, dtype=dtype)[:, :640]
            for words in (False, True):
                yield tree_conv.tree_conv(
                    x, weight, bias, state[0], rows[0], *_where(num_tokens, batch, words),
                    activation="silu" if is_silu else "",
                )  # fmt: skip
        for path in _paths():
            yield tree_conv.fold_conv(state, rows, *path)


def _tree_recurrence_calls() -> Iterator[Any]:
    for key_dim, value_dim, has_beta, by_row in tree_recurrence.SHIPPED:
        # more value heads than key heads, and as many
        for key_heads, heads in ((2, 6), (16, 16)):
            of_head = value_dim + (key_dim if by_row else 1) + has_beta
            width = key_heads * key_dim + heads * of_head
            state, rows = meta(2, 5, heads, key_dim, value_dim), meta(2, 5, _NUM_ROWS, width)
            for num_tokens, batch in _PASSES:
                k = meta(num_tokens, key_heads, key_dim)
                # values lie beside what else is projected
                v = meta(num_tokens, 2 * heads, value_dim)[:, :heads]
                g = meta(num_tokens, heads, *([key_dim] if by_row else []))
                beta = meta(num_tokens, heads) if has_beta else None
                for words in (False, True):
                    where = _where(num_tokens, batch, words)
                    yield tree_recurrence.tree_recurrence(
                        k, k, v, g, beta, state[0], rows[0], *where
                    )
            for path in _paths():
                yield tree_recurrence.fold_recurrence(
                    state, rows, *path, key_heads=key_heads, has_beta=has_beta
                )


CALLS: dict[str, Callable[[], Iterator[Any]]] = {
    "tree_conv": _tree_conv_calls,
    "tree_recurrence": _tree_recurrence_calls,
}
