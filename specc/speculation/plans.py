"""Speculation plans: what proposes, in which shape, and how proposals become one tree."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from specc.drafters.drafter import ANY_PROPOSALS, Drafter
from specc.drafters.registry import FIRST, drafters_of
from specc.drafters.views import View
from specc.errors import ConfigError, TreeError
from specc.sampling.rows import Rule
from specc.speculation.dynamic_tree import DynamicTree as DynamicTree
from specc.speculation.plan_names import MERGE as MERGE
from specc.speculation.plan_names import VOTE as VOTE
from specc.speculation.plan_names import check_drafts, prefix_of
from specc.speculation.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from specc.sampling.params import SamplingParams

# β of depth 1, 2, … of each draft that is asked
Sharpness = tuple[tuple[float, ...], ...]
_SHARPEST = 100.0


@dataclass(frozen=True)
class SpecPlan:
    """What one step does: speculate with this tree, or decode plainly.

    Args:
        name: `off`, `chain-4`, `tree-3-2-1`, `merge-chain-4`, …
        widths: children per frontier node and level of what every draft proposes; empty where the
            shape is another one, and for off.
        parents: of a static tree that is no expansion; see `TokenTree`.
        dynamic: instead of a static shape.
        drafters: what proposes.
        combine: `merge` or `vote`, where several propose.
        tile: nodes of each sequence whose logits exist at a time; the models pass over the tree
            tile by tile. None: over all nodes at once, and what children were drawn from is kept
            until the tree is verified.
        sharpness: factors of the logits of drafts, see `docs/guide/drafts.md`; empty leaves them as
            they are.
    Raises:
        TreeError: more nodes than a tree may have, or nodes out of order.
        ConfigError: proposals that cannot be combined so, or a tile of no node.
    """

    name: str
    widths: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    dynamic: DynamicTree | None = None
    drafters: tuple[Drafter, ...] = FIRST
    combine: str = ""
    tile: int | None = None
    sharpness: Sharpness = ()

    def __post_init__(self) -> None:
        shapes = [bool(self.widths), len(self.parents) > 1, self.dynamic is not None]
        assert sum(shapes) <= 1, "one shape"
        check_drafts(self.drafters, self.combine, self.dynamic is not None)
        if self.tile is not None and (self.tile < 1 or not self.speculates):
            raise ConfigError(
                f"plan {self.name} in tiles of {self.tile} nodes",
                "1 or more nodes, of a plan that speculates",
                "leave out the tile, or compile with --max-logits-mb",
            )
        if list(self.parents) != sorted(self.parents):
            raise TreeError(
                f"plan {self.name} of parents {', '.join(map(str, self.parents[:16]))}",
                "nodes level by level, siblings side by side: parents that never descend",
                "number the nodes level by level",
            )
        if self.combine == VOTE and len(self.shape.leaves) > 1:
            raise ConfigError(
                f"a vote over trees of {self.shape.num_nodes} nodes",
                "chains: drafts vote for one continuation",
                "pass --num-speculative-tokens, or --combine merge",
            )
        if self.num_nodes > MAX_NODES:
            raise TreeError(
                f"plan {self.name} of {self.num_nodes} nodes",
                f"at most {MAX_NODES} nodes",
                "choose smaller widths, fewer levels or fewer drafts",
            )
        self._check_sharpness()
        for drafter in self.drafters:
            drafter.check_plan(self.name, self.max_depth, self.most_children, self.dynamic)

    def _check_sharpness(self) -> None:
        """Raises ConfigError: not one factor above 0 for each depth of each draft that is asked."""
        rows, count = self.sharpness, len(self.asked)
        fits = len(rows) == count and all(len(row) == self.max_depth for row in rows)
        if rows and not (fits and all(0 < x <= _SHARPEST for row in rows for x in row)):
            raise ConfigError(
                f"plan {self.name} of sharpness {[list(row) for row in rows]}",
                f"{count} rows of {self.max_depth} numbers above 0, at most {_SHARPEST:g}",
                "tune the engine again",
            )

    @classmethod
    def from_widths(
        cls,
        widths: tuple[int, ...] | list[int],
        drafts: Sequence[str | Drafter] = FIRST,
        combine: str = "",
    ) -> SpecPlan:
        """Name a plan after its widths; all ones is a chain, no level is off.

        Args:
            widths: of its levels.
            drafts: what proposes, or what plans call it.
            combine: see `SpecPlan`.
        """
        widths, drafters = tuple(widths), drafters_of(*drafts)
        if not widths:
            return cls("off")
        TokenTree.from_widths(widths)
        if set(widths) == {1}:
            shape = f"chain-{len(widths)}"
        else:
            shape = "tree-" + "-".join(map(str, widths))
        return cls(prefix_of(drafters, combine) + shape, widths, drafters=drafters, combine=combine)

    @classmethod
    def from_tree(
        cls, tree: TokenTree, drafts: Sequence[str | Drafter] = FIRST, combine: str = ""
    ) -> SpecPlan:
        """A static tree of any topology, named after its nodes; see `from_widths`."""
        if tree.widths or tree.num_nodes == 1:
            return cls.from_widths(tree.widths, drafts, combine)
        # trees of equal size and depth are told apart by a checksum of their parents
        code = zlib.crc32(repr(tree.parents).encode()) & 0xFFFF
        drafters = drafters_of(*drafts)
        name = f"{prefix_of(drafters, combine)}tree-n{tree.num_nodes}-d{tree.max_depth}-{code:04x}"
        return cls(name, parents=tree.parents, drafters=drafters, combine=combine)

    @classmethod
    def from_dynamic(cls, dynamic: DynamicTree, draft: str | Drafter = FIRST[0]) -> SpecPlan:
        drafters = drafters_of(draft)
        return cls(prefix_of(drafters, "") + dynamic.name, dynamic=dynamic, drafters=drafters)

    @cached_property
    def speculates(self) -> bool:
        """False of off alone."""
        return bool(self.widths) or len(self.parents) > 1 or self.dynamic is not None

    @cached_property
    def shape(self) -> TokenTree:
        """What each draft but lookups proposes; only of a plan without a dynamic tree."""
        assert self.dynamic is None, "its shape is data"
        if self.parents:
            return TokenTree(self.parents)
        return TokenTree.from_widths(self.widths) if self.widths else TokenTree.chain(0)

    @property
    def tree(self) -> TokenTree:
        """The verified tree; only where `is_static`."""
        assert self.is_static, "the tree is data"
        return self.shape

    @cached_property
    def largest_tree(self) -> TokenTree:
        """The verified tree where no two drafts propose the same token; not of a dynamic tree.

        Where drafts are merged, the steps' trees are smaller: equal tokens below one parent are one
        node.
        """
        if self.combine != MERGE:
            return self.tree_of(self.drafters[0])
        return TokenTree.side_by_side([self.tree_of(drafter) for drafter in self.drafters])

    @cached_property
    def is_static(self) -> bool:
        """The topology is known when the engine is compiled: one model or view, no reranking."""
        return self.dynamic is None and not self.combine and self.drafters[0].is_asked

    @property
    def is_in_place(self) -> bool:
        """Whether node d of a path is always node d of the tree: its rows need not be moved.

        A model holds node d in row d after the committed ones, or in none, also where the tree is
        data: a lookup's chain ends early, and of a voted one a draft has the nodes up to where it
        proposed another.
        """
        if self.dynamic is not None or self.combine == MERGE:
            return False
        return list(self.shape.parents) == list(range(-1, self.num_nodes - 1))

    @cached_property
    def num_nodes(self) -> int:
        """N of the verified tree, root included; of data trees the most that can be alive."""
        if self.dynamic is not None:
            return self.dynamic.num_nodes
        if self.combine == MERGE:
            return 1 + sum(self.tree_of(drafter).num_draft_tokens for drafter in self.drafters)
        return self.tree_of(self.drafters[0]).num_nodes

    @cached_property
    def has_image(self) -> bool:
        """Whether proposals are not the nodes, one each: which node one is, is data."""
        return self.combine == MERGE or (self.dynamic is not None and self.dynamic.knows_counts)

    @cached_property
    def num_rows(self) -> int:
        """Cache rows after the committed ones that a step may write, of any model."""
        sizes = [drafter.num_written(self.max_depth) for drafter in self.models]
        return max(self.num_nodes, self.dynamic.num_fed if self.dynamic else 0, *sizes, 0)

    @cached_property
    def num_reached_rows(self) -> int:
        """Rows from the committed ones on that a step reaches.

        These are its nodes, and in the history the root, the accepted tokens and the bonus token.
        """
        return max(self.num_rows, self.max_depth + 2)

    @cached_property
    def max_depth(self) -> int:
        return self.dynamic.depth if self.dynamic is not None else self.shape.max_depth

    @cached_property
    def most_children(self) -> int:
        """Of a node of what a draft proposes."""
        if self.dynamic is not None:
            return self.dynamic.top_k
        parents = self.shape.parents[1:]
        return max(Counter(parents).values(), default=0)

    @cached_property
    def catch_up(self) -> int:
        """Last tokens of a sequence that its drafts may not have read before a step."""
        is_combined = bool(self.combine)
        return max(drafter.catch_up(self.max_depth, is_combined) for drafter in self.drafters)

    @cached_property
    def drafts(self) -> tuple[str, ...]:
        """Names of what proposes, as tables of measurements have them."""
        return tuple(drafter.name for drafter in self.drafters)

    @cached_property
    def asked(self) -> tuple[Drafter, ...]:
        """What drafting passes through a model for: models and the target itself."""
        return tuple(x for x in self.drafters if x.is_asked) if self.speculates else ()

    @cached_property
    def models(self) -> tuple[Drafter, ...]:
        """What has a model beside the target."""
        return tuple(x for x in self.asked if x.facts.has_program)

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self.models)

    @cached_property
    def reads_proposals(self) -> bool:
        """Whether steps are given proposals of the host."""
        return self.speculates and any(x.facts.is_hosts for x in self.drafters)

    @cached_property
    def is_hosts(self) -> bool:
        """Whether the host alone proposes: it knows all tokens before a step begins."""
        return all(drafter.facts.is_hosts for drafter in self.drafters)

    @cached_property
    def self_drafts(self) -> tuple[Drafter, ...]:
        """What drafts over the target's cache, with the target's weights."""
        return tuple(x for x in self.asked if x.facts.is_self)

    def with_drafters(self, drafters: Mapping[str, Drafter]) -> SpecPlan:
        """The plan of an engine whose models are these, by name; others are ordinary ones."""
        if not self.models:
            return self
        return replace(
            self, drafters=tuple(drafters.get(x.name, x).renamed(x.name) for x in self.drafters)
        )

    def drafter(self, name: str) -> Drafter | None:
        """What proposes with a model of this name; None where none does."""
        return next((x for x in self.asked if x.name == name), None)

    @cached_property
    def draft_lens(self) -> dict[int, str]:
        """Draft model that has a cache → environment name of its committed rows after a step."""
        return {_number(x): f"{x.name}_len" for x in self.models if x.has_rows}

    @cached_property
    def views(self) -> tuple[View, ...]:
        """Views that the target drafts with."""
        return tuple(x.view for x in self.asked if x.view is not None)

    @cached_property
    def chooses_blocks(self) -> bool:
        """Views see blocks that the target attended to most."""
        return any(view.chosen for view in self.views)

    def num_chosen(self, block_size: int, before: str | None = None) -> int:
        """Blocks that are chosen for its views, or for those before one of them.

        Args:
            block_size: rows of a block.
            before: name of a view; None counts all.
        """
        names = [view.name for view in self.views]
        own = self.views[: names.index(before)] if before else self.views
        return sum(view.blocks(block_size)[1] for view in own)

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Draft tokens of depth 1, 2, …; of a dynamic tree, as if every level were full in turn."""
        if self.dynamic is not None:
            return self.dynamic.level_sizes
        trees = [self.tree_of(drafter) for drafter in self.drafters]
        trees = trees if self.combine == MERGE else trees[:1]
        return tuple(
            sum(len(tree.levels[depth]) for tree in trees if depth <= tree.max_depth)
            for depth in range(1, self.max_depth + 1)
        )

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Sampling rules that are lossless for this plan's trees.

        Reranked and voted trees have lost what MSS and SWOR need: how often, and in which order,
        the draft drew a token. Trees in tiles have lost the logits themselves.

        Other drafts may have more to say.
        """
        is_kept = self.dynamic is not None and not self.dynamic.knows_counts
        if is_kept or self.combine == VOTE or self.tile is not None:
            return ANY_PROPOSALS
        if self.dynamic is not None:
            return tuple(Rule)
        is_merged = self.combine == MERGE
        own = [set(drafter.rules(self.shape, is_merged)) for drafter in self.drafters]
        return tuple(rule for rule in Rule if all(rule in rules for rules in own))

    def suits(self, params: SamplingParams) -> bool:
        """Whether a request with these options can speculate with this plan.

        Trees in tiles leave no logits for what reads or changes them.
        """
        is_lossless = params.is_greedy or params.rule_id in self.rules
        reads_logits = (
            params.logprobs is not None
            or params.structured_outputs is not None
            or params.has_controls
        )
        is_lost = self.tile is not None and reads_logits
        return params.speculative and is_lossless and not is_lost

    def tiles(self, count: int) -> tuple[tuple[int, int], ...]:
        """Bounds of the tiles of `count` nodes of a sequence: first, and after the last."""
        size = self.tile or count
        return tuple((first, min(first + size, count)) for first in range(0, count, size))

    @property
    def kind(self) -> str:
        return self.name.split("-")[0]

    def tree_of(self, drafter: Drafter) -> TokenTree:
        """Shape of one draft's proposals."""
        return drafter.tree_of(self.shape)


OFF = SpecPlan("off")


def models_of(plans: Iterable[SpecPlan]) -> dict[int, Drafter]:
    """Number of a draft model → how these plans draft with it."""
    return {_number(x): x for plan in plans for x in plan.models}


def replay_rows(plans: Iterable[SpecPlan]) -> int:
    """Nodes that a step verifies or a draft is fed, at most: what layers that keep states note of
    each, until it is decided.
    """
    return max((plan.num_rows for plan in plans), default=1)


def _number(drafter: Drafter) -> int:
    assert drafter.number is not None, "a model has one"
    return drafter.number
