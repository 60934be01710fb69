"""Lookups: what followed the last tokens where a request had them before (prompt lookup)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specc.drafters.drafter import Drafter
from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.errors import ConfigError
from specc.speculation.tree import TokenTree

FACTS = DrafterFacts(
    kind="lookup",
    called="lookup",
    passes=Passes.NONE,
    cache=Cache.NONE,
    module="lookup",
    compares=True,
    has_host=True,
    methods=("ngram", "[ngram]", "ngram_gpu"),
)
MOST_NGRAM = 99
_NAME, _OPTION = re.compile(r"lookup-([1-9]\d?)"), re.compile(r"lookup:(\d+)")


@dataclass(frozen=True)
class Lookup(Drafter):
    """A chain as long as the plan is deep.

    Args:
        ngram: last tokens that are compared, at most.
    """

    facts = FACTS
    ngram: int | None

    @property
    def name(self) -> str:
        return f"lookup-{self.ngram}"

    def tree_of(self, shape: TokenTree) -> TokenTree:
        return TokenTree.chain(shape.max_depth)

    def comparing(self, num_tokens: int) -> Lookup:
        return Lookup(num_tokens)

    @classmethod
    def parse(cls, text: str) -> Lookup | None:
        """As `--draft` has it, `lookup:3`; None of what is none.

        Raises:
            ConfigError: it begins like one, and is malformed.
        """
        match = _OPTION.fullmatch(text)
        if match is None:
            if text.startswith("lookup:") or text == "lookup":
                raise ConfigError(
                    f"--draft {text}",
                    "lookup:N, N tokens at most are compared",
                    "for example lookup:3",
                )
            return None
        if not 1 <= int(match[1]) <= MOST_NGRAM:
            raise ConfigError(
                f"--draft {text}", f"lookup:1 … lookup:{MOST_NGRAM}", "for example lookup:3"
            )
        return cls(int(match[1]))

    @classmethod
    def named(cls, name: str) -> Lookup | None:
        """Of a plan, `lookup-3`; None of others."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1])) if match else None
