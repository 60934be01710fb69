"""Drafts that propose all levels of a tree in one pass, of what the target has left."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, get_type_hints

from specc.bounds import (
    MAY_BE_ABSENT,
    MOST_COLUMNS,
    MOST_IDS,
    MOST_LAYERS,
    is_bounded,
    number,
    within,
)
from specc.drafters.drafter import Drafter
from specc.drafters.model import PREFIX
from specc.errors import ConfigError, EngineError, TreeError
from specc.sampling.rows import Rule
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OnePassEntry:
    """What a plan of JSON says of a draft that proposes all levels in one pass, of every kind.

    Args:
        size: B; of a kind whose passes have as many rows as its tree has levels, the most of them.
        mask_token_id: what stands for a token that is not known.
        from_anchor: the row of the anchor proposes the token after it, and so on, B tokens; else
            each mask proposes the token in its own place, B - 1 of them.
        is_causal: a row sees the rows of a block up to itself, in all layers; else all of them.
        causal_layers: layers in which a row sees those up to itself where in others it sees all of
            them; the drafter's program says so, see `passes/drafters/see_blocks.py`.
        is_biased: logits of a row depend on the tokens before the one that it proposes, by a
            product of low rank that is added to them (DSpark): a tree is drawn level by level.
        is_partial: it has logits of some of the target's ids alone.
        is_flat: it is no block drafter: see the kinds that set it.
        bias_kind: what is added, where it is biased; one of `specc.drafters.block.BIAS_KINDS`.
        confidence: what its head reads that estimates acceptance; empty where none is read.
        hidden_columns: d of hidden states that the drafter's program puts out after the logits of
            each row; 0 where nothing reads them.
        draft: name of the drafter, in a plan.
        kind: of the draft; empty of block drafters and Medusa heads, which `is_flat` tells apart.
        num_layers: of each head, of kinds whose steps compute heads.
        candidates: K best tokens of each row alone may follow, where it is biased; 0 is all.
        is_tied: layers of a head after its first are one.
        num_heads: of attention, of kinds whose steps attend.
        inner_width: columns of what such steps compute.
        scale: what such steps multiply scores with.
        norm_eps: what their norms add to a mean square.
        vector_eps: the least length that vectors are divided by.
    """

    size: int = field(metadata=within(1, MAX_NODES))
    mask_token_id: int = field(metadata=within(0, MOST_IDS))
    from_anchor: bool = False
    is_causal: bool = False
    causal_layers: tuple[int, ...] = number(0, MOST_LAYERS, default=())
    is_biased: bool = False
    is_partial: bool = False
    is_flat: bool = False
    draft: str = ""
    bias_kind: str = "vanilla"
    hidden_columns: int = number(0, MOST_IDS, default=0)
    confidence: str = ""
    kind: str = field(default="", metadata={MAY_BE_ABSENT: True})
    num_layers: int = number(0, MOST_LAYERS, default=0, metadata={MAY_BE_ABSENT: True})
    candidates: int = number(0, MOST_IDS, default=0, metadata={MAY_BE_ABSENT: True})
    is_tied: bool = field(default=False, metadata={MAY_BE_ABSENT: True})
    num_heads: int = number(0, MOST_COLUMNS, default=0, metadata={MAY_BE_ABSENT: True})
    inner_width: int = number(0, MOST_COLUMNS, default=0, metadata={MAY_BE_ABSENT: True})
    scale: float = number(0.0, 1e6, default=0.0, metadata={MAY_BE_ABSENT: True})
    norm_eps: float = number(0.0, 1.0, default=0.0, metadata={MAY_BE_ABSENT: True})
    vector_eps: float = number(0.0, 1.0, default=0.0, metadata={MAY_BE_ABSENT: True})

    def to_json(self) -> dict[str, Any]:
        """All fields but those that engines without such drafts do not have."""
        return without_defaults(asdict(self))


def without_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an `OnePassEntry` without those that may be absent and say nothing."""
    absent = {x.name: x.default for x in fields(OnePassEntry) if MAY_BE_ABSENT in x.metadata}
    return {name: x for name, x in data.items() if name not in absent or x != absent[name]}


