"""Counters of speculative decoding and the rates that derive from them.

One rule for tokens after the end of a request: a step whose accepted tokens run past EOS, a stop
string or the length limit emits fewer tokens than the target verified. Its last emitted token
then counts as the bonus token, only the emitted tokens before it count as accepted, only the tree
levels of those count as drafted, and the rest is `num_trimmed_tokens`. So `mean_acceptance_length`
is exactly what speculative steps emitted, and a predictable tail after EOS flatters nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any


@dataclass
class SpecStats:
    """Counters of one request, or of an engine; rates are properties.

    A request counts the passes that it took part in; an engine counts each pass once, however
    many requests shared it. Times of a pass follow the same rule.

    Args:
        num_requests: requests that ended.
        num_prompt_tokens: prompt tokens of requests with a first token.
        num_cached_tokens: those of them whose rows another request had left in the cache.
        num_preemptions: times that a request gave up its blocks for others.
        num_output_tokens: tokens emitted, the first (from prefill) included.
        num_steps: decode steps, one for each request that took part.
        num_spec_steps: those of them that drafted.
        num_draft_tokens: draft tokens, without those after the end of a request.
        num_accepted_tokens: accepted and emitted draft tokens, bonus not counted.
        num_trimmed_tokens: verified tokens after the end of a request, not emitted.
        num_prediction_draft_tokens: those of `num_draft_tokens` that predictions proposed.
        num_prediction_accepted_tokens: those of them that were accepted and emitted.
        accepted_prediction_tokens: tokens of predictions that outputs have, of requests that ended;
        rejected_prediction_tokens: and tokens that they do not have. Neither depends on steps.
        accepted_at_depth: speculative steps in which depth 1, 2, … was accepted.
        num_prefill_passes: target passes over prompt tokens.
        num_step_passes: target passes of decode steps.
        prefill_s: seconds of prefill passes, target and drafts.
        draft_s: seconds of drafting, catch-up passes included.
        verify_s: seconds of verification; of the off plan, the whole target pass.
        whole_s: seconds of steps that ran as one graph, whose stages nobody times apart.
        commit_s: seconds of acceptance and commit.
        first_token_s: sum over requests of the seconds from arrival to the first token.
        num_first_tokens: requests that have a first token.
        elapsed_s: request: seconds from admission to the last token; engine: seconds at work.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_trimmed_tokens: int = 0
    num_prediction_draft_tokens: int = 0
    num_prediction_accepted_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    accepted_at_depth: list[int] = field(default_factory=list)
    num_prefill_passes: int = 0
    num_step_passes: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    whole_s: float = 0.0
    commit_s: float = 0.0
    first_token_s: float = 0.0
    num_first_tokens: int = 0
    elapsed_s: float = 0.0

    def record_step(self, levels: Sequence[int], num_accepted: int, num_emitted: int) -> None:
        """Count one sequence's share of a decode step.

        Args:
            levels: draft tokens of depth 1, 2, … of the plan; empty is off.
            num_accepted: draft tokens that the target accepted.
            num_emitted: tokens that the request took of the num_accepted + 1, at least 1.
        """
        trimmed = num_accepted + 1 - num_emitted
        # none where the first one was refused
        accepted = max(num_emitted - 1, 0)
        self.num_output_tokens += num_emitted
        self.num_trimmed_tokens += trimmed
        self.num_steps += 1
        if not levels:
            return
        self.num_spec_steps += 1
        self.num_accepted_tokens += accepted
        self.num_draft_tokens += sum(levels[: accepted if trimmed else len(levels)])
        # depths that are never accepted show up as 0
        missing = len(levels) - len(self.accepted_at_depth)
        self.accepted_at_depth.extend([0] * missing)
        for depth in range(accepted):
            self.accepted_at_depth[depth] += 1

    def record_prediction_step(
        self, proposed: int, num_same: int, num_accepted: int, num_emitted: int
    ) -> None:
        """Count what a prediction had in a step that `record_step` has counted, by its rule.

        Args:
            proposed: draft tokens that it had, 1 or more.
            num_same: those of them, from the first on, that are the accepted ones.
            num_accepted: see `record_step`.
            num_emitted: likewise.
        """
        accepted = min(num_same, max(num_emitted - 1, 0))
        self.num_prediction_accepted_tokens += accepted
        self.num_prediction_draft_tokens += proposed if num_emitted > num_accepted else accepted

    def record_prediction(self, accepted: int, rejected: int) -> None:
        """Count a prediction whose request has ended; see `Prediction.coverage`."""
        self.accepted_prediction_tokens += accepted
        self.rejected_prediction_tokens += rejected

    def record_prefill_pass(self, seconds: float, is_target: bool = True) -> None:
        self.num_prefill_passes += is_target
        self.prefill_s += seconds

    def record_step_pass(self, stage_s: dict[str, float]) -> None:
        """Count one run of a step program; `stage_s` holds the seconds of each stage."""
        self.num_step_passes += 1
        self.draft_s += stage_s.get("draft", 0.0)
        self.verify_s += stage_s.get("verify", 0.0)
        self.whole_s += stage_s.get("step", 0.0)
        self.commit_s += stage_s.get("accept_commit", 0.0)

    def record_first_token(self, seconds: float) -> None:
        self.num_output_tokens += 1
        self.num_first_tokens += 1
        self.first_token_s += seconds

    def merge(self, other: SpecStats) -> None:
        """Add the counters of `other`; `elapsed_s` adds too, so merge work that did not overlap."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name == "accepted_at_depth":
                mine = [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)]
            else:
                mine += theirs
            setattr(self, item.name, mine)

    def copy(self) -> SpecStats:
        return replace(self, accepted_at_depth=list(self.accepted_at_depth))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a speculative step emits, bonus included; 1.0 where nothing was drafted."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_spec_steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens; falls by construction as a tree widens."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def accepted_per_depth(self) -> list[float]:
        """Share of speculative steps in which depth 1, 2, … was accepted."""
        return [_ratio(count, self.num_spec_steps) for count in self.accepted_at_depth]

    @property
    def target_passes(self) -> int:
        return self.num_prefill_passes + self.num_step_passes

    @property
    def tokens_per_target_pass(self) -> float:
        """Output tokens a target pass, prefill passes included; of an engine, over its batch."""
        return _ratio(self.num_output_tokens, self.target_passes)

    @property
    def tokens_per_s(self) -> float:
        return _ratio(self.num_output_tokens, self.elapsed_s)

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival to the first token; the mean over requests."""
        return _ratio(self.first_token_s, self.num_first_tokens)

    @property
    def draft_ms_per_step(self) -> float:
        return 1000 * _ratio(self.draft_s, self.num_step_passes)

    @property
    def verify_ms_per_step(self) -> float:
        return 1000 * _ratio(self.verify_s, self.num_step_passes)

    @property
    def commit_ms_per_step(self) -> float:
        return 1000 * _ratio(self.commit_s, self.num_step_passes)

    @property
    def ms_per_step(self) -> float:
        staged = self.draft_ms_per_step + self.verify_ms_per_step + self.commit_ms_per_step
        return staged + 1000 * _ratio(self.whole_s, self.num_step_passes)

    def as_dict(self) -> dict[str, Any]:
        """Counters and rates, for JSON."""
        rates = {
            name: getattr(self, name)
            for name, value in vars(SpecStats).items()
            if isinstance(value, property)
        }
        return asdict(self) | rates


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
