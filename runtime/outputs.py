"""What a caller gets back, named as vLLM's users know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specc.metrics import SpecStats

if TYPE_CHECKING:
    from specc.runtime.logprobs import TokenLogprobs


@dataclass(frozen=True)
class CompletionOutput:
    """The output of one request.

    Args:
        token_ids: emitted tokens; an EOS or stop token that ended the output is included.
        text: their text, without the stop string and without the token that ended the output.
        finish_reason: `stop` (EOS, stop token, stop string, end of a grammar), `length`
            (max_tokens, context), `timeout` (its deadline has passed) or `error` (its grammar
            became too complex to go on, or its controls leave no token that can follow).
        stop_reason: the stop token id or stop string, or the error; None for EOS and length.
        logprobs: of each token, and of the best ones beside it; None where not asked for.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the tokens; None without `logprobs`."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(entries[token].logprob for token, entries in pairs)


@dataclass(frozen=True)
class RequestOutput:
    """A finished request; `prompt` is None where the caller passed token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: SpecStats
    finished: bool = True


@dataclass(frozen=True)
class StreamOutput:
    """One more token of a request; the texts of all of them, joined, are the final text.

    Args:
        index: which of the streamed prompts.
        token_id: the new token; None where the request ended without one (`timeout`).
        text: characters that became certain; may be empty.
        metrics: of the whole request, with the last token only.
        logprobs: of this token, where asked for.
    """

    request_id: str
    index: int
    token_id: int | None
    text: str
    finished: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: SpecStats | None = None
    logprobs: TokenLogprobs | None = None
