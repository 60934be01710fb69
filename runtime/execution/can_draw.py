"""Which batches a target can draw the tokens of: those of whose logits nobody wants more.

Acceptance has to follow the target's own token, and that has to be the best of each column's own
best: no filter, no penalty, no mask. Log probabilities need whole rows, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specc.kernels.reference.sampling import MIN_TEMPERATURE
from specc.runtime.backends.step import StagedStep, Step
from specc.runtime.constraints.grammar_masks import has_masks
from specc.runtime.execution.draws import DrawnPrograms
from specc.runtime.outputs.step_logprobs import wants_logprobs
from specc.runtime.scheduling.batch import Batch, Span, StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.rows import Rule, Value, Word

_NO_PENALTIES = (1.0, 0.0, 0.0)


def can_draw(requests: Sequence[Request]) -> bool:
    """Whether the tokens after any rows of these requests can be drawn."""
    if has_masks(requests) or wants_logprobs(requests):
        return False
    return all(_is_plain(request.sampling_values, request.sampling_words) for request in requests)


def can_draw_prompts(spans: Sequence[Span]) -> bool:
    """Whether all that prompts yield are first tokens, and these can be drawn."""
    ended = [span.request for span in spans if span.is_last]
    return can_draw(ended) and not any(span.num_scored for span in spans)


def drawn_step(
    drawn: DrawnPrograms | None, group: StepGroup, steps: Mapping[str, Step]
) -> StagedStep | None:
    """The step of a group that draws; None where there is none, or where somebody reads logits.

    Args:
        drawn: of the engine.
        group: of a batch.
        steps: plan name → step that does not draw.
    """
    if drawn is None or steps[group.plan.name].before_accept is not None:
        return None
    return drawn.steps[group.plan.name] if can_draw(group.requests) else None


def drawn_steps(
    drawn: DrawnPrograms | None, batch: Batch, steps: Mapping[str, Step]
) -> list[StagedStep]:
    """The steps of all groups, where the whole batch can be drawn; else none."""
    found = [step for group in batch.groups if (step := drawn_step(drawn, group, steps))]
    is_all = len(found) == len(batch.groups) and can_draw_prompts(batch.prefill)
    return found if is_all else []


def _is_plain(values: Sequence[float], words: Sequence[int]) -> bool:
    if tuple(values[Value.REPETITION : Value.FREQUENCY + 1]) != _NO_PENALTIES:
        return False
    if values[Value.TEMPERATURE] < MIN_TEMPERATURE:
        return True
    has_filter = words[Word.TOP_K] > 0 or values[Value.TOP_P] < 1 or values[Value.MIN_P] > 0
    return words[Word.RULE] in (Rule.COUPLED, Rule.DELTA) and not has_filter
