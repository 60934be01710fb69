"""PARD models (arXiv:2504.18583): language models for which masks after a text predict on."""

from __future__ import annotations

from dataclasses import dataclass

from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.drafters.masked import MaskedPass

FACTS = DrafterFacts(
    kind="pard",
    called="PARD model",
    passes=Passes.ONE,
    cache=Cache.OWN,
    module="pard",
    recomputes=True,
)


@dataclass(frozen=True)
class PardDraft(MaskedPass):
    """The newest token proposes the one after it, mask m the one after that, and so on.

    No row depends on those after it: a pass has as many masks as its tree needs, and `size` is
    how deep a tree may be. Its context are tokens, so prefixes are shared as those of any model.
    """

    facts = FACTS
    reads_tokens = True
    from_anchor: bool = True
    is_causal: bool = True
    kind: str = FACTS.kind

    @property
    def is_possible(self) -> bool:
        return self.is_plain(FACTS.kind)

    @property
    def rows_ahead(self) -> int:
        """The row of the root is that of a token, and stays."""
        return 1

    def num_written(self, depth: int) -> int:
        return depth

    def describe(self) -> str:
        return (
            "masks after the newest token propose all levels of a tree in one pass; mask token"
            f" {self.mask_token_id}"
        )
