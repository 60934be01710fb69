"""A draft model: a language model of its own with the target's tokens, asked level by level."""

from __future__ import annotations

from dataclasses import dataclass

from specc.drafters.drafter import Drafter
from specc.drafters.facts import Cache, DrafterFacts, Passes

FACTS = DrafterFacts(
    kind="draft_model",
    called="draft model",
    passes=Passes.LEVELS,
    cache=Cache.OWN,
    module="model",
    is_ordinary=True,
    methods=("draft_model",),
)
PREFIX = "draft_"


@dataclass(frozen=True)
class ModelDraft(Drafter):
    """Args:
    place: of the model among those of drafts.
    """

    facts = FACTS
    place: int = 0

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.place}"

    @property
    def number(self) -> int:
        return self.place
