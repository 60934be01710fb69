"""LiLiCorr drafters: files, and a transformer over the candidates of a pass as a score of paths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from specc.drafters.drafter import Drafter
from specc.drafters.lilicorr import (
    FACTS,
    RANKS,
    LiLiCorrDraft,
    Vectors,
    vectors_of,
)
from specc.passes.drafters.block import CompilerBlock
from specc.passes.drafters.block_pass import block_rows, levels_of
from specc.passes.drafters.block_spec import BlockSpec
from specc.passes.drafters.lattice import Lattice
from specc.passes.drafters.lilicorr_config import FILES, earlier_name
from specc.passes.drafters.path_score import Candidates, PathScore
from specc.passes.program import Weight
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten
specc = torch.ops.specc


class PairScore(PathScore):
    """The score of such a drafter: pairs of candidates of neighboring slots.

    Args:
        draft: the drafter.
        rows: what its pass leaves, [(S + 1) * B, V + d]: of each slot, and of the context.
        levels: the same, [B, V + d] each.
    """

    def __init__(self, draft: LiLiCorrDraft, rows: fx.Node, levels: Sequence[fx.Node]) -> None:
        super().__init__()
        self._draft, self._rows, self._levels = draft, rows, levels
        self._candidates = Candidates(draft.candidates)
        self._vectors: Vectors | None = None
        # by slot: logits of candidates [B, K, K] after those of the slot before
        self._pairs: dict[int, fx.Node] = {}

    def logits(
        self,
        g: StepGraph,
        level: fx.Node,
        hidden: fx.Node | None,
        tokens: fx.Node,
        count: int,
        depth: int,
        parents: fx.Node | None,
    ) -> fx.Node:
        if depth not in self._pairs:
            self._pairs[depth] = self._pairs_of(g, depth)
        scores = self._pairs[depth]
        chosen = self._candidates.of_level(g, level, depth)
        if depth:
            scores = g.call(aten.gather.default, scores, 1, self._ranks(g, tokens, count, depth))
        base = g.call(aten.gather.default, level, 1, chosen)
        known = g.call(aten.gt.Scalar, g.call(aten.unsqueeze.default, base, 1), -torch.inf)
        scores = g.call(aten.where.ScalarOther, known, scores, -torch.inf)
        return self._candidates.spread(g, level, chosen, scores, count)

    def _pairs_of(self, g: StepGraph, depth: int) -> fx.Node:
        """[B, K, K] logits of a slot's candidates; of the first slot [B, 1, K]."""
        vectors, count = self._known_vectors(g), self._draft.candidates
        nodes = self._draft.num_proposed * count
        right = g.part(vectors.right, 1, depth * count, (depth + 1) * count, nodes)
        if depth:
            left = g.part(vectors.left, 1, (depth - 1) * count, depth * count, nodes)
        else:
            left = g.call(aten.unsqueeze.default, vectors.start, 1)
        products = g.call(aten.bmm.default, left, g.call(aten.transpose.int, right, 1, 2))
        return g.call(aten.mul.Scalar, products, self._draft.scale)

    def _ranks(self, g: StepGraph, tokens: fx.Node, count: int, depth: int) -> fx.Node:
        """[B, count, K] int64: which of the slot's before the tokens [B, count] are, K times.

        A token that is none of them has a rank all the same, which no draw of its children changes.
        """
        k = self._draft.candidates
        level = g.call(
            aten.slice.Tensor, self._levels[depth - 1], 1, 0, -self._draft.hidden_columns
        )
        above = self._candidates.of_level(g, level, depth - 1)
        is_it = g.call(
            aten.eq.Tensor,
            g.call(aten.unsqueeze.default, tokens, 2),
            g.call(aten.unsqueeze.default, above, 1),
        )
        every = g.expand_rows(g.arange(0, k, 1, torch.int64), k)
        every = g.call(aten.unsqueeze.default, every, 1)
        ranks = g.call(aten.where.ScalarOther, is_it, every, 0)
        ranks = g.call(aten.sum.dim_IntList, ranks, [2], True)
        return g.call(aten.expand.default, ranks, [-1, count, k])

    def _known_vectors(self, g: StepGraph) -> Vectors:
        if self._vectors is None:
            draft, width = self._draft, self._draft.hidden_columns
            slots = draft.num_proposed
            rows = g.reshape(self._rows, slots + 1, g.batch, -1)
            rows = g.call(aten.flatten.using_ints, g.part(rows, 0, 0, slots, slots + 1), 0, 1)
            logits = g.call(aten.slice.Tensor, rows, 1, 0, -width)
            has_context = g.call(aten.gt.Scalar, g["cache_len"], 0)
            self._vectors = vectors_of(
                g.call,
                draft,
                lambda key: g[draft.tensor(key)],
                logits,
                g.last(rows, width),
                g.last(self._levels[-1], width),
                g.call(specc.tree_expand.default, logits, draft.candidates),
                g[f"{draft.name}_relative"],
                g.call(aten.unsqueeze.default, has_context, 1),
            )
        return self._vectors


class CompilerLiLiCorr(CompilerBlock):
    kinds, score = (FACTS.kind,), FILES

    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        assert isinstance(drafter, LiLiCorrDraft)
        rows = block_rows(g, plan, drafter)
        levels = levels_of(g, rows, drafter.num_logits(plan.max_depth))
        g.constant(
            f"{drafter.name}_relative",
            drafter.constants(plan.max_depth)[f"{drafter.name}_relative"],
        )
        return Lattice(drafter, levels, PairScore(drafter, rows, levels))

    def earlier_name(self, tensor: str) -> str:
        return earlier_name(tensor)

    def step_weights(
        self, spec: BlockSpec, dtype: torch.dtype
    ) -> tuple[dict[str, Weight], dict[str, Tensor]]:
        weights, _ = super().step_weights(spec, dtype)
        count = spec.block.candidates
        ranks = torch.arange(count, dtype=torch.float32)
        features = torch.stack([ranks / max(count - 1, 1), (ranks == 0).float()]).to(dtype)
        return weights, {RANKS: features}


DRAFTER = CompilerLiLiCorr()
