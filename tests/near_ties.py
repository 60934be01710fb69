"""Where an output may differ from its reference: the near-tie rule, and what follows a tie."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams

# a mismatch is forgiven where the reference's best two logits are this close
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Reference:
    """What `generate` yields: n tokens, and the logits [n, V] that each is the argmax of."""

    tokens: list[int]
    logits: Tensor


@dataclass(frozen=True)
class Tie:
    case: str
    position: int
    wanted: int
    found: int
    gap: float


def require_near_tie(prompt: Sequence[int], reference: Reference, tie: Tie) -> None:
    """The rule in float32; a forgiven tie is a warning in pytest's summary.

    Raises:
        AssertionError: the reference prefers its token clearly.
    """
    best = reference.logits[tie.position].topk(2)
    assert tie.gap < NEAR_TIE, f"no near tie: {tie}"
    assert tie.found in best.indices.tolist(), f"neither of the two tokens of a near tie: {tie}"
    warnings.warn(f"forgiven near tie: {tie}", stacklevel=4)


TieRule = Callable[[Sequence[int], Reference, Tie], None]


@torch.inference_mode()
def is_within_rounding(model: Any, exact: Any, tokens: list[int], one: int, other: int) -> bool:
    """Whether the next tokens `one` and `other` are closer than the error of the rounded model.

    Args:
        model: in bfloat16.
        exact: the same weights in float32.
        tokens: prompt and output so far.
        one: a token id.
        other: another one.
    """
    ids = torch.tensor([tokens])
    rounded, wanted = (m(ids, use_cache=False).logits[0, -1].float() for m in (model, exact))
    return abs(float(wanted[one] - wanted[other])) < float((rounded - wanted).abs().max())


@torch.inference_mode()
def argmax_by_width(model: Any, tokens: list[int]) -> set[int]:
    """What the target alone makes of the last of these tokens, in passes of several widths."""
    choices = set()
    for batch in (1, 2, 3, 5, 8):
        for width in (1, 2, 5, 16, len(tokens)):
            ids = torch.tensor([tokens] * batch)
            cache = None
            if len(tokens) > width:
                cache = model(ids[:, :-width], use_cache=True).past_key_values
            logits = model(ids[:, -width:], past_key_values=cache, use_cache=True).logits
            choices |= set(logits[:, -1].argmax(-1).tolist())
    return choices


def forgive_near_ties(
    llm: LLM,
    case: str,
    prompt: Sequence[int],
    found: list[int],
    reference: Reference,
    rule: TieRule = require_near_tie,
) -> list[Tie]:
    """Compare an output with its reference; after a near tie, go on from the reference's token.

    Returns:
        the forgiven mismatches.
    Raises:
        AssertionError: a mismatch that the rule does not forgive, or another length.
    """
    wanted, ties, start = reference.tokens, [], 0
    while True:
        assert start + len(found) == len(wanted), f"{case}: {len(found)} tokens from {start} on"
        mismatch = next((i for i, t in enumerate(found) if t != wanted[start + i]), None)
        if mismatch is None:
            return ties
        position = start + mismatch
        best = reference.logits[position].topk(2).values
        gap = float(best[0] - best[1])
        tie = Tie(case, position, wanted[position], found[mismatch], gap)
        rule(prompt, reference, tie)
        ties.append(tie)
        start = position + 1
        if start == len(wanted):
            return ties
        (output,) = llm.generate([[*prompt, *wanted[:start]]], greedy_params(len(wanted) - start))
        found = output.outputs[0].token_ids


def greedy_params(num_tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
