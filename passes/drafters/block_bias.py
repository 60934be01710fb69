"""What tokens add to the logits of a block drafter (DSpark, DFlash 2), node by node of a tree.

With U_k the logits of the row for depth k + 1, h_k its hidden state after the last norm, t the
token of a node of depth k, and e = W1[t], logits of the node's children are

    vanilla: U_k + W2 · e
    gated:   U_k + W2 · (σ(G · [h_k; e] + g) * e)
    rnn:     U_k + W2 · tanh(o),  with (f, c, o) = J · [s; e; h_k] + j in thirds,
             and the node leaves its children s' = σ(f) * s + (1 - σ(f)) * tanh(c)
    selector (of DFlash 2): U_k + W2 · (P · h_k * e), of the best tokens of U_k alone

where s is what its parent left, 0 of the root. So a state belongs to a path, not to a depth. Where
a drafter has a head for that, it also says how likely the target accepts what comes after the node:
σ(w · h_k + b), or σ(w · [h_k; e] + b).
Sources: deepseek-ai/DeepSpec deepspec/modeling/dspark/markov_head.py and qwen3/modeling.py; also
vllm-project/speculators models/dspark/markov_head.py and sgl-project/SpecForge
specforge/modeling/draft/dspark_heads.py. Of the selector: z-lab/dflash, `CandidateSelector`.
"""

from __future__ import annotations

import torch
from torch import fx

from specc.drafters.block import CONFIDENCE_TENSORS, GATED, OF_TOKEN, RNN, SELECTOR, BlockDraft
from specc.passes.drafters.path_score import LowRankScore
from specc.passes.drafters.path_states import PathStates
from specc.passes.step.step_graph import StepGraph

aten = torch.ops.aten


class BlockBias(LowRankScore):
    """The score of such a drafter.

    Args:
        block: the drafter.
        asks_confidence: how likely children are accepted is computed along with their logits.
    """

    def __init__(self, block: BlockDraft, asks_confidence: bool = False) -> None:
        super().__init__(block.candidates)
        self.block, self.asks_confidence = block, asks_confidence
        self.has_states = block.bias_kind == RNN
        self._states = PathStates()

    def table(self, g: StepGraph) -> fx.Node:
        return g[f"{self.block.draft}_bias_out"]

    def columns(self, g: StepGraph) -> fx.Node | None:
        return g[f"{self.block.draft}_bias_columns"] if self.block.is_partial else None

    def factors(
        self,
        g: StepGraph,
        tokens: fx.Node,
        hidden: fx.Node | None,
        count: int,
        depth: int,
        parents: fx.Node | None,
    ) -> fx.Node:
        bias_in = g[f"{self.block.draft}_bias_in"]
        known = g.call(aten.embedding.default, bias_in, g.flat(tokens))
        if self.asks_confidence:
            assert hidden is not None
            self.confidence.append(self._confidence(g, hidden, known, count))
        if self.block.bias_kind == GATED:
            assert hidden is not None
            gate = g.call(aten.sigmoid.default, self._joint(g, hidden, known))
            known = g.call(aten.mul.Tensor, gate, known)
        elif self.block.bias_kind == SELECTOR:
            assert hidden is not None
            projection = g[f"{self.block.draft}_bias_joint"]
            projected = g.call(aten.linear.default, hidden, projection)
            known = g.call(aten.mul.Tensor, projected, known)
        elif self.has_states:
            assert hidden is not None
            known = self._step(g, known, hidden, count, depth, parents)
        return known

    def _confidence(self, g: StepGraph, hidden: fx.Node, known: fx.Node, count: int) -> fx.Node:
        weight, offset = (g[f"{self.block.draft}_{name}"] for name in CONFIDENCE_TENSORS)
        read = g.cat(hidden, known) if self.block.confidence == OF_TOKEN else hidden
        found = g.call(aten.sigmoid.default, g.call(aten.linear.default, read, weight, offset))
        return g.reshape(found, g.batch, count)

    def _joint(self, g: StepGraph, *values: fx.Node) -> fx.Node:
        weight, offset = (f"{self.block.draft}_{x}" for x in ("bias_joint", "bias_offset"))
        return g.call(aten.linear.default, g.cat(*values), g[weight], g[offset])

    def _step(
        self,
        g: StepGraph,
        known: fx.Node,
        hidden: fx.Node,
        count: int,
        depth: int,
        parents: fx.Node | None,
    ) -> fx.Node:
        """What W2 takes [B * count, r]; the nodes' states are kept for the depth below."""
        rows = g.multiple(g.batch, count)
        if depth:
            state = self._states.above(g, count, depth, parents)
        else:
            state = g.call(aten.full_like.default, known, 0)
        joint = g.reshape(self._joint(g, state, known, hidden), rows, 3, -1)
        gate, candidate, output = (g.call(aten.select.int, joint, 1, i) for i in range(3))
        gate = g.call(aten.sigmoid.default, gate)
        candidate = g.call(aten.tanh.default, candidate)
        kept = g.call(aten.mul.Tensor, gate, state)
        rest = g.call(aten.mul.Tensor, g.call(aten.rsub.Scalar, gate, 1), candidate)
        left = g.call(aten.add.Tensor, kept, rest)
        self._states.leave(left, count)
        return g.call(aten.tanh.default, output)
