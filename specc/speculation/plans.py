"""Speculation plans: what proposes, in which shape, and how proposals become one tree."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from specc.errors import ConfigError, TreeError
from specc.sampling.rows import Rule
from specc.speculation.block_drafts import BlockDraft, check_candidates, check_depth, flat_drafts
from specc.speculation.dynamic_tree import DynamicTree as DynamicTree
from specc.speculation.plan_names import FIRST_DRAFT, check_drafts, prefix_of
from specc.speculation.plan_names import MERGE as MERGE
from specc.speculation.plan_names import SUFFIX as SUFFIX
from specc.speculation.plan_names import VOTE as VOTE
from specc.speculation.plan_names import is_lookup as is_lookup
from specc.speculation.self_drafts import SelfDraft, is_self_draft
from specc.speculation.tree import MAX_NODES, TokenTree
from specc.speculation.views import View

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
        drafts: what proposes: `draft_0`, `draft_1`, …, `self_wW_sS` (the target over a view of its
            cache), `self_l0toL` (the target by some of its layers), `lookup-N` (n-grams of at most
            N tokens are looked up in the request), `suffix` (the host's index). A lookup proposes a
            chain as long as the shape is deep.
        combine: `merge` or `vote`, where several propose.
        tile: nodes of each sequence whose logits exist at a time; the models pass over the tree
            tile by tile. None: over all nodes at once, and what children were drawn from is kept
            until the tree is verified.
        heads: of its drafts, those that read the target's hidden states and hand rows on, see
            `docs/guide/drafts.md`.
        blocks: of its drafts, those that read them and propose all levels in one pass.
        sharpness: factors of the logits of drafts, see there; empty leaves them as they are.
    Raises:
        TreeError: more nodes than a tree may have, or nodes out of order.
        ConfigError: proposals that cannot be combined so, or a tile of no node.
    """

    name: str
    widths: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    dynamic: DynamicTree | None = None
    drafts: tuple[str, ...] = FIRST_DRAFT
    combine: str = ""
    tile: int | None = None
    heads: tuple[str, ...] = ()
    sharpness: Sharpness = ()
    blocks: tuple[BlockDraft, ...] = ()

    def __post_init__(self) -> None:
        shapes = [bool(self.widths), len(self.parents) > 1, self.dynamic is not None]
        assert sum(shapes) <= 1, "one shape"
        check_drafts(self.drafts, self.combine, self.dynamic is not None)
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
        if self.blocks:
            check_depth(self.name, self.max_depth, self.blocks)
            is_grown = any(block.is_biased for block in self.blocks)
            called = self.blocks[0].called
            check_candidates(self.name, None if is_grown else self.dynamic, called)

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
        drafts: tuple[str, ...] = FIRST_DRAFT,
        combine: str = "",
    ) -> SpecPlan:
        """Name a plan after its widths; all ones is a chain, no level is off."""
        widths = tuple(widths)
        if not widths:
            return cls("off")
        TokenTree.from_widths(widths)
        if set(widths) == {1}:
            shape = f"chain-{len(widths)}"
        else:
            shape = "tree-" + "-".join(map(str, widths))
        return cls(prefix_of(drafts, combine) + shape, widths, drafts=drafts, combine=combine)

    @classmethod
    def from_tree(
        cls, tree: TokenTree, drafts: tuple[str, ...] = FIRST_DRAFT, combine: str = ""
    ) -> SpecPlan:
        """A static tree of any topology, named after its nodes."""
        if tree.widths or tree.num_nodes == 1:
            return cls.from_widths(tree.widths, drafts, combine)
        # trees of equal size and depth are told apart by a checksum of their parents
        code = zlib.crc32(repr(tree.parents).encode()) & 0xFFFF
        name = f"{prefix_of(drafts, combine)}tree-n{tree.num_nodes}-d{tree.max_depth}-{code:04x}"
        return cls(name, parents=tree.parents, drafts=drafts, combine=combine)

    @classmethod
    def from_dynamic(cls, dynamic: DynamicTree, draft: str = "draft_0") -> SpecPlan:
        name = f"dynamic-{dynamic.num_nodes}-{dynamic.top_k}-{dynamic.depth}"
        return cls(prefix_of((draft,), "") + name, dynamic=dynamic, drafts=(draft,))

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
            return self.tree_of(self.drafts[0])
        return TokenTree.side_by_side([self.tree_of(draft) for draft in self.drafts])

    @cached_property
    def is_static(self) -> bool:
        """The topology is known when the engine is compiled: one model or view, no reranking."""
        return self.dynamic is None and not self.combine and not is_lookup(self.drafts[0])

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
            return 1 + sum(self.tree_of(draft).num_draft_tokens for draft in self.drafts)
        return self.tree_of(self.drafts[0]).num_nodes

    @cached_property
    def num_rows(self) -> int:
        """Cache rows after the committed ones that a step may write, of any model."""
        sizes = [block.num_written for block in self.blocks]
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
    def catch_up(self) -> int:
        """Last tokens of a sequence that the first level of a draft model reads.

        After a step of the same plan it has not seen these: the accepted leaf and the bonus token,
        and of several drafts' proposals all that the others made. A head has seen none of what was
        accepted with the target's hidden states, which it reads now. A block drafter reads those of
        as many tokens, and the root. Medusa heads read no token.
        """
        if any(not block.is_flat for block in self.blocks):
            return self.max_depth + 2
        if all(is_self_draft(x) or x in flat_drafts(self.blocks) for x in self.drafts):
            return 1
        reads_all = self.combine or self.heads
        return self.max_depth + 1 if reads_all else min(2, self.max_depth + 1)

    def first_level(self, draft: str) -> int:
        """Last tokens of a sequence that the first level of a draft reads.

        Of a self-draft only the root: the rows before it are the target's own, and must stay them.
        """
        return 1 if is_self_draft(draft) else self.catch_up

    @cached_property
    def models(self) -> tuple[str, ...]:
        """Draft models that take part."""
        if not self.speculates:
            return ()
        return tuple(d for d in self.drafts if not (is_lookup(d) or is_self_draft(d)))

    def with_heads(
        self, names: Collection[str], blocks: Mapping[str, BlockDraft] = MappingProxyType({})
    ) -> SpecPlan:
        """The plan of an engine with these heads and block drafters, by name."""
        own = tuple(replace(blocks[x], draft=x) for x in self.models if x in blocks)
        return replace(self, heads=tuple(x for x in self.models if x in names), blocks=own)

    def block_of(self, draft: str) -> BlockDraft | None:
        """What one pass of a draft fills; None of one that has a pass for each level."""
        return next((block for block in self.blocks if block.draft == draft), None)

    def is_product(self, draft: str) -> bool:
        """Whether all nodes of a depth have the same children, from one row of logits."""
        return any(block.draft == draft and not block.is_biased for block in self.blocks)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Drafts that move no rows at commit: they read what was accepted from the target."""
        return (*self.heads, *(block.draft for block in self.blocks))

    @cached_property
    def draft_lens(self) -> dict[int, str]:
        """Draft model that has a cache → environment name of its committed rows after a step."""
        models = [model for model in self.models if model not in flat_drafts(self.blocks)]
        return {_number(model): f"{model}_len" for model in models}

    @cached_property
    def self_drafts(self) -> tuple[SelfDraft, ...]:
        """What the target drafts by itself."""
        found = map(SelfDraft.named, self.drafts) if self.speculates else ()
        return tuple(draft for draft in found if draft is not None)

    @cached_property
    def views(self) -> tuple[View, ...]:
        """Views that the target drafts with."""
        return tuple(draft.view for draft in self.self_drafts if draft.view is not None)

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
    def asked(self) -> tuple[str, ...]:
        """Drafts that are asked level by level: models and the target itself."""
        return tuple(d for d in self.drafts if not is_lookup(d)) if self.speculates else ()

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Draft tokens of depth 1, 2, …; of a dynamic tree, as if every level were full in turn."""
        if self.dynamic is not None:
            return self.dynamic.level_sizes
        trees = [self.tree_of(draft) for draft in self.drafts]
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

        MSS draws siblings that may be equal, and merging makes one node of them, with the children
        of both. Those of a block drafter are the same draws twice, not two draws, unless its logits
        depend on the token before.
        """
        if self.dynamic is not None or self.combine == VOTE or self.tile is not None:
            return (Rule.COUPLED, Rule.DELTA)
        draws_again = any(len(level) > 1 for level in self.shape.levels[1:-1])
        draws_once = any(not block.is_biased for block in self.blocks)
        if self.combine == MERGE and draws_once and draws_again:
            return (Rule.COUPLED, Rule.DELTA, Rule.SWOR)
        return tuple(Rule)

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

    def tree_of(self, draft: str) -> TokenTree:
        """Shape of one draft's proposals."""
        return TokenTree.chain(self.max_depth) if is_lookup(draft) else self.shape


OFF = SpecPlan("off")


def heads_of(plans: Iterable[SpecPlan]) -> set[int]:
    """Numbers of the heads of some plans: what they hand on stands for hidden states."""
    return {_number(name) for plan in plans for name in plan.heads}


def blocks_of(plans: Iterable[SpecPlan]) -> set[int]:
    """Numbers of the block drafters of some plans."""
    return {_number(block.draft) for plan in plans for block in plan.blocks}


def _number(draft: str) -> int:
    return int(draft.removeprefix("draft_"))
