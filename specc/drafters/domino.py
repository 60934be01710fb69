"""Domino drafters (arXiv:2605.29707): a recurrent state of the tokens before corrects logits.

DFlash's pass leaves logits U_k and hidden states z_k of B - 1 rows. With E the embedding, and s a
state that goes from token to token, of the anchor, from 0,

    s ← GRU(E[token], s);   logits after it = U_k + W₂ · silu(W₁ [z_k; s])

but after the anchor, U_1 alone. So nodes of a tree leave states to their children.
Source: sgl-project/sglang srt/speculative/domino_utils.py and srt/models/dflash.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specc.drafters import block
from specc.drafters.facts import DrafterFacts
from specc.drafters.scored_block import EMBEDDING, Call, ScoredBlock, run

aten = torch.ops.aten

FACTS: DrafterFacts = replace(block.DFLASH2_FACTS, kind="domino", module="domino", methods=())
# of the GRU [3 g, d] and [3 g, g], reset, update and candidate; W₁ [e, d + g] and W₂ [rows, e]
OF_TOKENS, OF_STATES = "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"
JOINT, TABLE = "embed_proj.0.weight", "embed_proj.2.weight"


@dataclass(frozen=True)
class DominoDraft(ScoredBlock):
    """The state has `inner_width` columns. A block of B rows proposes B - 1 tokens, from the
    anchor's row on or from the first mask's.
    """

    facts = FACTS
    columns = "embed_proj.columns"

    @property
    def num_proposed(self) -> int:
        return self.size - 1

    @property
    def is_possible(self) -> bool:
        return super().is_possible and self.inner_width > 0 and not self.candidates

    @property
    def parameters(self) -> Sequence[str]:
        partial = (self.columns,) if self.is_partial else ()
        return (EMBEDDING, OF_TOKENS, OF_STATES, JOINT, TABLE, *partial)

    def logits_along(
        self, weights: Mapping[str, Tensor], made: Tensor, tokens: Sequence[int], before: int
    ) -> Tensor:
        logits, hidden = made[: len(tokens)].tensor_split([made.shape[1] - self.hidden_columns], 1)
        recurrent = weights[OF_TOKENS], weights[OF_STATES]
        state, states = None, []
        for token in tokens:
            known = weights[EMBEDDING][token][None]
            state = next_state(run, self.inner_width, known, state, recurrent)
            states.append(state)
        read = torch.cat([hidden, torch.cat(states)], 1)
        added = F.linear(F.silu(F.linear(read, weights[JOINT])), weights[TABLE])
        if self.is_partial:
            added = F.pad(added, (0, 1)).index_select(1, weights[self.columns])
        return torch.cat([logits[:1], logits[1:] + added[1:]])

    def describe(self) -> str:
        return (
            f"{self.describe_pass()}; a recurrent state of {self.inner_width} columns, of all"
            " tokens of the block before, corrects logits"
        )


def next_state(call: Call, width: int, known: Any, state: Any, weights: Sequence[Any]) -> Any:
    """What tokens leave [n, g], of tensors or into a graph.

    Args:
        call: an operator.
        width: g.
        known: [n, d] embeddings of the tokens.
        state: [n, g] before them; None is 0.
        weights: `OF_TOKENS` and `OF_STATES`.
    """

    def thirds(x: Any, weight: Any) -> list[Any]:
        rows = call(aten.reshape.default, call(aten.linear.default, x, weight), [-1, 3, width])
        return [call(aten.select.int, rows, 1, i) for i in range(3)]

    reset, update, candidate = thirds(known, weights[0])
    if state is not None:
        reset_before, update_before, before = thirds(state, weights[1])
        reset = call(aten.sigmoid.default, call(aten.add.Tensor, reset, reset_before))
        update = call(aten.add.Tensor, update, update_before)
        candidate = call(aten.add.Tensor, candidate, call(aten.mul.Tensor, reset, before))
    update, candidate = call(aten.sigmoid.default, update), call(aten.tanh.default, candidate)
    made = call(aten.mul.Tensor, call(aten.rsub.Scalar, update, 1), candidate)
    if state is None:
        return made
    return call(aten.add.Tensor, made, call(aten.mul.Tensor, update, state))
