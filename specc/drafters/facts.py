"""What is known of a kind of draft without its files: data, a row for each kind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Passes(Enum):
    """Passes of a program that drafting takes."""

    LEVELS = "one for each level of a tree"
    ONE = "one for all levels"
    NONE = "none"


class Cache(Enum):
    """Whose rows keys and values of a draft are."""

    OWN = "its own"
    TARGET = "the target's"
    NONE = "none"


@dataclass(frozen=True)
class DrafterFacts:
    """A kind of draft.

    Args:
        kind: as JSON has it.
        called: as people say it, without an article.
        passes: that it takes to propose a tree.
        cache: whose rows it attends to.
        module: of the kind in `passes/drafters`, and in `runtime/drafters` where the host acts.
        reads_hidden: it reads hidden states of the target.
        hands_on: each of its tokens hands a row on to those that follow it.
        pairs: its rows pair the target's hidden states of a token with the token after it, and so
            are one behind the target's.
        is_ordinary: a language model of its own, which any directory without another kind holds.
        recomputes: rows of accepted tokens are computed again with what the target says of them;
            else they are moved to where accepted rows go.
        is_of_target: its weights are in the target's checkpoint.
        compares: it compares a number of tokens that users choose.
        is_hosts: the host proposes, and steps are given its proposals.
        has_host: the host has a part in it, see `runtime/drafters/host_drafter.py`.
        methods: names of it in vLLM's `--speculative-config`.
        assumes: what users may say of its files with `--draft-assume`.
    """

    kind: str
    called: str
    passes: Passes
    cache: Cache
    module: str
    reads_hidden: bool = False
    hands_on: bool = False
    pairs: bool = False
    is_ordinary: bool = False
    recomputes: bool = False
    is_of_target: bool = False
    compares: bool = False
    is_hosts: bool = False
    has_host: bool = False
    methods: tuple[str, ...] = ()
    assumes: tuple[str, ...] = ()

    @property
    def is_self(self) -> bool:
        """Whether the target itself drafts; others over its cache have weights of their own."""
        return self.cache is Cache.TARGET and not self.reads_hidden

    @property
    def has_program(self) -> bool:
        """Whether an engine has a model for it beside the target."""
        return self.passes is not Passes.NONE and not self.is_self
