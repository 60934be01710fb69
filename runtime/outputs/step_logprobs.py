"""Log probabilities of what steps emit, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.runtime.backends.step_io import StepResult
from specc.runtime.outputs.logprobs import TokenLogprobs, logprobs_of, score_tokens
from specc.runtime.scheduling.request import Request


def wants_logprobs(requests: Sequence[Request]) -> bool:
    # asked at each step: no generator
    for request in requests:  # noqa: SIM110
        if request.params.logprobs is not None:
            return True
    return False


def logprobs_after(
    requests: list[Request], step: StepResult
) -> list[list[TokenLogprobs] | None] | None:
    """Those of the tokens that a step emits; None where nobody asks for any."""
    if not step.values.keys() & {"scores", "logits"}:
        return None
    counts = zip(step.output_tokens, step.num_accepted, strict=True)
    outputs = [tokens[: accepted + 1] for tokens, accepted in counts]
    if (scores := step.values.get("scores")) is not None:
        return _emitted_logprobs(scores, outputs, requests)
    return _tree_logprobs(step.values["logits"], step.values["path"], outputs, requests)


def _tree_logprobs(
    logits: Tensor, path: Tensor, outputs: Sequence[Sequence[int]], requests: list[Request]
) -> list[list[TokenLogprobs] | None]:
    """Of what a step put out for each request; None for those that do not ask.

    Args:
        logits: [B * N, V] of the tree's nodes.
        path: [B, P] accepted nodes from the root on, then -1.
        outputs: emitted tokens of each request, as many as its path has nodes.
        requests: B requests.
    """
    num_nodes = logits.shape[0] // len(requests)
    found: list[list[TokenLogprobs] | None] = []
    for b, (request, tokens) in enumerate(zip(requests, outputs, strict=True)):
        count = request.params.logprobs
        if count is None:
            found.append(None)
            continue
        rows = path[b, : len(tokens)].long() + b * num_nodes
        given = torch.tensor(tokens, device=logits.device)
        found.append(logprobs_of(score_tokens(logits[rows], given, count).cpu(), tokens, count))
    return found


def _emitted_logprobs(
    scores: Tensor, outputs: Sequence[Sequence[int]], requests: list[Request]
) -> list[list[TokenLogprobs] | None]:
    """`_tree_logprobs` of a step that has computed them itself.

    Args:
        scores: [B, P, 2 + 2 K] on the host, see `score_tokens`; of tokens that were not emitted
            it may say anything.
        outputs: emitted tokens of each request, at most P.
        requests: B requests.
    """
    rows = zip(scores, outputs, requests, strict=True)
    return [
        None
        if (count := request.params.logprobs) is None
        else logprobs_of(own[: len(tokens)], tokens, count)
        for own, tokens, request in rows
    ]
