"""Block drafters: all levels of a tree in one pass, from masks (DFlash 1 and 2, DSpark)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specc.drafters.facts import Cache, DrafterFacts, Passes
from specc.drafters.masked import MaskedPass
from specc.speculation.tree import WORD_BITS, pack_bits

FACTS = DrafterFacts(
    kind="dflash",
    called="block drafter",
    passes=Passes.ONE,
    cache=Cache.OWN,
    module="block",
    reads_hidden=True,
    recomputes=True,
    methods=("dflash",),
    assumes=("tap_convention", "is_last_normed", "sample_from_anchor"),
)
DSPARK_FACTS = replace(
    FACTS, kind="dspark", methods=("dspark",), assumes=(*FACTS.assumes, "candidates")
)
DFLASH2_FACTS = replace(
    FACTS, kind="dflash2", methods=("dflash2",), assumes=("tap_convention", "is_last_normed")
)
# of a block whose layers differ in what its rows see: as many as a word counts
MOST_ROWS = 63
# how logits depend on tokens before, see `passes/drafters/block_bias.py`
VANILLA, GATED, RNN = MARKOV_KINDS = ("vanilla", "gated", "rnn")
# the last one, of DFlash 2, among candidates alone
SELECTOR = "selector"
BIAS_KINDS = (*MARKOV_KINDS, SELECTOR)
# what steps call the tensors that make logits depend on the token before: name in the weight file
BIAS_TENSORS = {
    "bias_in": "markov_head.markov_w1.weight",
    "bias_out": "markov_head.markov_w2.weight",
    "bias_columns": "markov_head.columns",
}
SELECTOR_TENSORS = {
    "bias_in": "candidate_selector.predecessor_codebook",
    "bias_out": "candidate_selector.successor_codebook",
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
    SELECTOR: {"bias_joint": "candidate_selector.hidden_projection.weight"},
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
    SELECTOR: "logits depend on the token before, times hidden states",
}


@dataclass(frozen=True)
class BlockDraft(MaskedPass):
    """It reads the newest token, the anchor, and masks after it: B rows from the anchor's on."""

    facts = FACTS

    @property
    def depends_on_path(self) -> bool:
        return self.is_biased

    @property
    def says_confidence(self) -> bool:
        return bool(self.confidence)

    @property
    def tensors(self) -> dict[str, str]:
        """Of what its logits depend on."""
        names = ("bias_in", "bias_out", *(("bias_columns",) if self.is_partial else ()))
        own = bias_tensors(self.bias_kind)
        keys = {x: own[x] for x in names} | JOINT_TENSORS.get(self.bias_kind, {})
        keys |= CONFIDENCE_TENSORS if self.confidence else {}
        return {f"{self.draft}_{x}": key for x, key in keys.items() if self.is_biased}

    @property
    def asked_tensors(self) -> Collection[str]:
        """A step that verifies whole trees does not ask how sure a drafter is."""
        return CONFIDENCE_TENSORS.values()

    @property
    def reads_hidden(self) -> bool:
        """Whether steps compute with hidden states of its rows."""
        return self.bias_kind != VANILLA or bool(self.confidence)

    @property
    def is_possible(self) -> bool:
        is_known = self.bias_kind in BIAS_KINDS and self.confidence in ("", OF_ROW, OF_TOKEN)
        is_read = (self.hidden_columns > 0) == self.reads_hidden
        is_named = not (self.is_flat or self.kind)
        is_plain = not (self.reads_hidden or self.candidates)
        # a selector has a row for every id, and no other head beside it
        is_alone = self.candidates > 0 and not (self.is_partial or self.confidence)
        is_kind = self.bias_kind != SELECTOR or is_alone
        return is_known and is_read and is_named and is_kind and (self.is_biased or is_plain)

    @property
    def most_rows(self) -> int:
        """Programs whose layers differ have words for all rows of a pass."""
        return self.num_read(self.num_proposed) if self.causal_layers else 0

    def num_tapped(self, depth: int, catch_up: int) -> int:
        return depth + 1

    @property
    def reads_context(self) -> bool:
        """Whether steps read what becomes of the target's hidden states, of the last row of the
        context.
        """
        return False

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

    def pass_inputs(
        self, tokens: Sequence[int], root: int, table: Tensor, depth: int
    ) -> list[Tensor | None]:
        """Rows of the context that it has not read, and the block."""
        before = len(tokens) - 1
        tapped = torch.arange(root - before, root + self.size)
        tapped[before:] = -1
        features = torch.stack([tapped.int(), self.offsets(before)], 1)
        return [*super().pass_inputs(tokens, root, table, depth), features]

    def logits_along(
        self, weights: Mapping[str, Tensor], made: Tensor, tokens: Sequence[int], before: int
    ) -> Tensor:
        """See `passes/drafters/block_bias.py`."""
        rows = made[: len(tokens)]
        if not self.is_biased:
            return rows
        ids = torch.tensor(tokens, device=rows.device)
        own = bias_tensors(self.bias_kind)
        known = F.embedding(ids, weights[own["bias_in"]])
        logits, hidden = rows.tensor_split([rows.shape[1] - self.hidden_columns], 1)
        if self.bias_kind == SELECTOR:
            known = known * F.linear(hidden, weights[JOINT_TENSORS[SELECTOR]["bias_joint"]])
        elif self.bias_kind != VANILLA:
            weight, offset = (weights[key] for key in JOINT_TENSORS[self.bias_kind].values())
            if self.bias_kind == GATED:
                known = F.linear(torch.cat([hidden, known], 1), weight, offset).sigmoid() * known
            else:
                known = _unrolled(known, hidden, weight, offset)
        bias = F.linear(known, weights[own["bias_out"]])
        if self.is_partial:
            bias = F.pad(bias, (0, 1)).index_select(1, weights[own["bias_columns"]])
        if self.candidates:
            order = logits.sort(dim=1, descending=True, stable=True).indices
            logits = logits.scatter(1, order[:, self.candidates :], -torch.inf)
        return logits + bias

    def constants(self, depth: int) -> dict[str, Tensor]:
        before = depth + 1
        return super().constants(depth) | {
            f"{self.name}_rows_seen": self.rows_seen(before),
            f"{self.name}_offsets": self.offsets(before),
        }

    def earlier_constants(self, depth: int) -> dict[str, Tensor]:
        """Rows of a block had bits for its own rows alone. Those of the context have none set."""
        count = -(-self.size // WORD_BITS)
        return {f"{self.name}_rows_seen": self.rows_seen(depth + 1)[:, :count]}

    def describe(self) -> str:
        """For people."""
        sees = "up to itself" if self.is_causal else "in both directions"
        if self.causal_layers:
            layers = ", ".join(map(str, self.causal_layers))
            sees += f" (in layers {layers} up to itself)"
        biased = f"; {_DEPENDS[self.bias_kind]}" if self.is_biased else ""
        biased += f", among the {self.candidates} best of each row" if self.candidates else ""
        biased += "; says how likely each token is accepted" if self.confidence else ""
        return (
            f"blocks of {self.size} rows, of which each sees the others {sees}:"
            f" {self.num_proposed} tokens a pass; mask token {self.mask_token_id}{biased}"
        )


def _unrolled(known: Tensor, hidden: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    """[n, r] of a drafter with a state, which goes from token to token."""
    state, found = torch.zeros_like(known[0]), []
    for own, row in zip(known, hidden, strict=True):
        gate, candidate, output = F.linear(torch.cat([state, own, row]), weight, offset).chunk(3)
        state = torch.lerp(candidate.tanh(), state, gate.sigmoid())
        found.append(output.tanh())
    return torch.stack(found)


def bias_tensors(kind: str) -> dict[str, str]:
    """What steps call the tensors of a kind of bias → name in the weight file."""
    return SELECTOR_TENSORS if kind == SELECTOR else BIAS_TENSORS


def joint_shapes(kind: str, rank: int, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a kind of bias has besides its two tables, by name.

    Args:
        kind: of `BIAS_KINDS`.
        rank: r.
        width: d, of hidden states.
    """
    if kind == SELECTOR:
        return {JOINT_TENSORS[kind]["bias_joint"]: (rank, width)}
    if kind not in JOINT_TENSORS:
        return {}
    weight, offset = JOINT_TENSORS[kind].values()
    rows, columns = (rank, width + rank) if kind == GATED else (3 * rank, width + 2 * rank)
    return {weight: (rows, columns), offset: (rows,)}
