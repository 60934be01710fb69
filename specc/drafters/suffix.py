"""Suffix decoding: what followed the longest suffix of a request, in it or in earlier outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specc.drafters.lookup import FACTS as LOOKUP
from specc.drafters.lookup import Lookup

FACTS = replace(
    LOOKUP,
    kind="suffix",
    called="suffix",
    module="suffix",
    compares=False,
    is_hosts=True,
    methods=("suffix",),
)


@dataclass(frozen=True)
class Suffix(Lookup):
    """The host's index proposes, so steps read its proposals."""

    facts = FACTS
    ngram: None = None

    @property
    def name(self) -> str:
        return FACTS.kind

    @classmethod
    def parse(cls, text: str) -> Suffix | None:
        return cls.named(text)

    @classmethod
    def named(cls, name: str) -> Suffix | None:
        return cls() if name == FACTS.kind else None
