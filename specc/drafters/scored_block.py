"""Block drafters whose steps make scores of paths with weights of their own, kind by kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from specc.drafters.block import VANILLA, BlockDraft

EMBEDDING = "embed_tokens.weight"
# an operator of torch and its arguments → its result: of tensors, or of nodes of a graph
Call = Callable[..., Any]


@dataclass(frozen=True)
class ScoredBlock(BlockDraft):
    """Steps read its rows' hidden states, and tensors by the names of `tensor`."""

    # [V] row of each id in the table of a score; of kinds that may have rows for some of them
    columns: ClassVar[str] = ""

    @property
    @abstractmethod
    def parameters(self) -> Sequence[str]:
        """Keys of what steps read in the weight file."""

    @property
    def is_possible(self) -> bool:
        is_named = self.kind == self.facts.kind and self.is_biased and self.bias_kind == VANILLA
        is_more = self.is_flat or self.confidence
        return is_named and self.hidden_columns > 0 and not is_more

    @property
    def tensors(self) -> dict[str, str]:
        return {self.tensor(key): key for key in self.parameters}

    def tensor(self, key: str) -> str:
        """What steps call a tensor of this key."""
        return f"{self.draft}_{key.replace('.', '_')}"

    @property
    def asked_tensors(self) -> Sequence[str]:
        return ()

    @property
    def reads_hidden(self) -> bool:
        return True

    def without_confidence(self) -> BlockDraft:
        return self

    def earlier_constants(self, depth: int) -> dict[str, Tensor]:
        return {}

    def describe_pass(self) -> str:
        """For people, without what is made of its rows."""
        rows, mask, *_ = super().describe().split(";")
        return f"{rows};{mask}"


def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """A `Call` of tensors."""
    return operator(*args, **kwargs)
