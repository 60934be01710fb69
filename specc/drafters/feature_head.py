"""A head that is asked level by level and reads hidden states: EAGLE-3 heads and MTP modules.

A row pairs the target's hidden states of a token with the next token, or of nodes that are not
verified yet what their parent has handed on. So its rows are one behind the target's, and what was
accepted is read again, with the target's hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.drafters.model import ModelDraft

FACTS = DrafterFacts(
    kind="head",
    called="head",
    passes=Passes.LEVELS,
    cache=Cache.OWN,
    module="head",
    reads_hidden=True,
    hands_on=True,
    pairs=True,
    recomputes=True,
)


@dataclass(frozen=True)
class FeatureHead(ModelDraft):
    """Of a plan, which does not say whose head it is: steps with all of them are the same."""

    facts = FACTS

    @property
    def rows_ahead(self) -> int:
        """The root is the last of the tokens that it has read, one more than its rows."""
        return 1

    def catch_up(self, depth: int, is_combined: bool) -> int:
        return depth + 1
