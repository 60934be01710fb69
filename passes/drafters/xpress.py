"""XPress drafters: what their files say, and a score of paths by a refiner of a block's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import fx

from specc.drafters.block import BlockDraft
from specc.drafters.drafter import Drafter
from specc.drafters.xpress import (
    DOWN,
    FACTS,
    GATE,
    JOINT,
    MIX,
    OF_ALL,
    OF_ROW,
    TABLE,
    TOKENS,
    UP,
    XPressDraft,
    entered,
    refined,
)
from specc.passes.drafters.block import CompilerBlock
from specc.passes.drafters.block_parts import ScoreFiles, ShapesOf, required
from specc.passes.drafters.block_pass import block_rows, levels_of
from specc.passes.drafters.lattice import Lattice
from specc.passes.drafters.path_score import LowRankScore, wide
from specc.passes.drafters.path_states import PathStates
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten

_RANK, _RATIO = "xpress_rank", "xpress_mlp_ratio"


class RefinerScore(LowRankScore):
    """The score of such a drafter; nodes leave what the refiner mixes to their children.

    Args:
        draft: the drafter.
        levels: what its pass leaves, [B, V + d] of each row of a block, as `logit_places` has them.
    """

    has_states = True

    def __init__(self, draft: XPressDraft, levels: list[fx.Node]) -> None:
        super().__init__()
        self._draft, self._levels, self._states = draft, levels, PathStates()
        self._mean: fx.Node | None = None

    def factors(
        self,
        g: StepGraph,
        tokens: fx.Node,
        hidden: fx.Node | None,
        count: int,
        depth: int,
        parents: fx.Node | None,
    ) -> fx.Node:
        assert hidden is not None
        above = self._states.above(g, count, depth, parents) if depth else self._first(g)
        mean = wide(g, self._mean_of(g), count)
        known = entered(g.call, self._weights(g), hidden, mean, g.flat(tokens), above)
        self._states.leave(known, count)
        row = depth + self._draft.first_row
        return refined(g.call, self._weights(g), known, self._draft.inner_width, row)

    def table(self, g: StepGraph) -> fx.Node:
        return self._weights(g)(TABLE)

    def columns(self, g: StepGraph) -> fx.Node | None:
        return self._weights(g)(self._draft.columns) if self._draft.is_partial else None

    def _first(self, g: StepGraph) -> fx.Node | None:
        """What the anchor's row knows where it proposes nothing: it follows the token before."""
        if not self._draft.first_row:
            return None
        last = g["last_tokens"]
        root, before = g.last(last, 1), g.call(aten.slice.Tensor, last, 1, -2, -1)
        is_there = g.call(aten.gt.Scalar, g.call(aten.unsqueeze.default, g["cache_len"], 1), 0)
        before = g.flat(g.call(aten.where.self, is_there, before, root))
        hidden = g.last(self._levels[-1], self._draft.hidden_columns)
        return entered(g.call, self._weights(g), hidden, self._mean_of(g), before, None)

    def _mean_of(self, g: StepGraph) -> fx.Node:
        """[B, d] of hidden states of a block's rows."""
        if self._mean is None:
            rows = [g.last(level, self._draft.hidden_columns) for level in self._levels]
            stacked = g.call(aten.stack.default, rows, 1)
            total = g.call(aten.sum.dim_IntList, stacked, [1])
            self._mean = g.call(aten.mul.Scalar, total, 1 / len(rows))
        return self._mean

    def _weights(self, g: StepGraph) -> Any:
        return lambda key: g[self._draft.tensor(key)]


def read_xpress(
    values: Mapping[str, Any], block: BlockDraft, layers: Any, name: str
) -> tuple[XPressDraft, ShapesOf]:
    """See `ScoreFiles.read`. How often its authors go through a block says nothing here.

    Raises:
        HeadError: a key is missing, or no size.
    """
    (r, ratio), d, b = required(values, (_RANK, _RATIO), name), int(layers.hidden_size), block.size

    def shapes(num_rows: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
        return {
            TOKENS: (vocab_size, r), OF_ROW: (r, d), OF_ALL: (r, d), JOINT: (r, 3 * r),
            MIX: (r, b, b), GATE: (ratio * r, r), UP: (ratio * r, r), DOWN: (r, ratio * r),
            TABLE: (num_rows, r),
        }  # fmt: skip

    return XPressDraft(**asdict(block) | {"inner_width": r}), shapes


class CompilerXPress(CompilerBlock):
    kinds = (FACTS.kind,)
    score = ScoreFiles(read_xpress)

    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        assert isinstance(drafter, XPressDraft)
        levels = levels_of(g, block_rows(g, plan, drafter), drafter.size)
        return Lattice(drafter, levels, RefinerScore(drafter, levels))


DRAFTER = CompilerXPress()
