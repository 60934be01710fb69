"""Drafts that propose several tokens in one pass: from masks (DFlash, DSpark), or Medusa heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specc.bounds import MOST_IDS, MOST_LAYERS, is_bounded, number, within
from specc.errors import ConfigError, EngineError, TreeError
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.tree import MAX_NODES, pack_bits

# what people call them
BLOCK_DRAFTER, MEDUSA_HEADS = "a block drafter", "a set of Medusa heads"
# of a block whose layers differ in what its rows see: as many as a word counts
MOST_ROWS = 63
# how logits depend on tokens before, see `passes/step/block_bias.py`
VANILLA, GATED, RNN = BIAS_KINDS = ("vanilla", "gated", "rnn")
# what steps call the tensors that make logits depend on the token before: name in the weight file
BIAS_TENSORS = {
    "bias_in": "markov_head.markov_w1.weight",
    "bias_out": "markov_head.markov_w2.weight",
    "bias_columns": "markov_head.columns",
}
# likewise, of those kinds that read hidden states
JOINT_TENSORS = {
    GATED: {
        "bias_joint": "markov_head.gate_proj.weight",
        "bias_offset": "markov_head.gate_proj.bias",
    },
    RNN: {
        "bias_joint": "markov_head.joint_proj.weight",
        "bias_offset": "markov_head.joint_proj.bias",
    },
}
# what a head reads that estimates how likely the target accepts the next token: the hidden state of
# the row that proposes it, and W1 of the token before
OF_ROW, OF_TOKEN = "row", "row and token"
CONFIDENCE_TENSORS = {
    "confidence": "confidence_head.proj.weight",
    "confidence_offset": "confidence_head.proj.bias",
}
# for people
_DEPENDS = {
    VANILLA: "logits depend on the token before",
    GATED: "logits depend on the token before, gated by hidden states",
    RNN: "logits depend on all tokens of the block before",
}


@dataclass(frozen=True)
class BlockDraft:
    """What one pass of a block drafter reads, and which tokens it proposes.

    It reads the newest token, the anchor, and masks after it: B rows from the anchor's position on.
    Medusa heads, which are flat, read one row: the target's hidden states of the token before the
    anchor. They have no rows of a cache, so nothing of a sequence has to be read before, or kept.

    Args:
        size: B.
        mask_token_id: what stands for a token that is not known.
        from_anchor: the row of the anchor proposes the token after it, and so on, B tokens; else
            each mask proposes the token in its own place, B - 1 of them.
        is_causal: a row sees the rows of a block up to itself, in all layers; else all of them.
        causal_layers: layers in which a row sees those up to itself where in others it sees all of
            them; the drafter's program says so, see `passes/rewrite/see_blocks.py`.
        is_biased: logits of a row depend on the tokens before the one that it proposes, by a
            product of low rank that is added to them (DSpark): a tree is drawn level by level.
        is_partial: it has logits of some of the target's ids alone.
        is_flat: B heads read one row, each for a depth: head j proposes token j + 1 after the
            anchor. `from_anchor` is set, and no mask is read.
        bias_kind: what is added, where it is biased; one of `BIAS_KINDS`.
        confidence: what its head reads that estimates acceptance, `OF_ROW` or `OF_TOKEN`; empty
            where none is read.
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
    bias_kind: str = VANILLA
    hidden_columns: int = number(0, MOST_IDS, default=0)
    confidence: str = ""

    @property
    def called(self) -> str:
        """What people call it."""
        return MEDUSA_HEADS if self.is_flat else BLOCK_DRAFTER

    @property
    def first_row(self) -> int:
        """Row of a block that proposes the token after the anchor."""
        return 0 if self.from_anchor else 1

    @property
    def num_proposed(self) -> int:
        """Tokens that a pass proposes: levels of a tree, at most."""
        return self.size - self.first_row

    @property
    def num_written(self) -> int:
        """Rows of its cache, from the anchor's on, that a pass writes."""
        return 0 if self.is_flat else self.size

    def num_read(self, depth: int) -> int:
        """Rows of a pass for a tree of this depth.

        They are those of the context that a step may have accepted, and the block.
        """
        return 1 if self.is_flat else depth + 1 + self.size

    def num_logits(self, depth: int) -> int:
        """Rows of logits that exist for a tree of this depth at a time.

        All heads of a pass have some, and those of the tree are put in the order of its levels.
        While the pass joins what its heads have made there are twice as many of these: its
        workspace has them.
        """
        return self.size + depth if self.is_flat else depth

    @property
    def bias_tensors(self) -> dict[str, str]:
        """Name in the environment of a step → in the weight file, of what its logits depend on."""
        names = ("bias_in", "bias_out", *(("bias_columns",) if self.is_partial else ()))
        keys = {x: BIAS_TENSORS[x] for x in names} | JOINT_TENSORS.get(self.bias_kind, {})
        keys |= CONFIDENCE_TENSORS if self.confidence else {}
        return {f"{self.draft}_{x}": key for x, key in keys.items() if self.is_biased}

    @property
    def reads_hidden(self) -> bool:
        """Whether steps compute with hidden states of its rows."""
        return self.bias_kind != VANILLA or bool(self.confidence)

    def without_confidence(self) -> BlockDraft:
        """The same, whose estimates of acceptance nothing reads."""
        hidden = 0 if self.bias_kind == VANILLA else self.hidden_columns
        return replace(self, confidence="", hidden_columns=hidden)

    def rows_seen(self, before: int) -> Tensor:
        """Which rows of a block each row of a pass sees, as bits of words.

        Args:
            before: rows of the context that the pass begins with. They see no row of the block;
                nothing reads what is computed of them but keys and values, which do not depend on
                it.
        Returns:
            [before + B, W] int64, as the `ancestors` of a tree: a bit for each row of the pass,
            those after the block are in no cache.
        """
        seen = torch.ones(self.size, self.size, dtype=torch.bool)
        seen = seen.tril() if self.is_causal else seen
        rows = torch.zeros(before + self.size, before + self.size, dtype=torch.bool)
        rows[before:, : self.size] = seen
        return pack_bits(rows)

    def offsets(self, before: int) -> Tensor:
        """Where in a block each row of a pass is, as its second row of features says it.

        Args:
            before: see `rows_seen`.
        Returns:
            [before + B] int32, -1 - j of row j of the block, -1 of those before it: below 0, as
            nothing is read there.
        """
        return torch.cat([torch.zeros(before), torch.arange(self.size)]).int().neg() - 1

    def describe(self) -> str:
        """For people."""
        if self.is_flat:
            return f"{self.size} heads read one row: {self.num_proposed} tokens a pass"
        sees = "up to itself" if self.is_causal else "in both directions"
        if self.causal_layers:
            layers = ", ".join(map(str, self.causal_layers))
            sees += f" (in layers {layers} up to itself)"
        biased = f"; {_DEPENDS[self.bias_kind]}" if self.is_biased else ""
        biased += "; says how likely each token is accepted" if self.confidence else ""
        return (
            f"blocks of {self.size} rows, of which each sees the others {sees}:"
            f" {self.num_proposed} tokens a pass; mask token {self.mask_token_id}{biased}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BlockDraft:
        """Raises EngineError: no block."""
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
        is_named = isinstance(block.draft, str) and block.bias_kind in BIAS_KINDS
        is_named = is_named and (block.hidden_columns > 0) == block.reads_hidden
        is_named = is_named and block.confidence in ("", OF_ROW, OF_TOKEN)
        is_named = is_named and (block.is_biased or not block.reads_hidden)
        if block.is_flat and (not block.from_anchor or block.is_biased):
            raise _invalid(data)
        if block.num_proposed < 1 or not is_bounded(block) or not is_named:
            raise _invalid(data)
        return block


def flat_drafts(blocks: Sequence[BlockDraft]) -> tuple[str, ...]:
    """Names of those that have no cache."""
    return tuple(block.draft for block in blocks if block.is_flat)


def joint_shapes(kind: str, rank: int, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a kind of bias has besides its two matrices, by name.

    Args:
        kind: of `BIAS_KINDS`.
        rank: r.
        width: d, of hidden states.
    """
    if kind not in JOINT_TENSORS:
        return {}
    weight, offset = JOINT_TENSORS[kind].values()
    rows, columns = (rank, width + rank) if kind == GATED else (3 * rank, width + 2 * rank)
    return {weight: (rows, columns), offset: (rows,)}


def check_depth(plan: str, depth: int, blocks: Sequence[BlockDraft]) -> None:
    """Compare a tree with what passes propose.

    Args:
        plan: its name.
        depth: levels of its tree.
        blocks: of its drafts.
    Raises:
        ConfigError: it is deeper.
    """
    for block in blocks:
        if depth > block.num_proposed:
            raise ConfigError(
                f"plan {plan} of depth {depth}, and {block.draft}, which proposes"
                f" {block.num_proposed} tokens a pass",
                f"a tree of depth {block.num_proposed} or less",
                f"pass --num-speculative-tokens {block.num_proposed}",
            )


def check_candidates(plan: str, tree: DynamicTree | None, called: str) -> None:
    """Compare what a best-first tree is chosen from with what a step has room for.

    Every depth keeps as many paths as the tree has nodes, not K as with draft models.

    Args:
        plan: its name.
        tree: its shape; None is a static one, or one that is grown level by level.
        called: what people call the draft that offers them.
    Raises:
        TreeError: more than `4 * MAX_NODES` candidates.
    """
    if tree is None:
        return
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
