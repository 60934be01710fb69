"""Fake models whose logits follow from the whole text that they attend to.

They keep the token of each row in their cache, and read it back through slots, block table and
ancestors: a row that is missing, stale or another branch's gives other logits, or an error.
"""

from __future__ import annotations

import functools
import zlib

import torch
from torch import Tensor, nn

VOCAB, BLOCK = 9, 4
# in place of a token where a cache holds nothing
NOTHING = -7
NAMES = ("tokens", "positions", "q_start", "slot", "cache_len", "ancestors", "block_table", "rows")


@functools.cache
def logits_of(model: str, text: tuple[int, ...]) -> Tensor:
    """[V] logits after a text, most of them by its last token: texts repeat themselves.

    Drafts are near the target; equal logits are frequent.
    """

    def noise(*names: object) -> Tensor:
        seed = zlib.crc32(repr(names).encode())
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))

    logits = 2.0 * noise(text[-1]) + noise(text)
    if model != "target":
        logits += 0.8 * noise(model, text)
    return (logits * 2).round() / 2


class Reader(nn.Module):
    """A model of `NAMES` as inputs.

    Args:
        slab: [1, 2, blocks, BLOCK, 1, 1] float32, its cache.

    `fed` holds, for each pass, what it was fed: (sequence, slot, position, text) of live tokens.
    """

    def __init__(self, name: str, slab: Tensor) -> None:
        super().__init__()
        self.name, self.slab = name, slab
        self.fed: list[list[tuple[int, int, int, tuple[int, ...]]]] = []
        self.calls: list[dict[str, Tensor | None]] = []

    def forward(self, *inputs: Tensor | None) -> Tensor:
        call = dict(zip(NAMES, inputs, strict=True))
        self.calls.append({k: None if v is None else v.clone() for k, v in call.items()})
        starts = call["q_start"].tolist()
        assert starts[0] == 0
        assert starts[-1] == len(call["tokens"]) == len(call["positions"]) == len(call["slot"])
        owner = [b for b in range(len(starts) - 1) for _ in range(starts[b], starts[b + 1])]
        assert len(owner) == len(call["tokens"])
        slots = call["slot"].tolist()
        for i, b in enumerate(owner):
            if slots[i] >= 0:
                self.write(call["block_table"][b].tolist(), slots[i], int(call["tokens"][i]))
        texts = [self._text_of(call, i, b) if slots[i] >= 0 else None for i, b in enumerate(owner)]
        positions = call["positions"].tolist()
        fed = []
        for i, b in enumerate(owner):
            if texts[i] is not None:
                assert positions[i] == len(texts[i]) - 1, "a position that is not the text's"
                assert NOTHING not in texts[i], "a row that nobody wrote"
                fed.append((b, slots[i], positions[i], texts[i]))
        self.fed.append(fed)
        # nothing may follow from the logits of a dead token
        nothing = torch.full((VOCAB,), float("nan"))
        wanted = [texts[i] for i in call["rows"].tolist()]
        return torch.stack([nothing if t is None else logits_of(self.name, t) for t in wanted])

    def write(self, blocks: list[int], slot: int, token: int) -> None:
        self.slab[:, :, blocks[slot // BLOCK], slot % BLOCK] = token

    def read(self, blocks: list[int], slots: list[int]) -> tuple[int, ...]:
        places = [blocks[s // BLOCK] for s in slots], [s % BLOCK for s in slots]
        return tuple(int(token) for token in self.slab[0, 0, *places].flatten().tolist())

    def _text_of(self, call: dict, i: int, b: int) -> tuple[int, ...] | None:
        """What a live token attends to, itself included; None of a dead node of a tree."""
        slot, length = int(call["slot"][i]), int(call["cache_len"][b])
        blocks = call["block_table"][b].tolist()
        if call["ancestors"] is None:
            assert int(call["positions"][i]) == slot, "causal tokens stand at their positions"
            return self.read(blocks, list(range(slot + 1)))
        words = call["ancestors"][i].tolist()
        region = [j for j in range(64 * len(words)) if words[j // 64] >> (j % 64) & 1]
        if slot - length not in region:
            assert not region
            return None
        return self.read(blocks, [*range(length), *(length + j for j in region)])
