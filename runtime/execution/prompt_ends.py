"""What a pass over prompts yields: first tokens and log probabilities, on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specc.runtime.constraints.grammar_masks import mask_roots
from specc.runtime.execution.batch_rows import sampling_rows
from specc.runtime.execution.block_votes import PendingVotes, read_votes
from specc.runtime.execution.link import Fetched, HostLink, Link
from specc.runtime.outputs.logprobs import TokenLogprobs, logprobs_of, score_prompt, score_tokens
from specc.runtime.scheduling.batch import Span, Vote
from specc.runtime.scheduling.kv_cache import KVCache
from specc.runtime.scheduling.request import Request


class PromptEnds(NamedTuple):
    """Of the spans of a pass.

    Args:
        first_tokens: of each span; None where its prompt is not finished yet.
        first_logprobs: of first tokens, by request that asks.
        prompt_logprobs: of the prompt tokens after those of a span, by request that asks.
        votes: of last queries.
    """

    first_tokens: list[int | None]
    first_logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    votes: list[Vote]


class PendingEnds:
    """Ends that are queued; `result` waits for them, now or after later work was queued.

    Args:
        fetched: first tokens [R], then what was scored, prompts before first tokens.
        votes: of last queries.
    """

    def __init__(
        self, spans: Sequence[Span], fetched: Fetched, votes: Sequence[PendingVotes] = ()
    ) -> None:
        self._spans = spans
        self._fetched = fetched
        self._votes = votes

    def result(self) -> PromptEnds:
        """Waits for the device."""
        first, *scores = self._fetched.wait()
        tokens: list[int] = first.tolist()
        found = iter(scores)
        prompts = {}
        for span in self._spans:
            if count := span.num_scored:
                request = span.request
                asked = request.params.prompt_logprobs or 0
                after = request.token_ids[span.start + 1 : span.start + 1 + count]
                prompts[request.request_id] = logprobs_of(next(found), after, asked)
        ended = [span.request for span in self._spans if span.is_last]
        firsts = {
            request.request_id: logprobs_of(next(found), [token], most)
            for request, token in zip(ended, tokens, strict=True)
            if (most := request.params.logprobs) is not None
        }
        rest = iter(tokens)
        first_tokens = [next(rest) if span.is_last else None for span in self._spans]
        return PromptEnds(first_tokens, firsts, prompts, read_votes(self._votes))


@torch.inference_mode()
def queue_ends(
    spans: Sequence[Span],
    logits: Tensor,
    draw: Callable[[Tensor, list[Request]], Tensor],
    link: Link,
    votes: Sequence[PendingVotes] = (),
) -> PendingEnds:
    """Queue what follows the target's pass over some spans.

    Args:
        logits: [R, V] of the tokens that `Span.logit_places` names.
        draw: [E, V] of the last tokens of prompts, and their requests → [E] first tokens.
        votes: of their last queries.
    """
    with link.active():
        scores: list[Tensor] = []
        if any(span.num_scored for span in spans):
            logits = _score_prompts(spans, logits, link, scores)
        ended = [span.request for span in spans if span.is_last]
        if ended:
            first = draw(logits, ended)
        else:
            first = torch.empty(0, dtype=torch.int64, device=logits.device)
        for i, request in enumerate(ended):
            if (most := request.params.logprobs) is not None:
                scores.append(score_tokens(logits[i : i + 1], first[i : i + 1], most))
        # nobody waits for a pass that nothing comes from
        fetched = link.fetch([first, *scores]) if ended or scores else HostLink().fetch([_NONE])
    return PendingEnds(spans, fetched, votes)


@torch.inference_mode()
def first_tokens(
    logits: Tensor,
    requests: list[Request],
    cache: KVCache,
    link: Link,
    operators: Any,
) -> Tensor:
    """Draw what follows each prompt, as a step without speculation does: a tree of one node.

    Args:
        logits: [R, V] of the last tokens of R prompts.
        operators: namespace of the `specc::` operators.
    Returns:
        [R] int64 on the device.
    """
    values, words = sampling_rows(requests)
    host = [
        torch.tensor([[s.token_ids[s.num_prompt_tokens - 1]] for s in requests]),
        torch.full((len(requests), 1), -1, dtype=torch.int32),
        values,
        words,
        torch.tensor([s.num_prompt_tokens - 1 for s in requests], dtype=torch.int32),
        cache.block_table([s.blocks for s in requests]),
    ]
    roots, parents, *rows, table = link.send(host)
    masked = mask_roots(logits, requests, link)
    _, _, tokens = operators.accept(
        masked, roots, parents, 0, None, None, [], *rows, cache.history, table
    )
    return tokens[:, 0]


_NONE = torch.empty(0, dtype=torch.int64)


def _score_prompts(
    spans: Sequence[Span], logits: Tensor, link: Link, scores: list[Tensor]
) -> Tensor:
    """Append the scores of each span that asks; returns the rows of the last tokens of prompts."""
    after: list[int] = []
    last_rows: list[int] = []
    row = 0
    for span in spans:
        count = span.num_scored
        after += span.request.token_ids[span.start + 1 : span.start + 1 + count]
        row += count
        if span.is_last:
            last_rows.append(row)
            row += 1
    tokens, lasts = link.send([torch.tensor(after), torch.tensor(last_rows, dtype=torch.int64)])
    row = place = 0
    for span in spans:
        if count := span.num_scored:
            asked = span.request.params.prompt_logprobs or 0
            own = tokens[place : place + count]
            scores.append(score_prompt(logits[row : row + count], own, asked))
        place += count
        row += count + span.is_last
    return logits[lasts]
