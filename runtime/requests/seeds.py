"""Seeds of requests that have none of their own."""

from __future__ import annotations

import random
from dataclasses import replace

from specc.sampling.params import SamplingParams


class Seeds:
    """Seeds in the order in which requests come.

    Args:
        seed: that all of them follow from; None leaves it to each request.
    """

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else random.Random(seed)

    def give(self, params: SamplingParams) -> SamplingParams:
        if self._random is None or params.seed is not None:
            return params
        return replace(params, seed=self._random.getrandbits(63))
