"""What a step costs at one batch size and context: a view of a latency table."""

from __future__ import annotations

from dataclasses import dataclass

from specc.cost.draft_levels import fed_rows
from specc.cost.latency_table import LatencyTable, PassPart
from specc.errors import ConfigError
from specc.speculation.block_drafts import BlockDraft
from specc.speculation.self_drafts import SelfDraft, is_self_draft
from specc.speculation.tree import TokenTree

# tokens that a draft model's first level reads: the root, and the token before it
_FIRST_LEVEL = 2


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of iterations in which every request runs one plan of one draft.

    Args:
        table: of the engine's passes.
        draft: model or view that proposes, such as `draft_0` or `self_w512_s4`; None is a lookup,
            which takes no pass.
        requests: of the batch.
        context: committed rows of each.
        block: of a block drafter, whose one pass proposes all levels; else None.
    Raises:
        ConfigError: a table whose plain steps take no time, or with a negative overhead.
    """

    table: LatencyTable
    draft: str | None = "draft_0"
    requests: int = 1
    context: float = 0.0
    block: BlockDraft | None = None

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

        Of a block drafter, of the rows of context that a tree as deep needs its one pass to read:
        those of all levels together are its pass. What makes logits depend on the token before
        takes no pass, and counts as nothing.

        Args:
            depth: of the nodes that it reads; 0 is the root, which it reads with what it missed.
            num_rows: of these nodes, for each request.
        """
        if self.draft is None:
            return 0.0
        if self.block is not None:
            rows, before = (self.block.num_read(d) for d in (depth + 1, depth))
            seconds = self.table.level_s(self.draft, self._part(rows))
            return seconds - self.table.level_s(self.draft, self._part(before)) * (depth > 0)
        first = 1 if is_self_draft(self.draft) else _FIRST_LEVEL
        return self.table.level_s(self.draft, self._part(num_rows if depth else first))

    def of(self, tree: TokenTree) -> float:
        """Seconds of a step with this tree; of the root alone, those of off."""
        if tree.num_nodes == 1:
            return self.off
        levels = sum(self.level(depth, rows) for depth, rows in enumerate(fed_rows(tree)))
        own = SelfDraft.named(self.draft) if self.draft is not None else None
        if own is not None and own.view is not None:
            part = self._part(tree.num_nodes)
            levels += self.table.vote_s([own.view], tree.max_depth, part)
        return self.verify(tree.num_nodes) + self.overhead + levels

    def _part(self, num_tokens: int) -> PassPart:
        count = self.requests
        return PassPart(count, count * num_tokens, count * self.context)
