"""What a step costs at one batch size and context: a view of a latency table."""

from __future__ import annotations

from dataclasses import dataclass

from specc.cost.draft_levels import fed_rows
from specc.cost.latency_table import LatencyTable, PassPart
from specc.drafters.drafter import Drafter
from specc.drafters.facts import Passes
from specc.drafters.registry import FIRST
from specc.errors import ConfigError
from specc.speculation.tree import TokenTree


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of iterations in which every request runs one plan of one draft.

    Args:
        requests: of the batch.
        context: committed rows of each.
    Raises:
        ConfigError: a table whose plain steps take no time, or with a negative overhead.
    """

    table: LatencyTable
    draft: Drafter = FIRST[0]
    requests: int = 1
    context: float = 0.0

    def __post_init__(self) -> None:
        if not self.off > 0 or not 0 <= self.overhead < float("inf"):
            raise ConfigError(
                f"{self.off} seconds of a plain step, {self.overhead} of drafting besides passes",
                "more than 0, and 0 or more",
                "measure the table again",
            )

    @property
    def off(self) -> float:
        """Seconds of a step without speculation."""
        return self.verify(1)

    @property
    def overhead(self) -> float:
        """Seconds of a step that drafts outside of its passes, beyond those of off."""
        return self.table.step_s

    def verify(self, num_nodes: int) -> float:
        """Seconds of the target's pass, and those that every iteration takes."""
        return self.table.iteration_s + self.table.target((self._part(num_nodes),))

    def level(self, depth: int, num_rows: int) -> float:
        """Seconds of a draft level.

        Of a draft that makes one pass, of the rows of context that a tree as deep needs it to read:
        those of all levels together are its pass. What makes logits depend on the token before
        takes no pass, and counts as nothing, but for heads of levels, which count as passes.

        Args:
            depth: of the nodes that it reads; 0 is the root, which it reads with what it missed.
            num_rows: of these nodes, for each request.
        """
        draft = self.draft
        if not draft.is_asked:
            return 0.0
        rows = num_rows if depth else draft.typical_first_level()
        if draft.facts.passes is Passes.LEVELS:
            return self.table.level_s(draft, self._part(rows))
        (rows,), (before,) = (draft.passes(d, (rows,)) for d in (depth + 1, depth))
        seconds = self.table.level_s(draft, self._part(rows))
        if depth == 0:
            return seconds
        if draft.computes_levels:
            seconds += self.table.level_s(draft, self._part(num_rows))
        return seconds - self.table.level_s(draft, self._part(before))

    def of(self, tree: TokenTree) -> float:
        """Seconds of a step with this tree; of the root alone, those of off."""
        if tree.num_nodes == 1:
            return self.off
        levels = sum(self.level(depth, rows) for depth, rows in enumerate(fed_rows(tree)))
        if (view := self.draft.view) is not None:
            levels += self.table.vote_s([view], tree.max_depth, self._part(tree.num_nodes))
        return self.verify(tree.num_nodes) + self.overhead + levels

    def _part(self, num_tokens: int) -> PassPart:
        count = self.requests
        return PassPart(count, count * num_tokens, count * self.context)