@dataclass(frozen=True)
class OnePass(OnePassEntry, Drafter):
    """A draft that proposes all levels in one pass."""

    @property
    def name(self) -> str:
        return self.draft

    @property
    def number(self) -> int:
        return int(self.draft.removeprefix(PREFIX))

    @property
    def is_product(self) -> bool:
        return not self.depends_on_path

    @property
    def keeps_paths(self) -> bool:
        """A node costs a small product, if anything, where it costs others a pass."""
        return not self.computes_levels

    @property
    def most_depth(self) -> int:
        return self.num_proposed

    @property
    def first_row(self) -> int:
        """Row of a block that proposes the token after the anchor."""
        return 0 if self.from_anchor else 1

    @property
    def num_proposed(self) -> int:
        """Tokens that a pass proposes: levels of a tree, at most."""
        return self.size - self.first_row

    def renamed(self, name: str) -> Self:
        return replace(self, draft=name)

    @abstractmethod
    def num_read(self, depth: int) -> int:
        """Rows of a pass for a tree of this depth."""

    @abstractmethod
    def pass_inputs(
        self, tokens: Sequence[int], root: int, table: Tensor, depth: int
    ) -> list[Tensor | None]:
        """Inputs of the pass of one sequence, in the order of `ModelProgram.forward`.

        Args:
            tokens: that it has not read, the root last.
            root: its position.
            table: [1, blocks] of the sequence.
            depth: levels that it is to propose.
        """

    def logits_along(
        self, weights: Mapping[str, Tensor], made: Tensor, tokens: Sequence[int], before: int
    ) -> Tensor:
        """Logits [n, V] after the root and each of the tokens that came after it.

        Args:
            weights: of the drafter.
            made: what its pass has returned.
            tokens: n of them, the root first.
            before: the token before the root; the root itself where there is none.
        """
        return made[: len(tokens)]

    def passes(self, depth: int, levels: Sequence[int]) -> tuple[int, ...]:
        return (self.num_read(depth),)

    def rules(self, shape: TokenTree, is_merged: bool) -> tuple[Rule, ...]:
        return product_rules(shape, is_merged) if self.is_product else tuple(Rule)

    def check_plan(self, plan: str, depth: int, widest: int, dynamic: DynamicTree | None) -> None:
        if depth > self.num_proposed:
            raise ConfigError(
                f"plan {plan} of depth {depth}, and {self.draft}, which proposes"
                f" {self.num_proposed} tokens a pass",
                f"a tree of depth {self.num_proposed} or less",
                f"pass --num-speculative-tokens {self.num_proposed}",
            )
        if self.candidates and widest > self.candidates:
            raise ConfigError(
                f"plan {plan} of {widest} children, and {self.draft}, which chooses them among"
                f" {self.candidates} tokens",
                f"{self.candidates} children of a node or fewer",
                f"choose a narrower tree, or pass --draft-assume candidates={widest}, or more",
            )
        if dynamic is not None and self.keeps_paths:
            check_candidates(plan, dynamic, f"a {self.facts.called}")

    @property
    def is_possible(self) -> bool:
        """Whether a draft of the kind can have these fields."""
        return True

    def is_plain(self, kind: str) -> bool:
        """Whether this is a causal pass of a kind, from the anchor on, and nothing more."""
        reads_more = self.is_biased or self.hidden_columns or self.confidence or self.candidates
        is_other = self.is_flat or self.is_partial or self.causal_layers or self.kind != kind
        return self.from_anchor and self.is_causal and not (reads_more or is_other)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises EngineError: no draft of the kind."""
        try:
            block = cls(**{**data, "causal_layers": tuple(data.get("causal_layers", ()))})
        except (TypeError, AttributeError) as error:
            raise _invalid(data) from error
        types = get_type_hints(OnePassEntry)
        values = {name: getattr(block, name) for name in types}
        is_typed = all(type(x) is int for x in values.pop("causal_layers"))
        is_typed = is_typed and all(type(x) is types[name] for name, x in values.items())
        if not (is_typed and is_bounded(block) and block.num_proposed >= 1 and block.is_possible):
            raise _invalid(data)
        return block


def product_rules(shape: TokenTree, is_merged: bool) -> tuple[Rule, ...]:
    """Rules that are lossless where all nodes of a depth have children of one row of logits.

    MSS draws siblings that may be equal, and merging makes one node of them, with the children of
    both. Those of one row of logits are the same draws twice, not two draws.
    """
    draws_again = any(len(level) > 1 for level in shape.levels[1:-1])
    if is_merged and draws_again:
        return tuple(rule for rule in Rule if rule is not Rule.MSS)
    return tuple(Rule)


def check_candidates(plan: str, tree: DynamicTree, called: str) -> None:
    """Compare what a best-first tree is chosen from with what a step has room for.

    Each level has the best nodes of those above, and the children of as many.

    Args:
        plan: its name.
        tree: its shape.
        called: what people call the draft that offers them.
    Raises:
        TreeError: more than `4 * MAX_NODES` candidates at a time.
    """
    count = tree.num_nodes + max(tree.path_widths) * tree.top_k
    if count > 4 * MAX_NODES:
        raise TreeError(
            f"plan {plan}, which {called} offers {count} candidates at a time",
            f"at most {4 * MAX_NODES}",
            "choose fewer nodes or children",
        )


def _invalid(data: Any) -> EngineError:
    return EngineError(
        f"a block {data!r:.80}",
        "its size, its mask token, and flags",
        "compile the engine again",
    )
