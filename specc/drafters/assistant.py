"""Gemma 4 assistants: layers with queries alone, over keys and values that a target has written.

A node is fed its token and a hidden state: the root the target's, of the token before it, others
what their parent has handed on. All of them stand where the root stands, and see the committed rows
alone: what a path has drafted reaches a node through its parent's row. So nothing of a sequence is
read before a step, and nothing is kept after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.drafters.model import ModelDraft
from specc.errors import ConfigError
from specc.speculation.dynamic_tree import DynamicTree

FACTS = DrafterFacts(
    kind="gemma4_assistant",
    called="Gemma 4 assistant",
    passes=Passes.LEVELS,
    cache=Cache.TARGET,
    module="assistant",
    reads_hidden=True,
    hands_on=True,
)


@dataclass(frozen=True)
class AssistantDraft(ModelDraft):
    """Args:
    candidates: tokens that may follow a node: those of its best clusters; 0 is all.
    """

    facts = FACTS
    # compared with trees when they are compiled
    candidates: int = field(default=0, compare=False)

    @property
    def kind_of_head(self) -> str:
        return self.facts.kind

    def catch_up(self, depth: int, is_combined: bool) -> int:
        """The root alone: of other tokens it reads what the target has left."""
        return 1

    def first_level(self, catch_up: int) -> int:
        return 1

    def typical_first_level(self) -> int:
        return 1

    def check_plan(self, plan: str, depth: int, widest: int, dynamic: DynamicTree | None) -> None:
        if 0 < self.candidates < widest:
            raise ConfigError(
                f"plan {plan} of {widest} children, and {self.name}, which chooses them among"
                f" {self.candidates} tokens",
                f"{self.candidates} children of a node or fewer",
                "choose a narrower tree",
            )
