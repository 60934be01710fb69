"""Uno: the target drafts through an adapter that is on for noise alone.

One pass of the target over its own cache reads the newest token and, after it, tokens drawn at
random. The first row has the target's own weights, and so the logits of the next token; the others
have an adapter, which was trained to say the token after each place whatever stands there. All rows
are overwritten by verification, which has the adapter of the request, or none.

Source: sglang PR #37667, files of s-sahoo/uno-qwen3-8B.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specc.drafters.drafter import Drafter
from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.drafters.one_pass import check_candidates, product_rules
from specc.errors import ConfigError
from specc.sampling.rows import Rule
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

FACTS = DrafterFacts(
    kind="uno",
    called="adapter of noise rows",
    passes=Passes.ONE,
    cache=Cache.TARGET,
    module="uno",
)
# letters of plans' names, which are those of files
_ADAPTER = r"[A-Za-z0-9]{1,40}"
_OPTION, _NAME = re.compile(rf"uno:({_ADAPTER})"), re.compile(rf"uno_({_ADAPTER})")


@dataclass(frozen=True)
class Uno(Drafter):
    """As many rows as a tree is deep.

    Args:
        adapter: of the target, by the name that `--lora` gives it.
    """

    facts = FACTS
    adapter: str = ""

    @property
    def name(self) -> str:
        return f"{FACTS.kind}_{self.adapter}"

    @property
    def option(self) -> str:
        return f"{FACTS.kind}:{self.adapter}"

    @classmethod
    def parse(cls, text: str) -> Uno | None:
        """As `--draft` has it, `uno:NAME`; None of what is none.

        Raises:
            ConfigError: it begins like one, and is malformed.
        """
        match = _OPTION.fullmatch(text)
        if match is not None:
            return cls(match[1])
        if text.partition(":")[0] == FACTS.kind:
            raise ConfigError(
                f"--draft {text}",
                "uno:NAME, an adapter of --lora whose name has letters and digits alone",
                "for example --lora fast=adapter/ --draft uno:fast",
            )
        return None

    @classmethod
    def named(cls, name: str) -> Uno | None:
        """Of a plan, `uno_fast`; None of others."""
        match = _NAME.fullmatch(name)
        return cls(match[1]) if match else None

    @property
    def is_product(self) -> bool:
        return True

    @property
    def keeps_paths(self) -> bool:
        return True

    def catch_up(self, depth: int, is_combined: bool) -> int:
        """The root alone: rows before it are the target's."""
        return 1

    def first_level(self, catch_up: int) -> int:
        return 1

    def typical_first_level(self) -> int:
        return 1

    def passes(self, depth: int, levels: Sequence[int]) -> tuple[int, ...]:
        return (depth,)

    def num_logits(self, depth: int) -> int:
        return depth

    def rules(self, shape: TokenTree, is_merged: bool) -> tuple[Rule, ...]:
        return product_rules(shape, is_merged)

    def check_plan(self, plan: str, depth: int, widest: int, dynamic: DynamicTree | None) -> None:
        if dynamic is not None:
            check_candidates(plan, dynamic, f"an {self.facts.called}")

    def constants(self, depth: int) -> dict[str, Tensor]:
        import torch

        return {f"{self.name}_places": torch.arange(depth)}

    def describe(self) -> str:
        """For people."""
        return f"rows of noise through the adapter {self.adapter}: a token for each"
