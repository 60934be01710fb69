"""What a pass is: a named rewrite with checked preconditions and postconditions."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from specc.passes.program import Declined, Program

# a fact is a cheap scan of the program; its docstring says what holds, in words
Fact = Callable[[Program], bool]


class NoMatch(Exception):
    """Why a node stays as it is."""


@dataclass
class PassResult:
    """What a pass did: rewrites, and nodes it declined with the reason."""

    rewrites: int = 0
    declined: list[Declined] = field(default_factory=list)

    def decline(self, node: str, reason: str) -> None:
        self.declined.append(Declined(node, reason))

    @contextlib.contextmanager
    def attempt(self, node: str) -> Iterator[None]:
        """Count what happens inside as a rewrite; `NoMatch` declines the node with its reason."""
        try:
            yield
        except NoMatch as reason:
            self.decline(node, str(reason))
        else:
            self.rewrites += 1


class Pass(ABC):
    """A rewrite of one program in place.

    A subclass names itself after what it does (`FuseQKV` in `fuse_qkv.py`) and states facts that
    must hold before and after; the pipeline checks both.
    """

    requires: ClassVar[tuple[Fact, ...]] = ()
    ensures: ClassVar[tuple[Fact, ...]] = ()

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def run(self, program: Program) -> PassResult:
        """Rewrite in place; raise a SpeccError where the model cannot be compiled."""
