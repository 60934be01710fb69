"""XPress drafters (arXiv:2608.02438): a refiner that mixes what is known of all rows before.

DFlash's pass leaves logits U_k and hidden states h_k of all B rows of a block. With t_k the token
before the one that row k proposes (of the anchor's row, where masks alone propose, the token before
the anchor), in r columns,

    a_k = I [D h_k; G mean_j h_j; T[t_k]];   c_k = a_k + Σ_{j ≤ k} M[:, k, j] * a_j
    logits = U_k + R (c_k + W₃ (silu(W₁ c_k) * W₂ c_k))

So a node leaves its a and those of all nodes above it to its children. Its authors guess all
tokens, and go through the block again until none changes; here logits are those after the path of
each node, level by level, which every rule may be told of.
Source: vllm-project/speculators models/xpress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specc.drafters import block
from specc.drafters.facts import DrafterFacts
from specc.drafters.scored_block import Call, ScoredBlock, run

aten = torch.ops.aten

FACTS: DrafterFacts = replace(block.DFLASH2_FACTS, kind="xpress", module="xpress", methods=())
PREFIX = "refiner_head."
# [V, r], [r, d] both, [r, 3 r], [r, B, B], [m, r] both, [r, m], [Vd, r]
TOKENS, OF_ROW, OF_ALL, JOINT, MIX, GATE, UP, DOWN, TABLE = _KEYS = tuple(
    PREFIX + name
    for name in (
        "token_embed.weight", "down_h.weight", "down_g.weight", "in_proj.weight", "mix_l",
        "mlp_gate.weight", "mlp_up.weight", "mlp_down.weight", "readout.weight",
    )
)  # fmt: skip


@dataclass(frozen=True)
class XPressDraft(ScoredBlock):
    """The refiner has `inner_width` columns."""

    facts = FACTS
    columns = f"{PREFIX}columns"

    @property
    def is_possible(self) -> bool:
        return super().is_possible and self.inner_width > 0 and not self.candidates

    @property
    def parameters(self) -> Sequence[str]:
        return (*_KEYS, *((self.columns,) if self.is_partial else ()))

    def logit_places(self, before: int, depth: int) -> Tensor:
        """Rows that propose, all of them whatever the depth is; then those that do not."""
        return before + torch.arange(self.size).roll(-self.first_row)

    def num_logits(self, depth: int) -> int:
        return self.size

    def describe_logits(self, depth: int) -> str:
        return f"{self.num_proposed} tokens of a block"

    def logits_along(
        self, weights: Mapping[str, Tensor], made: Tensor, tokens: Sequence[int], before: int
    ) -> Tensor:
        logits, hidden = made.tensor_split([made.shape[1] - self.hidden_columns], 1)
        hidden, mean = hidden.roll(self.first_row, 0), hidden.mean(0, keepdim=True)
        read = [before, *tokens] if self.first_row else tokens
        known, found = None, []
        for row, token in enumerate(read):
            own = (hidden[row, None], mean, torch.tensor([token], device=made.device))
            known = entered(run, weights.__getitem__, *own, known)
            if row >= self.first_row:
                found.append(refined(run, weights.__getitem__, known, self.inner_width, row))
        added = F.linear(torch.cat(found), weights[TABLE])
        if self.is_partial:
            added = F.pad(added, (0, 1)).index_select(1, weights[self.columns])
        return logits[: len(tokens)] + added

    def describe(self) -> str:
        return (
            f"{self.describe_pass()}; a refiner of {self.inner_width} columns corrects logits by"
            " all rows and tokens of the block before"
        )


def entered(
    call: Call, weights: Callable[[str], Any], hidden: Any, mean: Any, tokens: Any, above: Any
) -> Any:
    """[n, (k + 1) r]: a of rows k beside those of the rows before, which are [n, k r], or None.

    Args:
        call: an operator.
        weights: key → tensor.
        hidden: [n, d] of rows k.
        mean: [n, d] of all rows of each one's block.
        tokens: [n] int64 before what the rows propose.
    """
    parts = [
        call(aten.linear.default, hidden, weights(OF_ROW)),
        call(aten.linear.default, mean, weights(OF_ALL)),
        call(aten.embedding.default, weights(TOKENS), tokens),
    ]
    own = call(aten.linear.default, call(aten.cat.default, parts, 1), weights(JOINT))
    return own if above is None else call(aten.cat.default, [above, own], 1)


def refined(call: Call, weights: Callable[[str], Any], known: Any, width: int, row: int) -> Any:
    """[n, r] that the table is multiplied with, of what `entered` returns for a row k."""
    rows = call(aten.reshape.default, known, [-1, row + 1, width])
    mix = call(aten.select.int, weights(MIX), 1, row)
    mix = call(aten.transpose.int, call(aten.slice.Tensor, mix, 1, 0, row + 1), 0, 1)
    mixed = call(aten.sum.dim_IntList, call(aten.mul.Tensor, rows, mix), [1])
    x = call(aten.add.Tensor, call(aten.select.int, rows, 1, row), mixed)
    gate = call(aten.silu.default, call(aten.linear.default, x, weights(GATE)))
    gated = call(aten.mul.Tensor, gate, call(aten.linear.default, x, weights(UP)))
    return call(aten.add.Tensor, x, call(aten.linear.default, gated, weights(DOWN)))
