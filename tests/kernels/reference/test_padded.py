"""The oracles of padded programs against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specc.kernels.reference.padded import cache_write_reference, masked_attention_reference

BATCH, LENGTH, DIM = 3, 11, 8
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def operands(
    heads: int, kv_heads: int, nodes: int = 5, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a mask in which every token attends to something."""
    q = torch.randn(BATCH, heads, nodes, DIM).to(dtype)
    k, v = (torch.randn(BATCH, kv_heads, LENGTH, DIM).to(dtype) for _ in range(2))
    mask = torch.rand(BATCH, 1, nodes, LENGTH) < 0.4
    mask[..., 2] = True
    return q, k, v, mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("scale", [DIM**-0.5, 0.31])
def test_attention_is_that_of_torch(
    dtype: torch.dtype, heads: int, kv_heads: int, scale: float
) -> None:
    q, k, v, mask = operands(heads, kv_heads, dtype=dtype)
    found = masked_attention_reference(q, k, v, mask, scale)
    wanted = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=mask, scale=scale, enable_gqa=True
    )
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), wanted, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("softcap", [0.0, 0.8])
def test_attention_by_hand(softcap: float) -> None:
    """Head by head and token by token, in float64."""
    q, k, v, mask = operands(6, 2)
    found = masked_attention_reference(q, k, v, mask, 0.5, softcap=softcap)
    for b in range(BATCH):
        for head in range(6):
            for node in range(5):
                rows = mask[b, 0, node].nonzero()[:, 0]
                keys, values = (x[b, head // 3, rows].double() for x in (k, v))
                scores = keys @ q[b, head, node].double() * 0.5
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.softmax(scores, dim=0)
                wanted = weights @ values
                torch.testing.assert_close(found[b, head, node].double(), wanted, **CLOSE)


def test_a_token_that_attends_to_nothing_gets_zeros() -> None:
    q, k, v, mask = operands(4, 2)
    mask[1, 0, 3] = False
    found = masked_attention_reference(q, k, v, mask, 0.3)
    assert torch.equal(found[1, :, 3], torch.zeros(4, DIM))
    mask[1, 0, 3, 0] = True
    others = masked_attention_reference(q, k, v, mask, 0.3)
    torch.testing.assert_close(found[1, :, :3], others[1, :, :3])
    torch.testing.assert_close(others[1, :, 3], v[1, :, 0].repeat_interleave(2, dim=0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_nobody_sees_may_hold_anything(value: float) -> None:
    q, k, v, mask = operands(4, 2)
    mask[:, :, :, 7:] = False
    mask[0, :, :, 4] = False
    wanted = masked_attention_reference(q, k, v, mask, 0.3)
    for cache in (k, v):
        cache[:, :, 7:] = value
        cache[0, :, 4] = value
    assert torch.equal(masked_attention_reference(q, k, v, mask, 0.3), wanted)


def written_row_by_row(cache: Tensor, update: Tensor, write_index: Tensor) -> Tensor:
    """What the operator does, with index_copy of one sequence at a time."""
    rows = torch.arange(update.shape[2])
    return torch.stack(
        [
            cache[b].index_copy(1, first + rows, update[b].to(cache.dtype))
            for b, first in enumerate(write_index.tolist())
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [1, 4, LENGTH])
def test_cache_write_is_index_copy(dtype: torch.dtype, nodes: int) -> None:
    cache = torch.randn(BATCH, 2, LENGTH, DIM).to(dtype)
    update = torch.randn(BATCH, 2, nodes, DIM).to(dtype)
    write_index = torch.tensor([0, (LENGTH - nodes) // 2, LENGTH - nodes])
    before = cache.clone()
    found = cache_write_reference(cache, update, write_index)
    assert torch.equal(found, written_row_by_row(cache, update, write_index))
    assert torch.equal(cache, before), "functional"
    assert found.dtype is dtype


@pytest.mark.parametrize("index", [[0, -1, 2], [0, 8, 2]], ids=["front", "end"])
def test_writes_past_the_cache_are_refused(index: list[int]) -> None:
    """Runtimes drop them without a word."""
    cache, update = torch.zeros(BATCH, 2, LENGTH, DIM), torch.ones(BATCH, 2, 4, DIM)
    with pytest.raises(IndexError, match=f"of a cache of {LENGTH}"):
        cache_write_reference(cache, update, torch.tensor(index))
    cache_write_reference(cache, update, torch.tensor([0, 7, 2]))
