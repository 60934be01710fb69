"""From which context on a self-draft pays: MagicDec's critical length.

At long context a pass of the target waits for the rows of its cache, a pass over a view for its
budget alone. So a step that drafts with a view beats plain decoding from some context on (MagicDec,
arXiv:2408.11049, §3): a shorter one in larger batches, as far as these share the reading of
weights. A latency table has both costs: w(T), the seconds of T tokens, and a(T), those of each
committed row of a sequence that brings T tokens. With a batch of B sequences of L rows, a view of b
rows, and a tree of N nodes whose levels feed n₁, n₂, … to the draft and that yields l tokens a
step,

    off(L)  = w(B) + a(1) B L
    spec(L) = Σ (w(n B) + a(n) B min(L, b)) + w(N B) + a(N) B L

and speculation pays where l off(L) > spec(L). Beyond b both sides are straight lines:

    L* = (Σ (w(n B) + a(n) B b) + w(N B) - l w(B)) / (B (l a(1) - a(N)))

and never where l a(1) ≤ a(N): a verified row then costs more than the tokens that it yields. Fixed
seconds of iterations and of drafting count on their sides; where a view chooses blocks, votes on
all rows count, too, as often as there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specc.cost.acceptance import expected_tokens
from specc.cost.draft_levels import fed_rows
from specc.cost.latency_table import LatencyTable, PassPart, vote_share
from specc.drafters.views import View
from specc.speculation.tree import TokenTree


@dataclass(frozen=True)
class CriticalLength:
    """From which context on a chain of a self-draft pays, in one batch.

    Args:
        batch_size: sequences.
        draft: view, such as `self_w512_s4`.
        num_draft_tokens: length of the chain.
        expected_tokens: a step, bonus token included.
        rows: committed rows of each sequence, above which it is faster than plain decoding; None
            is never.
    """

    batch_size: int
    draft: str
    num_draft_tokens: int
    expected_tokens: float
    rows: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "draft": self.draft,
            "num_draft_tokens": self.num_draft_tokens,
            "expected_tokens": self.expected_tokens,
            "rows": self.rows,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CriticalLength:
        """Read what `to_json` wrote.

        Raises:
            KeyError: malformed.
        """
        return cls(*(data[name] for name in cls.__dataclass_fields__))


def critical_length(
    table: LatencyTable, view: View, tree: TokenTree, tokens: float, batch_size: int = 1
) -> float | None:
    """L*, in committed rows of each sequence.

    Args:
        view: what the draft sees.
        tree: that it grows, of one node or more besides the root.
        tokens: expected of a step, bonus token included.
        batch_size: sequences.
    Returns:
        rows above which a step with the tree yields more tokens a second than plain decoding; 0
        where it always does, None where it does not at any length beyond its budget.
    """
    budget, levels, nodes = view.num_rows, fed_rows(tree), tree.num_nodes
    target = table.target

    def seconds(width: int) -> float:
        return target((PassPart(batch_size, batch_size * width, 0.0),))

    drafting = sum(seconds(width) + target.row_s(width) * batch_size * budget for width in levels)
    off = table.iteration_s + seconds(1)
    missing = drafting + table.step_s + table.iteration_s + seconds(nodes) - tokens * off
    # won with each further row
    slope = batch_size * (tokens * target.row_s(1) - target.row_s(nodes))
    if view.chosen and table.votes is not None:
        # all rows are voted on, those of the budget included
        share = vote_share([view], tree.max_depth)
        missing += share * table.votes.tokens_s(batch_size * nodes)
        slope -= batch_size * share * table.votes.row_s(nodes)
    if slope <= 0:
        return None
    found = missing / slope
    # up to the budget a draft reads all that there is: what pays there, pays from the beginning,
    # since a row then costs its passes at least what it wins
    return found if found > budget else 0.0


def best_critical_length(
    table: LatencyTable,
    view: View,
    acceptance: Sequence[Sequence[float]],
    batch_size: int,
    most: int = 8,
) -> CriticalLength:
    """That of the chain of 1 … `most` tokens that pays from the shortest context on.

    Args:
        view: what the draft sees.
        acceptance: of it, by depth and sibling rank.
        batch_size: sequences.
        most: tokens of a chain at most.
    """
    found: list[CriticalLength] = []
    for length in range(1, most + 1):
        tree = TokenTree.chain(length)
        tokens = expected_tokens(tree, [row[:1] for row in acceptance])
        rows = critical_length(table, view, tree, tokens, batch_size)
        found.append(CriticalLength(batch_size, view.name, length, tokens, rows))
    return min(found, key=lambda one: float("inf") if one.rows is None else one.rows)
