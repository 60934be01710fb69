"""What tokens add to the logits of a block drafter (DSpark), node by node of a tree.

With U_k the logits of the row for depth k + 1, h_k its hidden state after the last norm, t the
token of a node of depth k, and e = W1[t], logits of the node's children are

    vanilla: U_k + W2 · e
    gated:   U_k + W2 · (σ(G · [h_k; e] + g) * e)
    rnn:     U_k + W2 · tanh(o),  with (f, c, o) = J · [s; e; h_k] + j in thirds,
             and the node leaves its children s' = σ(f) * s + (1 - σ(f)) * tanh(c)

where s is what its parent left, 0 of the root. So a state belongs to a path, not to a depth. Where
a drafter has a head for that, it also says how likely the target accepts what comes after the node:
σ(w · h_k + b), or σ(w · [h_k; e] + b).
Sources: deepseek-ai/DeepSpec deepspec/modeling/dspark/markov_head.py and qwen3/modeling.py; also
vllm-project/speculators models/dspark/markov_head.py and sgl-project/SpecForge
specforge/modeling/draft/dspark_heads.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from specc.drafters.block import (
    BIAS_TENSORS,
    CONFIDENCE_TENSORS,
    GATED,
    OF_TOKEN,
    RNN,
    BlockDraft,
)
from specc.passes.drafters.block_pass import block_levels
from specc.passes.drafters.path_states import PathStates
from specc.passes.step.step_graph import StepGraph
from specc.speculation.live_nodes import can_cut
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten


@dataclass
class BlockBias:
    """Logits of the children of nodes, level by level from the root on.

    Args:
        block: the drafter.
        levels: what its pass has made of each depth, [B, V] or [B, V + d]: hidden states come after
            the logits where the drafter reads them.
        asks_confidence: how likely children are accepted is computed along with their logits.
    """

    block: BlockDraft
    levels: tuple[fx.Node, ...]
    asks_confidence: bool = False
    # of the nodes that were asked about, [B, count]
    confidence: list[fx.Node] = field(default_factory=list)
    _states: PathStates = field(default_factory=PathStates)

    @classmethod
    def of(cls, g: StepGraph, plan: SpecPlan, block: BlockDraft) -> BlockBias:
        """Of a plan's drafter, after its pass."""
        asks = block.says_confidence and can_cut(plan)
        return cls(block, tuple(block_levels(g, plan, block)), asks)

    @property
    def has_states(self) -> bool:
        """Whether nodes leave something to their children besides their tokens."""
        return self.block.bias_kind == RNN

    def logits_after(
        self,
        g: StepGraph,
        tokens: fx.Node,
        count: int,
        depth: int,
        parents: fx.Node | None = None,
    ) -> fx.Node:
        """Logits [B * count, V] of the children of some nodes of a depth.

        Args:
            g: the stage.
            tokens: [B, count] of the nodes.
            count: nodes of a sequence.
            depth: of all of them; those of a depth are asked about before those below.
            parents: where nodes leave states: the place of each one's parent among the nodes of the
                depth above, in the order in which they were asked about, [count] or [B, count]
                int64; None where that is one node, or the root has none.
        """
        base, hidden = self._level(g, count, depth)
        bias_in, bias_out, columns = (f"{self.block.draft}_{name}" for name in BIAS_TENSORS)
        known = g.call(aten.embedding.default, g[bias_in], g.flat(tokens))
        if self.asks_confidence:
            assert hidden is not None
            self.confidence.append(self._confidence(g, hidden, known, count))
        if self.block.bias_kind == GATED:
            assert hidden is not None
            gate = g.call(aten.sigmoid.default, self._joint(g, hidden, known))
            known = g.call(aten.mul.Tensor, gate, known)
        elif self.has_states:
            assert hidden is not None
            known = self._step(g, known, hidden, count, depth, parents)
        bias = g.call(aten.linear.default, known, g[bias_out])
        if self.block.is_partial:
            bias = g.call(aten.constant_pad_nd.default, bias, [0, 1], 0)
            bias = g.call(aten.index_select.default, bias, 1, g[columns])
        return g.call(aten.add.Tensor, base, bias)

    def _level(self, g: StepGraph, count: int, depth: int) -> tuple[fx.Node, fx.Node | None]:
        """U_k [B * count, V] and h_k [B * count, d]."""
        level, width = self.levels[depth], self.block.hidden_columns
        if count > 1:
            wide = g.call(aten.unsqueeze.default, level, 1)
            wide = g.call(aten.expand.default, wide, [-1, count, -1])
            level = g.call(aten.flatten.using_ints, wide, 0, 1)
        if not width:
            return level, None
        base = g.call(aten.slice.Tensor, level, 1, 0, -width)
        return base, g.last(level, width)

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
