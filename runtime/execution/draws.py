"""Tokens that a target draws itself, row by row, so that nobody needs its logits.

A target that is cut among ranks has some columns of its logits on each. Where a row has no filter,
no penalty and no mask, the token that follows it is the best of all columns' own best
(`specc::column_winners`), and a score and a token cross between ranks instead of a row of logits.
Log probabilities need whole rows, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specc.kernels.reference.sampling import MIN_TEMPERATURE
from specc.runtime.backends.step import StagedStep, Step
from specc.runtime.constraints.grammar_masks import has_masks
from specc.runtime.execution.shared_pass import FlatTokens
from specc.runtime.outputs.step_logprobs import wants_logprobs
from specc.runtime.scheduling.batch import Batch, Span, StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.rows import Rule, Value, Word

_NO_PENALTIES = (1.0, 0.0, 0.0)


class Draws(NamedTuple):
    """What decides the token after each of R rows of logits.

    Args:
        temperature: [R] float32; 0 is greedy.
        seeds: [R] int64.
        positions: [R] int64 of the tokens that are drawn.
    """

    temperature: Tensor
    seeds: Tensor
    positions: Tensor


class BegunModel(Protocol):
    """A target of several ranks: each pass is begun, and its result taken later.

    Stages work on several passes together, which are of disjoint sequences. Without stages a pass
    is done when it has begun.
    """

    @property
    def num_stages(self) -> int:
        """As many passes as can be worked on together."""
        ...

    def begin(self, *inputs: Tensor | None) -> Callable[[], Tensor]:
        """Begin a pass; what it returns waits for the logits, once."""
        ...

    def begin_draw(self, draws: Draws, *inputs: Tensor | None) -> Callable[[], Tensor]:
        """The same of a pass that yields tokens: [R] int64 after the rows that inputs name."""
        ...


class DrawnPrograms(NamedTuple):
    """What an engine has for batches whose tokens the target draws.

    Args:
        steps: plan name → its step, which draws, and whose `accept` reads `winners` [B, N] int64
            instead of logits.
    """

    target: BegunModel
    steps: Mapping[str, StagedStep]


def tree_draws(nodes: FlatTokens, values: Tensor, words: Tensor) -> Draws:
    """Draws after all nodes of B trees.

    Args:
        values: [B, 6] float32, see `specc.sampling.rows.Value`.
        words: [B, 4] int64, see `specc.sampling.rows.Word`.
    """
    counts = torch.tensor(nodes.counts)
    return Draws(
        values[:, Value.TEMPERATURE].repeat_interleave(counts),
        words[:, Word.SEED].repeat_interleave(counts),
        nodes.positions + 1,
    )


def prompt_draws(spans: Sequence[Span]) -> Draws:
    """Draws of the first tokens: after the last rows of prompts that end."""
    ended = [span.request for span in spans if span.is_last]
    return Draws(
        torch.tensor([s.sampling_values[Value.TEMPERATURE] for s in ended], dtype=torch.float32),
        torch.tensor([s.sampling_words[Word.SEED] for s in ended], dtype=torch.int64),
        torch.tensor([s.num_prompt_tokens for s in ended], dtype=torch.int64),
    )


def joined(draws: Sequence[Draws]) -> Draws:
    """Those of several parts of a pass, in their order."""
    return Draws(*(torch.cat(values) for values in zip(*draws, strict=True)))


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

    A step that may come to a checkpoint of states is looked at (`KeptStates.end`), and draws none.

    Args:
        steps: plan name → step that does not draw.
    """
    if drawn is None or group.kept or steps[group.plan.name].before_accept is not None:
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
