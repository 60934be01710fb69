"""Inputs of a causal pass: laid out on the host, for all programs that take the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specc.drafters.drafter import Drafter
from specc.runtime.execution.adapter_rows import adapters_of, rows_of_tokens
from specc.runtime.execution.state_rows import states_of_spans
from specc.runtime.scheduling.batch import Span
from specc.runtime.scheduling.kv_cache import KVCache

_NO_STATES = _NO_ADAPTERS = torch.zeros(0, dtype=torch.int32)


class PassInputs(NamedTuple):
    """What spans of tokens bring to a pass, and where the history has them.

    Args:
        tokens: [Nt] int64.
        positions: [Nt] int64.
        logit_rows: [R] int64 tokens that get logits.
        history_rows: [Nt] int64 places in the flat history; [0] where they are in it already.
        q_start: [B + 1] int32.
        slots: [Nt] int32 cache rows.
        cache_len: [B] int32 rows that are there.
        block_table: [B, n] int32.
        states: [B, 2] int32, see `specc.runtime.execution.state_rows`; [0] where no layer keeps
            states.
        adapters: [Nt, 1] int32 adapter of each token; [0] where the target has none.
    """

    tokens: Tensor
    positions: Tensor
    logit_rows: Tensor
    history_rows: Tensor
    q_start: Tensor
    slots: Tensor
    cache_len: Tensor
    block_table: Tensor
    states: Tensor = _NO_STATES
    adapters: Tensor = _NO_ADAPTERS

    def of_draft(
        self, reader: Drafter | None, keeps_states: bool = False
    ) -> tuple[Tensor | None, ...]:
        """For a draft; None is one that reads tokens alone."""
        if reader is None:
            return self.of_model(keeps_states)
        return self.of_head if reader.facts.pairs else self.of_block

    def of_target(self, keeps_states: bool = False) -> tuple[Tensor | None, ...]:
        """`of_model` of the target, which may have adapters."""
        beside = [self.adapters] if self.adapters.dim() == 2 else []
        return (*self.of_model(keeps_states), *beside)

    def of_model(self, keeps_states: bool = False) -> tuple[Tensor | None, ...]:
        """In the order of `ModelProgram.forward`.

        Args:
            keeps_states: some of the model's layers do.
        """
        return (
            self.tokens, self.positions, self.q_start, self.slots, self.cache_len,
            None, self.block_table, self.logit_rows, *([self.states] if keeps_states else []),
        )  # fmt: skip

    @property
    def of_head(self) -> tuple[Tensor | None, ...]:
        """The same of a draft that reads the target's hidden states: one row back, no logits.

        A row of a head pairs the hidden states of a token with the token after it; so the row
        before that of each token reads them here.
        """
        # a sequence's first token has no row before it: the slot -1 is dead
        slots = self.slots - 1
        return (
            self.tokens, (self.positions - 1).clamp(min=0), self.q_start, slots,
            (self.cache_len - 1).clamp(min=0), None, self.block_table, self.logit_rows[:0],
            torch.stack([slots, torch.full_like(slots, -1)], 1),
        )  # fmt: skip

    @property
    def of_block(self) -> tuple[Tensor | None, ...]:
        """The same of a block drafter: hidden states of these tokens, and no logits."""
        return (
            *self.without_logits().of_model(),
            torch.stack([self.slots, torch.full_like(self.slots, -1)], 1),
        )

    def without_logits(self) -> PassInputs:
        """For a model that has nothing to say about these tokens."""
        return self._replace(logit_rows=self.logit_rows[:0])


def causal_inputs(
    spans: Sequence[Span], cache: KVCache, logit_rows: Tensor | None = None, records: bool = False
) -> PassInputs:
    """Inputs of a pass over spans of several requests, on the host.

    Args:
        spans: in their order.
        cache: whose blocks the requests have.
        logit_rows: [R] int64 tokens of the pass that get logits; None is none.
        records: the tokens are new to the history.
    """
    tokens = torch.tensor([token for s in spans for token in s.request.token_ids[s.start : s.end]])
    positions = torch.cat([torch.arange(s.start, s.end) for s in spans])
    starts = [0]
    for span in spans:
        starts.append(starts[-1] + span.end - span.start)
    none = torch.zeros(0, dtype=torch.int64)
    rows = [cache.history_rows(s.request.blocks, s.start, s.end) for s in spans if records]
    states, numbers = states_of_spans(spans), adapters_of([span.request for span in spans])
    counts = [span.end - span.start for span in spans]
    return PassInputs(
        tokens,
        positions,
        none if logit_rows is None else logit_rows,
        torch.cat(rows) if rows else none,
        torch.tensor(starts, dtype=torch.int32),
        positions.int(),
        torch.tensor([s.start for s in spans], dtype=torch.int32),
        cache.block_table([s.request.blocks for s in spans]),
        _NO_STATES if states is None else states,
        _NO_ADAPTERS if numbers is None else rows_of_tokens(numbers, counts),
    )


def split_spans(spans: list[Span], limit: int) -> Iterator[list[Span]]:
    """Passes of at most `limit` tokens; parts of one request keep their order."""
    current: list[Span] = []
    room = limit
    for span in spans:
        start = span.start
        while start < span.end:
            end = min(span.end, start + room)
            current.append(Span(span.request, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield current
                current, room = [], limit
    if current:
        yield current
