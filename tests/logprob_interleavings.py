"""Requests with log probabilities, with controls and without, among others: against solo runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specc.runtime.outputs.logprobs import TokenLogprobs
from specc.runtime.scheduling.request import Request
from specc.sampling.params import MAX_LOGPROBS, SamplingParams
from tests.interleavings import draw_params

# passes of different widths round sums of float32 differently; the values are about 10
TOLERANCE = 1e-4


@dataclass
class LogprobFigures:
    """What was compared, and how far it was off."""

    tolerance: float = TOLERANCE
    num_requests: int = 0
    num_controlled: int = 0
    num_preempted: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    num_values: int = 0
    num_exact: int = 0
    # ids at the end of the best ones, and ranks, that near ties have moved
    num_moved_ids: int = 0
    num_moved_ranks: int = 0
    max_difference: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def compare(self, request: Request, alone: Request, num_same: int) -> None:
        """Every value of the tokens that both runs put out after the same output."""
        tokens = request.output_token_ids
        for one in (request, alone):
            assert len(one.logprobs) == len(one.output_token_ids)
        if num_same == len(tokens):
            ends = [(one.finish_reason, one.stop_reason) for one in (request, alone)]
            assert ends[0] == ends[1]
        self.num_requests += 1
        self.num_controlled += request.params.has_controls
        self.num_preempted += request.stats.num_preemptions > 0
        self.num_errors += request.finish_reason == "error"
        self.num_tokens += num_same
        count = request.params.logprobs
        assert count is not None
        rows = zip(tokens[:num_same], request.logprobs, alone.logprobs, strict=False)
        for token, found, wanted in rows:
            self._compare_token(token, count, found, wanted)

    def _compare_token(
        self, token: int, count: int, found: TokenLogprobs, wanted: TokenLogprobs
    ) -> None:
        assert token in found
        assert token in wanted
        for one in (found, wanted):
            assert count <= len(one) <= count + 1
        for other in found.keys() & wanted.keys():
            difference = abs(found[other].logprob - wanted[other].logprob)
            assert difference <= TOLERANCE, (token, other, found, wanted)
            self.max_difference = max(self.max_difference, difference)
            self.num_values += 1
            self.num_exact += difference == 0
        # the last of the best ones may be as likely as the first that is none
        for one, another in ((found, wanted), (wanted, found)):
            for other in one.keys() - another.keys():
                last = min(e.logprob for t, e in another.items() if t != token or e.rank <= count)
                assert abs(one[other].logprob - last) <= TOLERANCE, (token, found, wanted)
                self.num_moved_ids += 1
        ranks = sorted((found[token].rank, wanted[token].rank))
        if ranks[0] != ranks[1]:
            # between two ranks, all are near ties; where they are not among the best ones, nobody
            # has their values
            between = [e.logprob for e in wanted.values() if ranks[0] <= e.rank <= ranks[1]]
            assert ranks[1] - ranks[0] <= 2
            assert max(between) - min(between) <= 2 * TOLERANCE
            self.num_moved_ranks += 1


class DrawLogprobs:
    """Options of `draw_params` and log probabilities; controls for some requests.

    Args:
        words: that may be bad.
        end_ids: that may be allowed beside others.
    """

    def __init__(self, words: Sequence[str], end_ids: Sequence[int], share: float = 0.5) -> None:
        self._words = words
        self._end_ids = list(end_ids)
        self._share = share

    def __call__(self, dice: random.Random, max_tokens: int, vocab_size: int) -> SamplingParams:
        params = draw_params(dice, max_tokens, vocab_size)
        changes: dict[str, Any] = {"logprobs": dice.choice([0, 1, 5, MAX_LOGPROBS])}
        if dice.random() < self._share:
            kinds = dice.sample(["bias", "allowed", "words", "length"], dice.randint(1, 3))
            if "bias" in kinds:
                ids = dice.sample(range(vocab_size), 8)
                changes["logit_bias"] = {token: dice.uniform(-8, 4) for token in ids}
            if "allowed" in kinds:
                ids = dice.sample(range(vocab_size), vocab_size * 2 // 3)
                changes["allowed_token_ids"] = sorted({*ids, *self._end_ids})
            if "words" in kinds:
                changes["bad_words"] = dice.sample(self._words, min(20, len(self._words)))
            if "length" in kinds:
                changes["min_tokens"] = dice.randint(1, params.max_tokens)
                changes["stop_token_ids"] = dice.sample(range(vocab_size), 6)
        return replace(params, **changes)
