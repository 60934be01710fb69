"""PARD models (arXiv:2504.18583): language models for which masks after a text predict on."""

from __future__ import annotations

from dataclasses import dataclass

from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.drafters.masked import CausalMasks

FACTS = DrafterFacts(
    kind="pard",
    called="PARD model",
    passes=Passes.ONE,
    cache=Cache.OWN,
    module="pard",
    recomputes=True,
)


@dataclass(frozen=True)
class PardDraft(CausalMasks):
    """Its context are tokens, so prefixes are shared as those of any model."""

    facts = FACTS
    kind: str = FACTS.kind
