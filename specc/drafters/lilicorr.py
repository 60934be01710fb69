"""LiLiCorr drafters (arXiv:2608.20530): a small transformer over the best tokens of all depths.

DFlash's pass leaves logits U_j and hidden states h_j of S = B - 1 rows. Of each row the K best
tokens are nodes of a dense transformer, which sees all of them; what it makes of a node is two
vectors of length 1, and what it makes of the context another one:

    score of c at depth 1 = scale · ⟨start, in_c⟩;   of c after p = scale · ⟨out_p, in_c⟩

These are the logits of the K tokens, whatever U says. So children of a node depend on which of the
candidates it is; steps compute the transformer once, after the pass.
Sources: NVIDIA/Model-Optimizer modelopt/torch/speculative; sgl-project/sglang models/lilicorr.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specc.drafters import block
from specc.drafters.facts import DrafterFacts
from specc.drafters.scored_block import EMBEDDING as EMBEDDING
from specc.drafters.scored_block import Call, ScoredBlock, run

aten = torch.ops.aten

FACTS: DrafterFacts = replace(block.DFLASH2_FACTS, kind="lilicorr", module="lilicorr", methods=())
PREFIX = "lilicorr."
# of the features of a node: their number, and the epsilon of their norm
FEATURES, FEATURE_EPS = 5, 1e-5
# [2, K] of what nodes are by their rank: rank / (K - 1), and whether it is the first
RANKS = f"{PREFIX}ranks"
# log probabilities below are those of tokens that nobody may take
_LEAST = -1e4


class Vectors(NamedTuple):
    """What scores are made of.

    Args:
        start: [B, f].
        left: [B, S * K, f] of what comes before, slot by slot.
        right: [B, S * K, f] of what comes after.
    """

    start: Any
    left: Any
    right: Any


@dataclass(frozen=True)
class LiLiCorrDraft(ScoredBlock):
    """K is `candidates`; the transformer has `num_layers` layers of `num_heads` heads."""

    facts = FACTS

    @property
    def is_as_wide(self) -> bool:
        """Whether its nodes are as wide as the rows of the block."""
        return self.inner_width == self.hidden_columns

    @property
    def is_possible(self) -> bool:
        sizes = (self.candidates, self.num_layers, self.num_heads)
        is_even = min(sizes) > 0 < self.inner_width and self.inner_width % self.num_heads == 0
        is_plain = not (self.is_partial or self.from_anchor)
        is_scaled = self.scale > 0 and self.norm_eps > 0 and self.vector_eps > 0
        return super().is_possible and is_plain and is_scaled and is_even

    @property
    def parameters(self) -> list[str]:
        layers = [f"layers.{i}.{part}" for i in range(self.num_layers) for part in _OF_LAYERS]
        ends = [] if self.is_as_wide else ["token_proj.weight", "token_proj.bias"]
        own = [f"{PREFIX}{name}" for name in (*ends, *_ENDS, *layers)]
        return [EMBEDDING, RANKS, *own]

    @property
    def reads_context(self) -> bool:
        return True

    def logit_places(self, before: int, depth: int) -> Tensor:
        """All rows that propose, whatever the depth is; then the last row of the context, whose
        hidden state is what its hidden states of the target become.
        """
        rows = super().logit_places(before, self.num_proposed)
        return torch.cat([rows, torch.tensor([before - 1])])

    def num_logits(self, depth: int) -> int:
        return self.size

    def describe_logits(self, depth: int) -> str:
        return f"{self.num_proposed} tokens of a block"

    def constants(self, depth: int) -> dict[str, Tensor]:
        """Which columns of the bias of attention slots have to each other, [S * S] int64."""
        slots = torch.arange(self.num_proposed)
        relative = slots[:, None] - slots + self.size - 1
        return super().constants(depth) | {f"{self.name}_relative": relative.flatten()}

    def pass_inputs(
        self, tokens: Sequence[int], root: int, table: Tensor, depth: int
    ) -> list[Tensor | None]:
        """The last row of the context is read once more where all of them have been."""
        before = tokens if len(tokens) > 1 else [self.mask_token_id, *tokens]
        return super().pass_inputs(before, root, table, depth)

    def logits_along(
        self, weights: Mapping[str, Tensor], made: Tensor, tokens: Sequence[int], before: int
    ) -> Tensor:
        logits, hidden = made.tensor_split([made.shape[1] - self.hidden_columns], 1)
        rows = slice(0, self.num_proposed)
        chosen = logits[rows].sort(dim=1, descending=True, stable=True).indices
        chosen, relative = chosen[:, : self.candidates], self.constants(0)[f"{self.name}_relative"]
        vectors = vectors_of(
            run,
            self,
            weights.__getitem__,
            logits[rows],
            hidden[rows],
            hidden[-1:],
            chosen,
            relative.to(logits.device),
        )
        scores = torch.full_like(logits[: len(tokens)], -torch.inf)
        for depth, token in enumerate(tokens):
            first, source = depth * self.candidates, vectors.start[0]
            if depth:
                place = int((chosen[depth - 1] == token).int().argmax())
                source = vectors.left[0, first - self.candidates + place]
            row = self.scale * (vectors.right[0, first : first + self.candidates] @ source)
            known = logits[depth, chosen[depth]] > -torch.inf
            scores[depth, chosen[depth]] = row.where(known, -torch.inf)
        return scores

    def describe(self) -> str:
        return (
            f"{self.describe_pass()}; a transformer of {self.num_layers} layers over the"
            f" {self.candidates} best tokens of each row scores what follows what"
        )


_LINEAR = ("pass_hidden_proj", "feature_mlp.up_proj", "feature_mlp.down_proj", "context_proj")
_HEADS = ("factor_input_proj", "out_head", "in_head", "anchor_out_head")
_ENDS = (
    *(f"{name}.{part}" for name in (*_LINEAR, *_HEADS) for part in ("weight", "bias")),
    "feature_norm.weight", "feature_norm.bias", "slot_embedding", "rank_embedding",
    "relative_slot_bias", "same_slot_bias", "output_norm.weight", "anchor_norm.weight",
)  # fmt: skip
_OF_LAYERS = (
    "attn_norm.weight", "attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight",
    "attn.out_proj.bias", "mlp_norm.weight", "mlp.up_proj.weight", "mlp.up_proj.bias",
    "mlp.down_proj.weight", "mlp.down_proj.bias",
)  # fmt: skip


def vectors_of(
    call: Call,
    draft: LiLiCorrDraft,
    weights: Callable[[str], Any],
    logits: Any,
    hidden: Any,
    context: Any,
    chosen: Any,
    relative: Any,
    has_context: Any = None,
) -> Vectors:
    """Run the transformer, of tensors or into a graph.

    Args:
        call: an operator.
        draft: whose it is.
        weights: key → tensor.
        logits: [S * B, V] of rows, those of one slot after those of another.
        hidden: [S * B, d] of the same rows.
        context: [B, d] of the last row of the context.
        chosen: [S * B, K] int64, the best tokens of each row, the best one first.
        relative: see `LiLiCorrDraft.constants`.
        has_context: [B, 1] bool, whether there is such a row; None is everywhere.
    """
    return _Transformer(call, draft, weights, relative).run(
        logits, hidden, context, chosen, has_context
    )


class _Transformer:
    """What `vectors_of` runs; shapes are those of its arguments, N is S * K, w its width."""

    def __init__(
        self, call: Call, draft: LiLiCorrDraft, weights: Callable[[str], Any], relative: Any
    ) -> None:
        self._call, self._draft, self._weights, self._relative = call, draft, weights, relative
        self._slots, self._count = draft.num_proposed, draft.candidates
        self._width = draft.inner_width

    def run(self, logits: Any, hidden: Any, context: Any, chosen: Any, has_context: Any) -> Vectors:
        call = self._call
        x, bias = self._nodes(logits, hidden, chosen), self._bias()
        for layer in range(self._draft.num_layers):
            name = f"layers.{layer}"
            x = self._add(x, self._attend(f"{name}.attn", self._norm(f"{name}.attn_norm", x), bias))
            x = self._add(x, self._mlp(f"{name}.mlp", self._norm(f"{name}.mlp_norm", x)))
        x = self._norm("output_norm", x)
        anchor = self._linear("context_proj", context)
        if has_context is not None:
            anchor = call(aten.where.ScalarOther, has_context, anchor, 0)
        anchor = self._norm("anchor_norm", anchor)
        anchors = call(aten.unsqueeze.default, anchor, 1)
        anchors = call(aten.expand.default, anchors, [-1, self._slots * self._count, -1])
        joint = call(aten.cat.default, [x, anchors, call(aten.mul.Tensor, x, anchors)], 2)
        z = call(aten.silu.default, self._linear("factor_input_proj", joint))
        left, right = (self._unit(self._linear(f"{side}_head", z)) for side in ("out", "in"))
        return Vectors(self._unit(self._linear("anchor_out_head", anchor)), left, right)

    def _nodes(self, logits: Any, hidden: Any, chosen: Any) -> Any:
        """[B, N, w] of candidates: token, row, rank and slot."""
        call = self._call
        odds = call(aten.gather.default, call(aten.log_softmax.int, logits, -1), 1, chosen)
        # nothing of a token that may not follow becomes no number
        odds = call(aten.clamp.default, odds, _LEAST)
        best = call(aten.slice.Tensor, odds, 1, 0, 1)
        ranks, tops = (
            call(
                aten.add.Tensor,
                call(aten.full_like.default, odds, 0),
                call(aten.select.int, self._weights(RANKS), 0, row),
            )
            for row in range(2)
        )
        columns = [odds, call(aten.exp.default, odds), call(aten.sub.Tensor, odds, best)]
        columns = [self._by_sequence(x, self._count) for x in (*columns, ranks, tops)]
        features = call(aten.stack.default, columns, 2)
        norm = (self._of(f"feature_norm.{part}") for part in ("weight", "bias"))
        features = call(aten.layer_norm.default, features, [FEATURES], *norm, FEATURE_EPS)
        ids = self._by_sequence(chosen, self._count)
        tokens = call(aten.embedding.default, self._weights(EMBEDDING), ids)
        if not self._draft.is_as_wide:
            tokens = self._linear("token_proj", tokens)
        x = self._add(tokens, self._rows(hidden))
        x = self._add(x, self._mlp("feature_mlp", features))
        for name in ("slot_embedding", "rank_embedding"):
            sizes = [1, 1, self._slots, self._count, self._width]
            embedding = call(aten.expand.default, self._of(name), sizes)
            x = self._add(x, call(aten.reshape.default, embedding, [-1, self._width]))
        return x

    def _by_sequence(self, x: Any, columns: int) -> Any:
        """[S * B, columns] → [B, S * columns]."""
        x = self._call(aten.reshape.default, x, [self._slots, -1, columns])
        x = self._call(aten.transpose.int, x, 0, 1)
        return self._call(aten.reshape.default, x, [-1, self._slots * columns])

    def _rows(self, hidden: Any) -> Any:
        """[B, N, w] of rows [S * B, d], each of which has K nodes."""
        call, width = self._call, self._width
        rows = self._by_sequence(self._linear("pass_hidden_proj", hidden), width)
        rows = call(aten.reshape.default, rows, [-1, self._slots, 1, width])
        rows = call(aten.expand.default, rows, [-1, self._slots, self._count, width])
        return call(aten.reshape.default, rows, [-1, self._slots * self._count, width])

    def _bias(self) -> Any:
        """[1, heads, N, N] that is added to scores: of slots to each other, and of equal slots."""
        call, slots, count = self._call, self._slots, self._count
        bias = call(aten.index_select.default, self._of("relative_slot_bias"), 1, self._relative)
        # two nodes of a slot are 0 slots apart
        is_same = call(aten.eq.Scalar, self._relative, self._draft.size - 1)
        same = call(aten.unsqueeze.default, self._of("same_slot_bias"), 1)
        bias = self._add(bias, call(aten.where.ScalarOther, is_same, same, 0))
        bias = call(aten.reshape.default, bias, [1, -1, slots, 1, slots, 1])
        bias = call(aten.expand.default, bias, [-1, -1, -1, count, -1, count])
        return call(aten.reshape.default, bias, [1, -1, slots * count, slots * count])

    def _attend(self, name: str, x: Any, bias: Any) -> Any:
        call, heads, nodes = self._call, self._draft.num_heads, self._slots * self._count
        size = self._width // heads
        parts = call(
            aten.linear.default,
            x,
            self._of(f"{name}.in_proj_weight"),
            self._of(f"{name}.in_proj_bias"),
        )
        parts = call(aten.reshape.default, parts, [-1, nodes, 3, heads, size])
        q, k, v = (
            call(
                aten.reshape.default,
                call(aten.transpose.int, call(aten.select.int, parts, 2, i), 1, 2),
                [-1, nodes, size],
            )
            for i in range(3)
        )
        scores = call(aten.bmm.default, q, call(aten.transpose.int, k, 1, 2))
        scores = call(aten.mul.Scalar, scores, size**-0.5)
        scores = self._add(call(aten.reshape.default, scores, [-1, heads, nodes, nodes]), bias)
        shares = call(aten.softmax.int, scores, -1)
        shares = call(aten.reshape.default, shares, [-1, nodes, nodes])
        attended = call(
            aten.reshape.default, call(aten.bmm.default, shares, v), [-1, heads, nodes, size]
        )
        attended = call(aten.transpose.int, attended, 1, 2)
        attended = call(aten.reshape.default, attended, [-1, nodes, self._width])
        return self._linear(f"{name}.out_proj", attended)

    def _mlp(self, name: str, x: Any) -> Any:
        inner = self._call(aten.silu.default, self._linear(f"{name}.up_proj", x))
        return self._linear(f"{name}.down_proj", inner)

    def _of(self, name: str) -> Any:
        return self._weights(PREFIX + name)

    def _linear(self, name: str, x: Any) -> Any:
        weight, bias = (self._of(f"{name}.{part}") for part in ("weight", "bias"))
        return self._call(aten.linear.default, x, weight, bias)

    def _norm(self, name: str, x: Any) -> Any:
        weight, eps = self._of(f"{name}.weight"), self._draft.norm_eps
        return self._call(aten.rms_norm.default, x, [self._width], weight, eps)

    def _add(self, x: Any, y: Any) -> Any:
        return self._call(aten.add.Tensor, x, y)

    def _unit(self, x: Any) -> Any:
        """Vectors [..., f] of length 1."""
        call = self._call
        squares = call(aten.sum.dim_IntList, call(aten.mul.Tensor, x, x), [-1], True)
        length = call(aten.clamp.default, call(aten.sqrt.default, squares), self._draft.vector_eps)
        return call(aten.div.Tensor, x, length)
