"""How often prompts share the target's passes, and with how many tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

from specc.runtime.policies.goodput.constants import TUNED


class PromptShare(NamedTuple):
    """Prompts that share the target's passes with steps.

    Args:
        share: of the iterations that take prompts along.
        tokens: of prompts in each of those.
    """

    share: float
    tokens: float


NO_PROMPTS = PromptShare(0.0, 0.0)


class PromptShares:
    """Averages over many iterations, so that single ones do not change a choice.

    Longer iterations meet prompts more often: they come by the clock.
    """

    def __init__(self) -> None:
        self.lately, self._num_passes = NO_PROMPTS, 0
        # of those iterations, prompts not counted
        self._mean_s = 0.0

    def observe(self, tokens: int, alone_s: float | None) -> None:
        """Count an iteration that has steps.

        Args:
            tokens: of prompts in it.
            alone_s: predicted seconds of the same without prompts; None: they were not predicted.
        """
        if alone_s is not None:
            self._mean_s += (
                TUNED.prompt_news * (alone_s - self._mean_s) if self._mean_s else alone_s
            )
        self._num_passes += 1
        news = max(TUNED.prompt_news, 1 / self._num_passes)
        share, known = self.lately
        share += news * (bool(tokens) - share)
        if tokens:
            known = known + TUNED.prompt_news * (tokens - known) if known else tokens
        self.lately = PromptShare(share, known)

    def beside(self, seconds: float) -> PromptShare:
        """Prompts that come along with an iteration that takes so long without them."""
        share, tokens = self.lately
        if not (share and self._mean_s):
            return self.lately
        a_second = -math.log(1 - min(share, TUNED.always)) / self._mean_s
        return PromptShare(1 - math.exp(-a_second * seconds), tokens)
