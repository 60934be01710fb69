"""Drafts that propose all levels of a tree in one pass, of what the target has left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from specc.bounds import MOST_IDS, MOST_LAYERS, is_bounded, number, within
from specc.drafters.drafter import Drafter
from specc.drafters.model import PREFIX
from specc.errors import ConfigError, EngineError, TreeError
from specc.sampling.rows import Rule
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.tree import MAX_NODES, TokenTree


@dataclass(frozen=True)
class OnePass(Drafter):
    """What one pass of a draft reads that reads hidden states, and which tokens it proposes.

    A plan of JSON has all of these fields of every kind.

    Args:
        size: B.
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

    @property
    def name(self) -> str:
        return self.draft

    @property
    def number(self) -> int:
        return int(self.draft.removeprefix(PREFIX))

    @property
    def is_product(self) -> bool:
        return not self.is_biased

    @property
    def depends_on_path(self) -> bool:
        return self.is_biased

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

    def num_read(self, depth: int) -> int:
        """Rows of a pass for a tree of this depth."""
        raise NotImplementedError

    def passes(self, depth: int, levels: Sequence[int]) -> tuple[int, ...]:
        return (self.num_read(depth),)

    def rules(self, shape: TokenTree, is_merged: bool) -> tuple[Rule, ...]:
        """MSS draws siblings that may be equal, and merging makes one node of them, with the
        children of both. Those of one row of logits are the same draws twice, not two draws.
        """
        draws_again = any(len(level) > 1 for level in shape.levels[1:-1])
        if is_merged and self.is_product and draws_again:
            return tuple(rule for rule in Rule if rule is not Rule.MSS)
        return super().rules(shape, is_merged)

    def check_plan(self, plan: str, depth: int, dynamic: DynamicTree | None) -> None:
        if depth > self.num_proposed:
            raise ConfigError(
                f"plan {plan} of depth {depth}, and {self.draft}, which proposes"
                f" {self.num_proposed} tokens a pass",
                f"a tree of depth {self.num_proposed} or less",
                f"pass --num-speculative-tokens {self.num_proposed}",
            )
        if dynamic is not None and self.is_product:
            check_candidates(plan, dynamic, f"a {self.facts.called}")

    @property
    def is_possible(self) -> bool:
        """Whether a draft of the kind can have these fields."""
        return True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises EngineError: no draft of the kind."""
        try:
            block = cls(**{**data, "causal_layers": tuple(data.get("causal_layers", ()))})
        except (TypeError, AttributeError) as error:
            raise _invalid(data) from error
        numbers = (block.size, block.mask_token_id, block.hidden_columns, *block.causal_layers)
        flags = (
            block.from_anchor, block.is_causal, block.is_biased, block.is_partial, block.is_flat,
        )  # fmt: skip
        if any(type(x) is not int for x in numbers) or any(type(x) is not bool for x in flags):
            raise _invalid(data)
        is_named = all(isinstance(x, str) for x in (block.draft, block.bias_kind, block.confidence))
        if block.num_proposed < 1 or not is_bounded(block) or not is_named or not block.is_possible:
            raise _invalid(data)
        return block


def check_candidates(plan: str, tree: DynamicTree, called: str) -> None:
    """Compare what a best-first tree is chosen from with what a step has room for.

    Every depth keeps as many paths as the tree has nodes, not K as with draft models.

    Args:
        plan: its name.
        tree: its shape.
        called: what people call the draft that offers them.
    Raises:
        TreeError: more than `4 * MAX_NODES` candidates.
    """
    count, width = 1, 1
    for _ in range(tree.depth):
        count += width * tree.top_k
        width = min(width * tree.top_k, tree.num_nodes - 1)
    if count > 4 * MAX_NODES:
        raise TreeError(
            f"plan {plan}, which {called} offers {count} candidates",
            f"at most {4 * MAX_NODES}",
            "choose fewer nodes, children or levels",
        )


def _invalid(data: Any) -> EngineError:
    return EngineError(
        f"a block {data!r:.80}",
        "its size, its mask token, and flags",
        "compile the engine again",
    )
