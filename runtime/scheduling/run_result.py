"""What an iteration did."""

from __future__ import annotations

from dataclasses import dataclass, field

from specc.runtime.backends.step_io import StepResult
from specc.runtime.outputs.logprobs import TokenLogprobs


@dataclass(frozen=True)
class RunResult:
    """Of its prompts and steps; `first_tokens` is None where a prompt is not finished yet."""

    first_tokens: list[int | None] = field(default_factory=list)
    prefill_s: float = 0.0
    steps: list[StepResult] = field(default_factory=list)
    # of first tokens, and of the prompt tokens after those of a span, by request; of each step's
    # tokens, for the steps in which a request asks
    first_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    logprobs: list[list[list[TokenLogprobs] | None] | None] = field(default_factory=list)
    # of the target's pass that everyone shared; stages and `prefill_s` have their parts of it
    pass_s: float = 0.0
