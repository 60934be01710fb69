"""The host's part in a kind of draft: state of an engine, across steps and requests."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from torch import Tensor

from specc.drafters.drafter import Drafter
from specc.drafters.facts import DrafterFacts
from specc.runtime.drafters.suffix_index import SuffixIndex
from specc.runtime.requests.salt import Salt
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan


class Tokens(Protocol):
    """What lookups see of a request."""

    token_ids: list[int]
    suffix_index: SuffixIndex | None
    salt: Salt | None

    @property
    def output_token_ids(self) -> list[int]: ...


class HostDrafter:
    """By default nothing.

    Args:
        block_size: rows of a block of the engine's cache.
        shares_outputs: what one request has put out may be looked up for others.
    """

    def __init__(self, block_size: int, shares_outputs: bool) -> None:
        self.block_size, self.shares_outputs = block_size, shares_outputs

    def brings(self, plan: SpecPlan) -> bool:
        """Whether steps of a plan read `inputs`."""
        return False

    def inputs(self, plan: SpecPlan, requests: list[Request]) -> dict[str, Tensor]:
        """See `StepInputs.extra`."""
        return {}

    def propose(self, request: Tokens, num_tokens: int, drafter: Drafter) -> tuple[list[int], int]:
        """See `HostDrafts.propose`."""
        raise NotImplementedError(f"the host does not know what {drafter.name} proposes")

    def finish(self, request: Tokens) -> None:
        """A request has ended."""


def host_drafter(facts: DrafterFacts, block_size: int, shares_outputs: bool) -> HostDrafter:
    """The part of a kind, `HOST` of `runtime/drafters/<kind>.py`."""
    kind: type[HostDrafter] = import_module(f"specc.runtime.drafters.{facts.module}").HOST
    return kind(block_size, shares_outputs)
