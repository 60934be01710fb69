"""Tokens that are known before a pass: prompts, and what drafts have to catch up with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from specc.drafters.drafter import Drafter
from specc.runtime.backends.step import Model
from specc.runtime.execution.block_votes import BlockVotes
from specc.runtime.execution.draws import (
    BegunModel,
    DrawnPrograms,
    Draws,
    can_draw_prompts,
    prompt_draws,
)
from specc.runtime.execution.link import Link
from specc.runtime.execution.pass_inputs import PassInputs, causal_inputs, split_spans
from specc.runtime.execution.prompt_ends import PendingEnds, first_tokens, queue_ends
from specc.runtime.execution.shared_pass import Begin, at_once, logit_rows
from specc.runtime.execution.state_rows import read_before
from specc.runtime.scheduling.batch import Span, StepGroup
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.request import Request


class Prompts:
    """Feeds prompts to the models of an engine.

    Args:
        target: the target's program.
        drafts: programs of the drafts, draft_0 first.
        cache: that all programs are bound to.
        prefill_chunk: tokens of a causal pass at most.
        operators: namespace of the `specc::` operators that run here.
        link: to the device of the programs.
        votes: on the blocks of prompts.
        drawn: for prompts whose first tokens the target draws; None where it cannot.
        staged: the target, where it has stages.
        readers: by number, drafts that read the target's hidden states.
    """

    def __init__(
        self,
        target: Model,
        drafts: Sequence[Model],
        cache: KVCache,
        prefill_chunk: int,
        operators: Any,
        link: Link,
        votes: BlockVotes,
        drawn: DrawnPrograms | None,
        staged: BegunModel | None,
        readers: Mapping[int, Drafter] = MappingProxyType({}),
    ) -> None:
        self.begin_target: Begin = at_once(target) if staged is None else staged.begin
        self._drafts = drafts
        self._cache = cache
        self._prefill_chunk = prefill_chunk
        self._operators = operators
        self._link = link
        self._votes = votes
        self._drawn = drawn
        self._readers = readers

    @torch.inference_mode()
    def begin(self, spans: list[Span]) -> Callable[[], PendingEnds]:
        """Begin a pass of the target over spans.

        On a device nothing waits for it until the result; where the target has stages, what this
        returns waits for it.
        """
        with self._link.active():
            inputs = self.before_pass(spans).of_target(self._cache.states is not None)
            voters = self._votes.of_spans(spans)
            mass = self._votes.mass(voters, len(spans))
            given = (*inputs, *([] if mass is None else [mass]))
            is_drawn = self._drawn is not None and can_draw_prompts(spans)
            begin = self.begin_drawn(prompt_draws(spans)) if is_drawn else self.begin_target
            taken = begin(*given)
        self.after_pass(spans)

        @torch.inference_mode()
        def finish() -> PendingEnds:
            with self._link.active():
                found = taken()
                votes = self._votes.fetch(voters, mass)
                draw = as_drawn if is_drawn else self.first_tokens
                return queue_ends(spans, found, draw, self._link, votes)

        return finish

    def begin_drawn(self, draws: Draws) -> Begin:
        """Passes of the target that yield tokens."""
        assert self._drawn is not None
        return functools.partial(self._drawn.target.begin_draw, draws)

    @torch.inference_mode()
    def before_pass(self, spans: list[Span]) -> PassInputs:
        """All that prompts need but the target's pass, whose inputs it returns."""
        inputs = self._send(causal_inputs(spans, self._cache, logit_rows(spans), records=True))
        with self._link.active():
            self._cache.record(inputs.history_rows, inputs.tokens)
        for i, draft in enumerate(self._drafts):
            if i in self._readers:
                continue  # see `after_pass`
            mine = [span for span in spans if i in span.drafts]
            if mine == spans:
                draft(*inputs.without_logits().of_model(i in self._cache.draft_states))
            elif mine:
                self._read(i, mine)
        return inputs

    def after_pass(self, spans: list[Span]) -> None:
        """What follows the target's pass over prompts, of what it has left.

        Drafts read its hidden states, and states are kept for later requests.
        """
        if self._cache.states is not None:
            with self._link.active():
                for span in spans:
                    if span.checkpoint is None:
                        continue
                    own = [x for i, x in self._cache.draft_states.items() if i in span.drafts]
                    for states in (self._cache.states, *own):
                        states.keep(span.request.state_place, span.checkpoint)
        for i in self._readers:
            if mine := [span for span in spans if i in span.drafts]:
                with self._link.active():
                    self._read(i, mine)

    def first_tokens(self, logits: Tensor, requests: list[Request]) -> Tensor:
        """What follows each prompt, see `first_tokens`."""
        return first_tokens(logits, requests, self._cache, self._link, self._operators)

    def catch_up(self, group: StepGroup) -> None:
        """Feed drafts the committed tokens that their first level does not reach back to.

        What a head has read is counted in tokens, too: its last row is one before the last of them.

        A request with a step in flight is left alone: its drafts are in step.
        """
        ahead = group.ahead or [0] * len(group.requests)
        for i in group.plan.draft_lens:
            read = read_before(group, i, i in self._cache.draft_states)
            behind = [
                Span(s, s.draft_lens[i], count)
                for s, count, more in zip(group.requests, read, ahead, strict=True)
                if not more and s.draft_lens[i] < count
            ]
            for spans in split_spans(behind, self._prefill_chunk):
                self._read(i, spans)

    @torch.inference_mode()
    def _read(self, draft: int, spans: list[Span]) -> None:
        """Feed a draft tokens of several requests, which the target has read."""
        inputs = self._send(causal_inputs(spans, self._cache))
        keeps_states = draft in self._cache.draft_states
        self._drafts[draft](*inputs.of_draft(self._readers.get(draft), keeps_states))

    def _send(self, inputs: PassInputs) -> PassInputs:
        return PassInputs(*self._link.send(inputs))


def as_drawn(tokens: Tensor, requests: Sequence[Request]) -> Tensor:
    """First tokens, of what is first tokens already."""
    return tokens
