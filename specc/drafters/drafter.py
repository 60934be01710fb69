"""The protocol of drafts: what a plan, a step, a table of costs and a report ask of what proposes.

A drafter is a value: its kind's facts, and what differs between two of the kind. Nothing outside
`specc/drafters`, `passes/drafters` and `runtime/drafters` asks which kind one is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.sampling.rows import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from specc.drafters.layers import Layers
    from specc.drafters.views import View
    from specc.speculation.dynamic_tree import DynamicTree
    from specc.speculation.tree import TokenTree

# rules whose output is the target's own, whatever is proposed
ANY_PROPOSALS = (Rule.COUPLED, Rule.DELTA)
# tokens that the first level of a model reads: the root, and the leaf that was accepted before it
_LEAF_AND_ROOT = 2


class Drafter(ABC):
    """What proposes tokens in a plan."""

    facts: ClassVar[DrafterFacts]

    @property
    @abstractmethod
    def name(self) -> str:
        """In plans, steps and tables: `draft_0`, `lookup-3`, …"""

    @property
    def option(self) -> str:
        """As users name it."""
        return self.name

    @property
    def number(self) -> int | None:
        """Of its model among those of drafts; None where it has none."""
        return None

    @property
    def is_asked(self) -> bool:
        """Whether drafting passes through a model."""
        return self.facts.passes is not Passes.NONE

    @property
    def is_one_pass(self) -> bool:
        """Whether one pass makes the logits of all levels."""
        return self.facts.passes is Passes.ONE

    @property
    def has_rows(self) -> bool:
        """Whether a cache of its own has committed rows."""
        return self.facts.cache is Cache.OWN

    @property
    def moves_rows(self) -> bool:
        """Whether its rows of accepted nodes are moved and kept."""
        return self.has_rows and not self.facts.recomputes

    @property
    def rows_ahead(self) -> int:
        """Of one that computes rows again: tokens that it has read after a step, less those of
        which the target has rows.
        """
        return 0

    @property
    def is_product(self) -> bool:
        """Whether all nodes of a depth have the same children, from one row of logits."""
        return False

    @property
    def depends_on_path(self) -> bool:
        """Whether what one pass has made changes with the tokens above a node."""
        return False

    @property
    def keeps_paths(self) -> bool:
        """Whether a dynamic tree goes on from every node that it may have, see
        `DynamicTree.path_widths`; else from as many of each level as a node has children.
        """
        return False

    @property
    def computes_levels(self) -> bool:
        """Whether steps compute about as much for each level below the first as its one pass."""
        return False

    @property
    def most_depth(self) -> int | None:
        """Levels that it proposes at most; None is any number."""
        return None

    @property
    def says_confidence(self) -> bool:
        """Whether it says how likely its tokens are accepted."""
        return False

    @property
    def kind_of_head(self) -> str:
        """What a plan says of one that hands rows on; empty of those whose steps are alike."""
        return ""

    @property
    def view(self) -> View | None:
        """Rows of the target's cache that it sees; None is all of them, or none."""
        return None

    def with_view(self, view: View) -> Drafter:
        """The same that sees other rows of the target's cache."""
        return self

    @property
    def layers(self) -> Layers | None:
        """Layers of the target that it has; None is all of them, or none."""
        return None

    @property
    def weights(self) -> str | None:
        """Type that the target's weights are rounded to for it; None where they are not."""
        return None

    @property
    def adapter(self) -> str | None:
        """Adapter of the target that some of its rows go through; None is none."""
        return None

    @property
    def quantization(self) -> str | None:
        """The layout of those weights."""
        return None

    @property
    def has_second_program(self) -> bool:
        """Whether it runs a program of the target that is not the target's own."""
        return False

    def num_written(self, depth: int) -> int:
        """Rows from the root's on that its one pass writes in a plan of this depth."""
        return 0

    @property
    def most_rows(self) -> int:
        """Rows of its widest pass, of any depth, where its program is made for so many; else 0."""
        return 0

    def num_tapped(self, depth: int, catch_up: int) -> int:
        """Rows of the target's hidden states that it reads in a step; see `first_level`."""
        return self.first_level(catch_up)

    @property
    def hidden_columns(self) -> int:
        """Columns of its output after the logits of each row."""
        return 0

    @property
    def candidates(self) -> int:
        """Best tokens of each row that alone may follow; 0 is all."""
        return 0

    @property
    def tensors(self) -> dict[str, str]:
        """Name in the environment of a step → in its weight file, of weights that steps read."""
        return {}

    @property
    def asked_tensors(self) -> Collection[str]:
        """Names in the weight file of those that not every step reads."""
        return ()

    def renamed(self, name: str) -> Drafter:
        """The same as the model of this name."""
        return self

    def comparing(self, num_tokens: int) -> Drafter:
        """The same, but one that compares text compares so many last tokens of it at most."""
        return self

    def tree_of(self, shape: TokenTree) -> TokenTree:
        """What it proposes in a plan of this shape."""
        return shape

    def catch_up(self, depth: int, is_combined: bool) -> int:
        """Last tokens of a sequence that it may not have read before a step.

        After a step of the same plan it has not seen the accepted leaf and the bonus token, and of
        several drafts' proposals all that the others made.

        Args:
            depth: of the plan.
            is_combined: others propose, too.
        """
        return depth + 1 if is_combined else min(_LEAF_AND_ROOT, depth + 1)

    def first_level(self, catch_up: int) -> int:
        """Last tokens of a sequence that its first level reads, of those that drafts may lack."""
        return catch_up

    def typical_first_level(self) -> int:
        """The same, in a plan of this draft alone whose depth is not known."""
        return _LEAF_AND_ROOT

    def passes(self, depth: int, levels: Sequence[int]) -> tuple[int, ...]:
        """Tokens of a sequence that each of its passes reads.

        Args:
            depth: of the plan.
            levels: nodes of each level that are fed, the first with what it has to catch up.
        """
        return tuple(levels)

    def num_logits(self, depth: int) -> int:
        """Rows of logits that its one pass leaves; 0 of one that is asked level by level."""
        return 0

    def describe_logits(self, depth: int) -> str:
        """These rows, for people."""
        return f"{depth} tokens of a block"

    def rules(self, shape: TokenTree, is_merged: bool) -> tuple[Rule, ...]:
        """Rules that are lossless for what it proposes in a static tree.

        Args:
            shape: of its proposals.
            is_merged: with those of others, equal tokens below one parent are one node.
        """
        return tuple(Rule)

    def check_plan(  # noqa: B027
        self, plan: str, depth: int, widest: int, dynamic: DynamicTree | None
    ) -> None:
        """Raises ConfigError, TreeError: it does not propose such a tree.

        Args:
            plan: its name.
            depth: levels of its tree.
            widest: children of a node, at most.
            dynamic: its shape, where the tree is data.
        """

    def constants(self, depth: int) -> dict[str, Tensor]:
        """Name → value of constants that its one pass reads in a step of so deep a plan."""
        return {}

    def earlier_constants(self, depth: int) -> dict[str, Tensor]:
        """Those that engines which were compiled before may have in another form."""
        return {}

    def describe(self) -> str:
        """What its passes read and propose, for people; empty where the kind says it all."""
        return ""

    def to_json(self) -> dict[str, Any] | None:
        """What a plan says of it besides its name; None is nothing."""
        return None
