"""`specc::attend_expanded`: many tokens of a sequence attend to what its latents expand to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_loops import BUSHY, NAN, tree_tokens

# no two are the same; of keys, of the part that heads share, of values, and of the latent
OWN, SHARED, VALUE, RANK, HEADS = 5, 3, 7, 6, 4
SINKS = [0.5, 9.0, -9.0, -2.0]


def i32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Pass:
    """Sequences with caches of latents, and the same caches expanded for each head.

    Args:
        lengths: rows that each sequence has before the pass.
        counts: its tokens in the pass; -1 is a tree of 12 nodes.
        dead: tokens that are none.
        sizes: of own, shared, value, rank and heads.
    """

    def __init__(
        self,
        lengths: list[int],
        counts: list[int],
        dtype: torch.dtype = torch.float32,
        dead: tuple[int, ...] = (),
        sizes: tuple[int, ...] = (OWN, SHARED, VALUE, RANK, HEADS),
        block_size: int = 8,
    ) -> None:
        torch.manual_seed(0)
        own, shared, value, self.rank, heads = sizes
        self.is_tree = -1 in counts
        tokens = [
            tree_tokens(BUSHY, length) if count < 0 else list(range(length, length + count))
            for length, count in zip(lengths, counts, strict=True)
        ]
        slots, positions, words, self.starts = [], [], [], [0]
        for length, items in zip(lengths, tokens, strict=True):
            for i, item in enumerate(items):
                is_node = not isinstance(item, int)
                slots.append(length + i)
                positions.append(item.position if is_node else item)
                seen = item.nodes if is_node else range(i + 1)
                words.append([sum(1 << node for node in seen)])
            self.starts.append(len(slots))
        slots = [-1 if i in dead else slot for i, slot in enumerate(slots)]
        columns = max(-(-(n + len(x)) // block_size) for n, x in zip(lengths, tokens, strict=True))
        table = torch.randperm(len(lengths) * columns).view(len(lengths), columns).int()
        draw = lambda *shape: torch.randn(shape).to(dtype)  # noqa: E731
        # what nobody has written may be anything
        self.latents = torch.full((table.numel(), block_size, 1, self.rank + shared), NAN).to(dtype)
        for b, (length, first) in enumerate(zip(lengths, self.starts[:-1], strict=True)):
            written = [*range(length), *(x for x in slots[first : self.starts[b + 1]] if x >= 0)]
            for slot in written:
                self.latents[table[b, slot // block_size], slot % block_size] = draw(
                    1, self.rank + shared
                )
        # views of one weight, as models have them
        whole = draw(heads, own + value, self.rank)
        self.up_k, self.up_v = whole[:, :own], whole[:, own:]
        self.q, self.absorbed = (
            draw(heads, len(slots), own + shared),
            draw(heads, len(slots), value),
        )
        self.rest = (
            i32(self.starts),
            torch.tensor(positions),
            i32(slots),
            i32(lengths),
            torch.tensor(words) if self.is_tree else None,
            table,
        )

    def expanded(self, implementation: Any, **options: Any) -> Tensor:
        operands = self.absorbed, self.q, self.latents, self.up_k, self.up_v
        return implementation.attend_expanded(*operands, *self.rest, **options)

    def over_expanded_rows(self, implementation: Any, **options: Any) -> Tensor:
        """Attention as it is where caches hold keys and values of each head."""
        latent, shared = self.latents.split([self.rank, self.latents.shape[3] - self.rank], -1)
        own, values = (
            torch.einsum("bsr,hnr->bshn", latent[:, :, 0].float(), up.float()).to(self.q.dtype)
            for up in (self.up_k, self.up_v)
        )
        keys = torch.cat([own, shared.expand(-1, -1, own.shape[2], -1)], -1)
        table, slots = self.rest[5], self.rest[2]
        size, of_pass = self.latents.shape[1], []
        for b, first in enumerate(self.starts[:-1]):
            for slot in slots[first : self.starts[b + 1]].clamp(min=0).tolist():
                of_pass.append((table[b, slot // size], slot % size))
        k, v = (torch.stack([x[at] for at in of_pass], 1) for x in (keys, values))
        attend = implementation.tree_attention
        return attend(self.q, k, v, keys.clone(), values.clone(), *self.rest, **options)


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("counts", "dead"), [((4, 9, 0, 30), 12), ((4, -1, 0, 30), 15)], ids=["causal", "tree"]
)
def test_long_sequences_alone(implementation, counts, dead, dtype):
    """The others keep what absorbed attention gave, and a dead token gives zero."""
    made = Pass([5, 0, 3, 17], list(counts), dtype, dead=(dead,))
    options = {"scale": 0.3, "softcap": 2.0}
    sinks = torch.tensor(SINKS).to(dtype)
    found = made.expanded(implementation, sink_logits=sinks, most_rows=4, **options)
    wanted = made.over_expanded_rows(implementation, sink_logits=sinks, **options)
    assert_alike(found[:, 4:], wanted[:, 4:])
    assert not found[:, dead].any()
    assert torch.equal(found[:, :4], made.absorbed[:, :4])
    assert found.transpose(0, 1).is_contiguous()


def test_dead_tokens_alone_give_zero(implementation):
    made = Pass([3], [6], dead=tuple(range(6)))
    assert not made.expanded(implementation, scale=1.0, most_rows=2).any()


def test_more_rows_and_heads_than_are_expanded_at_once(implementation):
    """1,024 latents are gathered at a time, and nine of these heads fit into 32 MiB."""
    made = Pass([2990], [10], sizes=(152, 8, 128, 4, 12))
    found = made.expanded(implementation, scale=0.1, most_rows=9)
    assert_alike(found, made.over_expanded_rows(implementation, scale=0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_of_projections_with_room_between_them(implementation, dtype):
    """More outputs than a block of them holds, an odd number of columns, and NaN beside them."""
    made = Pass([5, 3], [9, 6], dtype, sizes=(37, 3, 66, 9, 2))
    wanted = made.over_expanded_rows(implementation, scale=0.1)
    for name in ("up_k", "up_v"):
        up = getattr(made, name)
        wide = torch.full((*up.shape[:2], 12), NAN, dtype=dtype)
        wide[..., :9] = up
        setattr(made, name, wide[..., :9])
    assert_alike(made.expanded(implementation, scale=0.1, most_rows=4), wanted)


def test_attention_over_latents_leaves_them_out(implementation):
    """Rows are written, also of dead tokens' neighbours; outputs are zero."""
    made = Pass([5, 0], [3, 9], dead=(4,))
    row = torch.randn(1, 12, RANK + SHARED)
    queries = torch.randn(HEADS, 12, RANK + SHARED)
    found = []
    for most in (0, 3):
        caches = made.latents.clone(), made.latents.clone()[..., :RANK].contiguous()
        out = implementation.tree_attention(
            queries, row, row[..., :RANK], *caches, *made.rest, scale=0.3, most_rows=most
        )
        found.append((out, *caches))
    (whole, *wanted), (cut, *rows) = found
    assert torch.equal(cut[:, :3], whole[:, :3])
    assert whole[:, 3].any()
    assert not cut[:, 3:].any()
    for before, after in zip(wanted, rows, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
