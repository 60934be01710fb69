"""Which part of which prompt an iteration takes along."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specc.runtime.scheduling.batch import Span
from specc.runtime.scheduling.look_ahead import LookAhead
from specc.runtime.scheduling.request import Request

# share of a prefill pass that prompts get however many tokens are decoded beside them
_LEAST_PREFILL = 8


@dataclass(frozen=True)
class PromptSpans:
    """Parts of prompts, those of earlier requests first, as far as a pass has room.

    Args:
        chunk: tokens of a prefill pass at most.
        most_scored: rows of prompts whose logits are kept at most: their logits take no more memory
            than those of the largest step.
        shares_pass: prompts and steps go through the target together, and share `chunk`.
        window: of the target's layers, the smallest; 0 is no limit. A prompt's part of a shared
            pass is no longer.
        grid: tokens between places of a prompt where a pass has to end, so that the states after
            them can be kept; 0 is no such places.
    """

    chunk: int
    most_scored: int
    shares_pass: bool
    window: int
    grid: int = 0

    def spans(
        self,
        requests: Iterable[Request],
        num_step_tokens: int,
        ahead: LookAhead,
        readers: Callable[[Request], tuple[int, ...]],
    ) -> list[Span]:
        """What comes along of the prompts of some requests, by their turns.

        Args:
            requests: by their turns; those without blocks have no part.
            num_step_tokens: that are decoded in this iteration.
            ahead: rows that are on their way.
            readers: of a request, the drafts that read its prompt along with the target.
        """
        spans = []
        budget = longest = self.chunk
        rows_left = self.most_scored
        if self.shares_pass and num_step_tokens:
            budget = max(budget - num_step_tokens, budget // _LEAST_PREFILL, 1)
            longest = min(budget, self.window or budget)
        for request in requests:
            if request.is_prefilled or budget == 0 or not request.blocks:
                continue  # the last: it has just given them up
            start = ahead.prefilled(request)
            if start == request.prefill_end:
                continue
            end = min(request.prefill_end, start + min(budget, longest))
            if self.grid:
                end = min(end, (start // self.grid + 1) * self.grid)
            if request.is_scored:
                if not rows_left:
                    continue
                end = min(end, start + rows_left)
                rows_left -= end - start
            budget -= end - start
            drafts = readers(request)
            if drafts:
                # a draft that lags catches up later, before its first step
                known = ahead.drafts_at(request, start)
                drafts = tuple(i for i in drafts if i in known)
            spans.append(Span(request, start, end, drafts))
        return spans
