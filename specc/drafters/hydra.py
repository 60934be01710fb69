"""Hydra heads (arXiv:2402.05109): Medusa heads that also read the tokens drafted before.

Head j proposes the token j + 1 after the anchor. It reads h, what is known of the token before the
anchor, beside the embeddings of the anchor and of the j tokens after it: so nodes of a tree have
children of their own. h is the target's hidden state, or, of heads with a prefix layer (Hydra++),
what a layer with a cache of its own makes of those of all tokens.

The draft's program computes h and the first head, and puts out what that head reads after its
logits; steps compute the others, as they go by the tokens that were drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specc.bounds import MOST_IDS, number
from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.drafters.one_pass import OnePass

FACTS = DrafterFacts(
    kind="hydra",
    called="set of Hydra heads",
    passes=Passes.ONE,
    cache=Cache.NONE,
    module="hydra",
    reads_hidden=True,
    methods=("hydra",),
)
# with a prefix layer
PREFIX_FACTS = replace(FACTS, kind="hydra_prefix", cache=Cache.OWN, recomputes=True, methods=())
EMBEDDING = "embed_tokens.weight"
# tensors of a layer
PARTS = ("weight", "bias")
# columns of what the first head reads, in hidden sizes: h, and the embedding of the anchor
FIRST_READS = 2


class HeadLayer(NamedTuple):
    """Parameters of a head by their keys in the weight file, each with a bias.

    Args:
        linear: what its layer multiplies with.
        skip: what the layer adds to that: a projection, of layers that read more than they return;
            empty where it is what the layer reads.
    """

    linear: str
    skip: str = ""


@dataclass(frozen=True)
class HydraHeads(OnePass):
    """Heads that read h of one row; `size` of them, of `num_layers` layers each."""

    facts = FACTS
    mask_token_id: int = number(0, MOST_IDS, default=0)
    from_anchor: bool = True
    kind: str = FACTS.kind

    @property
    def is_possible(self) -> bool:
        is_plain = not (self.is_biased or self.is_flat or self.is_partial or self.confidence)
        is_plain = is_plain and not self.candidates
        reads = self.hidden_columns > 0 and self.hidden_columns % FIRST_READS == 0
        return is_plain and reads and self.from_anchor and self.num_layers > 0

    @property
    def depends_on_path(self) -> bool:
        return True

    @property
    def computes_levels(self) -> bool:
        """A head of as many layers, with a projection to all ids."""
        return True

    @property
    def width(self) -> int:
        """H."""
        return self.hidden_columns // FIRST_READS

    @property
    def tensors(self) -> dict[str, str]:
        """Of the embedding, and of all heads but the first."""
        keys = [EMBEDDING] if self.size > 1 else []
        for head in range(1, self.size):
            names = [projection_of(head)]
            for layer in self.layers_of(head):
                names += [layer.linear, layer.skip] if layer.skip else [layer.linear]
            keys += [f"{name}.{part}" for name in dict.fromkeys(names) for part in PARTS]
        return {self.tensor(key): key for key in keys}

    def tensor(self, key: str) -> str:
        """What steps call a tensor of this key."""
        return f"{self.draft}_{key.replace('.', '_')}"

    def layers_of(self, head: int) -> Iterator[HeadLayer]:
        """Layers of a head, in their order."""
        yield HeadLayer(f"heads.{head}.0.linear", f"heads.{head}.0.skip")
        for layer in range(1, self.num_layers):
            yield HeadLayer(f"heads.{head}.{1 if self.is_tied else layer}.linear")

    def num_read(self, depth: int) -> int:
        return 1

    def num_tapped(self, depth: int, catch_up: int) -> int:
        return self.num_read(depth)

    def num_logits(self, depth: int) -> int:
        """The first head's; those of the others are computed level by level."""
        return 1

    def catch_up(self, depth: int, is_combined: bool) -> int:
        """They read no token of a sequence but the root."""
        return 1

    def describe_logits(self, depth: int) -> str:
        return "a Hydra head"

    def describe(self) -> str:
        return (
            f"{self.size} heads of {self.num_layers} layers, each of which reads the tokens drafted"
            f" before: {self.num_proposed} tokens a pass"
        )

    def pass_inputs(
        self, tokens: Sequence[int], root: int, table: Tensor, depth: int
    ) -> list[Tensor | None]:
        """A row pairs the target's hidden states of a token with the token after it."""
        count = self.num_rows_of(len(tokens))
        rows = torch.arange(root - count, root)
        return [
            torch.tensor(list(tokens[-count:])),
            rows,
            torch.tensor([0, count], dtype=torch.int32),
            rows.int(),
            rows[:1].int(),
            None,
            table,
            torch.tensor([count - 1]),
            torch.stack([rows, torch.full_like(rows, -1)], 1).int(),
        ]

    def num_rows_of(self, num_tokens: int) -> int:
        """Rows of a pass over the last tokens of a sequence."""
        return 1

    def logits_along(
        self, weights: Mapping[str, Tensor], made: Tensor, tokens: Sequence[int], before: int
    ) -> Tensor:
        first, read = made.tensor_split([made.shape[1] - self.hidden_columns], 1)
        found = [first]
        for head, token in enumerate(tokens[1:], start=1):
            read = torch.cat([read, weights[EMBEDDING][token][None]], 1)
            x = read
            for layer in self.layers_of(head):
                x = _linear(weights, layer.skip, x) + F.silu(_linear(weights, layer.linear, x))
            found.append(_linear(weights, projection_of(head), x))
        return torch.cat(found)


@dataclass(frozen=True)
class PrefixHydraHeads(HydraHeads):
    """Heads whose h is what a layer makes of the hidden states of all tokens."""

    facts = PREFIX_FACTS
    kind: str = PREFIX_FACTS.kind

    def num_read(self, depth: int) -> int:
        """Rows of what a step may have accepted."""
        return depth + 1

    def catch_up(self, depth: int, is_combined: bool) -> int:
        """Its layer reads hidden states of what was accepted; the heads, the root."""
        return depth + 2

    def num_rows_of(self, num_tokens: int) -> int:
        return max(1, num_tokens - 1)


def projection_of(head: int) -> str:
    """Key of the projection of a head to ids."""
    return f"lm_heads.{head}"


def _linear(weights: Mapping[str, Tensor], key: str, x: Tensor) -> Tensor:
    """What a layer makes of x; x itself where there is no key."""
    return F.linear(x, *(weights[f"{key}.{part}"] for part in PARTS)) if key else x
