"""Domino drafters: what their files say, and a score of paths by a state of the tokens before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import fx

from specc.drafters.block import BlockDraft
from specc.drafters.domino import (
    EMBEDDING,
    FACTS,
    JOINT,
    OF_STATES,
    OF_TOKENS,
    TABLE,
    DominoDraft,
    next_state,
)
from specc.drafters.drafter import Drafter
from specc.errors import HeadError
from specc.passes.drafters.block import CompilerBlock
from specc.passes.drafters.block_parts import ScoreFiles, ShapesOf, read_flag, required
from specc.passes.drafters.block_pass import block_levels
from specc.passes.drafters.lattice import Lattice
from specc.passes.drafters.path_score import LowRankScore, wide
from specc.passes.drafters.path_states import PathStates
from specc.passes.step.proposer import Proposer
from specc.passes.step.step_graph import StepGraph
from specc.speculation.plans import SpecPlan

aten = torch.ops.aten

_DO = "correct config.json, or download the drafter again"
_SHIFT, _PREFIX, _SIZES = "shift_label", "pure_draft_prefix_len", ("gru_hidden_dim", "emb_dim")


class DominoScore(LowRankScore):
    """The score of such a drafter; nodes leave their states to their children."""

    has_states = True

    def __init__(self, draft: DominoDraft) -> None:
        super().__init__()
        self._draft, self._states = draft, PathStates()

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
        if depth:
            return super().logits(g, level, hidden, tokens, count, depth, parents)
        self._leave(g, tokens, count, None)
        return wide(g, level, count)

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
        state = self._leave(g, tokens, count, self._states.above(g, count, depth, parents))
        joint = g.call(aten.linear.default, g.cat(hidden, state), self._of(g, JOINT))
        return g.call(aten.silu.default, joint)

    def table(self, g: StepGraph) -> fx.Node:
        return self._of(g, TABLE)

    def columns(self, g: StepGraph) -> fx.Node | None:
        return self._of(g, self._draft.columns) if self._draft.is_partial else None

    def _leave(self, g: StepGraph, tokens: fx.Node, count: int, above: fx.Node | None) -> fx.Node:
        known = g.call(aten.embedding.default, self._of(g, EMBEDDING), g.flat(tokens))
        weights = self._of(g, OF_TOKENS), self._of(g, OF_STATES)
        state: fx.Node = next_state(g.call, self._draft.inner_width, known, above, weights)
        self._states.leave(state, count)
        return state

    def _of(self, g: StepGraph, key: str) -> fx.Node:
        return g[self._draft.tensor(key)]


def read_domino(
    values: Mapping[str, Any], block: BlockDraft, layers: Any, name: str
) -> tuple[DominoDraft, ShapesOf]:
    """See `ScoreFiles.read`.

    Raises:
        HeadError: a key is missing, or says what no known reader computes.
    """
    if read_flag(values, (_SHIFT,), name) is None:
        raise HeadError(f"{name}: config.json: no {_SHIFT}", "true or false", _DO)
    if values.get(_PREFIX) != 1:
        raise HeadError(
            f"{name}: config.json: {_PREFIX} is {values.get(_PREFIX)!r:.40}",
            "1: logits of the first token alone are those of its row",
            "pass another draft",
        )
    (state, joint), d = required(values, _SIZES, name), int(layers.hidden_size)

    def shapes(num_rows: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
        return {
            OF_TOKENS: (3 * state, d), OF_STATES: (3 * state, state),
            JOINT: (joint, d + state), TABLE: (num_rows, joint),
        }  # fmt: skip

    return DominoDraft(**asdict(block) | {"inner_width": state}), shapes


class CompilerDomino(CompilerBlock):
    kinds = (FACTS.kind,)
    score = ScoreFiles(read_domino, (_PREFIX, *_SIZES), FACTS.kind)

    def proposer(self, g: StepGraph, plan: SpecPlan, drafter: Drafter) -> Proposer:
        assert isinstance(drafter, DominoDraft)
        return Lattice(drafter, block_levels(g, plan, drafter), DominoScore(drafter))


DRAFTER = CompilerDomino()
