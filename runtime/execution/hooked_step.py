"""What comes between a step's verification and its acceptance, and what is read after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specc.runtime.backends.step import Step
from specc.runtime.backends.step_io import StepResult
from specc.runtime.constraints.grammar_masks import TreeMasks, has_masks
from specc.runtime.outputs.logprobs import TokenLogprobs
from specc.runtime.outputs.step_logprobs import emitted_logprobs, step_logprobs, wants_logprobs
from specc.runtime.scheduling.batch import StepGroup


def hooked(step: Step, group: StepGroup, run: Callable[[Sequence[str]], StepResult]) -> StepResult:
    """Run a step; grammars and controls change the logits that acceptance looks at.

    Args:
        step: of the plan.
        group: whose step it is.
        run: the step, given the names of values that are wanted.
    """
    reads = ("logits", "path") if wants_logprobs(group.requests) else ()
    if not has_masks(group.requests):
        return run(reads)
    before = step.before_accept
    masks = TreeMasks(group.requests, group.plan, before, keeps=bool(reads))
    step.before_accept = masks
    try:
        result = run(reads)
    finally:
        step.before_accept = before
    if masks.logits is not None:
        # log probabilities are the model's own
        result.values["logits"] = masks.logits
    return result


def logprobs_after(group: StepGroup, step: StepResult) -> list[list[TokenLogprobs] | None] | None:
    """Those of the tokens that a step puts out; None where nobody asks for any."""
    if not step.values:
        return None
    counts = zip(step.output_tokens, step.num_accepted, strict=True)
    outputs = [tokens[: accepted + 1] for tokens, accepted in counts]
    if (scores := step.values.get("scores")) is not None:
        return emitted_logprobs(scores, outputs, group.requests)
    return step_logprobs(step.values["logits"], step.values["path"], outputs, group.requests)
