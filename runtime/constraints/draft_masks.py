"""Drafts that obey grammars: what a request's grammar forbids is not proposed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specc.runtime.constraints.grammar import GrammarState
from specc.runtime.constraints.grammar_masks import mask_rows, tree_masks
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import WORD_BITS

# place of the rows whose hidden states tokens read, see `ModelProgram.forward`
_FEATURES = 8


class DraftMasks:
    """Masks the logits of a step's drafts, pass by pass: see `StepInputs.mask_drafts`.

    Where a node stands follows from what the draft is fed: row i after the committed ones is node i
    of what this draft has grown, and a token names its ancestors by these rows. So it is the same
    for static and dynamic trees, tiles of levels, and views of self-drafts. The masks are those
    that verification asks for again.

    A drafter that reads masks is fed no token after the root: tokens of a depth come from one row,
    whatever comes before them. So the first depth obeys, and what the others propose may be
    refused. So do Medusa heads: they make a row for each head from the one row they are fed, that
    of the first depth first.

    Args:
        grammars: B of them, each at its tree's root; None leaves a request's rows as they are.
    """

    def __init__(self, grammars: Sequence[GrammarState | None]) -> None:
        self._grammars = grammars
        self._grown = [_Grown() for _ in grammars]

    @classmethod
    def of(
        cls, requests: Sequence[Request], plan: SpecPlan, num_rows: int | None = None
    ) -> DraftMasks | None:
        """For the requests of a step; None where no draft is asked, or nobody has a grammar.

        Args:
            requests: of the step.
            plan: of the step.
            num_rows: sequences of its passes; those after the requests are padding.
        """
        if not plan.asked:
            return None
        # asked at each step: no generator
        for request in requests:
            if request.grammar is not None:
                break
        else:
            return None
        grammars = [None if request.is_finished else request.grammar for request in requests]
        padding = 0 if num_rows is None else num_rows - len(requests)
        return cls([*grammars, *[None] * padding])

    def __call__(self, inputs: Sequence[Tensor | None], logits: Tensor) -> Tensor:
        """The logits [R, V] of a pass, -inf at what grammars forbid; rows of dead nodes stay.

        Args:
            inputs: of the draft's program, as of `ModelProgram.forward`.
            logits: [R, V], or [R, V + d] with hidden states after them; they stay as they are.
        """
        width = next((x.vocab_size for x in self._grammars if x is not None), logits.shape[1])
        masked = mask_rows(logits[:, :width], self.rows(inputs, len(logits)), revives=True)
        # what some drafters put out after their logits stays
        return masked if masked.shape == logits.shape else torch.cat([masked, logits[:, width:]], 1)

    def rows(self, inputs: Sequence[Tensor | None], num_logits: int) -> dict[int, bytes]:
        """Row of a pass's logits → its mask; rows of dead nodes, and of others, are left out.

        Args:
            inputs: of the draft's program, as of `ModelProgram.forward`, where the host reads
                them; positions and block table are not looked at.
            num_logits: R, rows of the pass's logits.
        """
        given: list[Any] = [None if value is None else value.tolist() for value in inputs[:8]]
        tokens, _, q_start, slots, cache_len, ancestors, _, logit_rows = given
        is_block = _is_block(inputs, logit_rows)
        rows_each = num_logits // max(1, len(logit_rows))
        wanted: list[dict[int, int]] = [{} for _ in self._grammars]
        for row, place in enumerate(logit_rows):
            b = bisect_right(q_start, place) - 1
            # a causal pass brings the tokens up to the root, which has the first logits, and may
            # begin with rows that a draft's states have not seen
            is_root = ancestors is None or is_block
            # rows of a block come depth by depth; the first stands for the root
            if self._grammars[b] is not None and not (is_root and wanted[b]):
                words = [1] if is_root else ancestors[place]
                node = 0 if is_root else slots[place] - cache_len[b]
                self._grown[b].add(node, tokens[place], words)
                wanted[b][node] = row * rows_each
        masks: dict[int, bytes] = {}
        for grammar, grown, rows in zip(self._grammars, self._grown, wanted, strict=True):
            if grammar is not None:
                masks |= {rows[node]: mask for node, mask in grown.masks(grammar, rows).items()}
        return masks


def _is_block(inputs: Sequence[Tensor | None], logit_rows: Sequence[int]) -> bool:
    """Whether a pass is that of a block drafter, whose row of the first depth reads no hidden
    states.
    """
    if len(inputs) <= _FEATURES or (features := inputs[_FEATURES]) is None or not logit_rows:
        return False
    # where layers keep states, there is a row for each sequence, of numbers from 0 on
    if len(features) <= max(logit_rows):
        return False
    return bool((features[logit_rows[0]] < 0).all())


class _Grown:
    """What a draft has been fed of a tree; node 0 is the root."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._parents: dict[int, int] = {}

    def add(self, node: int, token: int, words: Sequence[int]) -> None:
        """A node, after those above it; one of another draft takes the place of the same node.

        Args:
            node: its row after the committed ones.
            token: of the node.
            words: bit j of word w is set where node 64w + j is above it, or the node itself.
        """
        self._tokens[node] = token
        self._parents[node] = max((n for n in _bits(words) if n != node), default=-1)

    def masks(self, grammar: GrammarState, nodes: Iterable[int]) -> dict[int, bytes]:
        """Node → mask after the path down to it, of some nodes; see `tree_masks`."""
        kept = {0}
        for node in nodes:
            while node not in kept:
                kept.add(node)
                node = self._parents[node]
        order = sorted(kept)
        place = {node: i for i, node in enumerate(order)}
        parents = [place[self._parents[node]] if node else -1 for node in order]
        found = tree_masks(grammar, [self._tokens[node] for node in order], parents)
        return {node: found[place[node]] for node in nodes if place[node] in found}


def _bits(words: Sequence[int]) -> Iterator[int]:
    """Places of the bits that are set, over words of `WORD_BITS`; the last one is the sign."""
    for first, word in enumerate(words):
        rest = word & (1 << WORD_BITS) - 1
        while rest:
            yield first * WORD_BITS + (rest & -rest).bit_length() - 1
            rest &= rest - 1
