"""What a caller gets back, named as vLLM's users know it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tokenizers import Tokenizer

from specc.runtime.outputs.logprobs import PromptLogprobs, TokenLogprobs, TokenTexts
from specc.speculation.metrics import SpecStats


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a request.

    Args:
        index: which of the request's n outputs.
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
    # read by programs for vLLM; no engine has such a thing
    lora_request: ClassVar[None] = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the tokens; None without `logprobs`."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(entries[token].logprob for token, entries in pairs)


@dataclass(frozen=True)
class RequestOutput:
    """A request and its outputs.

    Args:
        request_id: its name.
        prompt: the caller's text; None where token ids were passed.
        prompt_token_ids: what the target has read.
        outputs: n of them, in the order of their seeds.
        metrics: counters of all outputs together.
        finished: all outputs have ended.
        prompt_logprobs: of each token of the prompt, and of the best ones beside it; None for the
            first one, and altogether where not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: SpecStats
    finished: bool = True
    prompt_logprobs: PromptLogprobs | None = None
    # read by programs for vLLM; no engine has such things
    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    multi_modal_placeholders: ClassVar[None] = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose rows earlier requests had left."""
        return self.metrics.num_cached_tokens


class OutputTexts:
    """Puts texts of tokens beside log probabilities, where there are any.

    Args:
        tokenizer: None leaves them out.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._texts = TokenTexts(tokenizer)

    def of(self, output: RequestOutput) -> RequestOutput:
        """An output that is to be handed out."""
        completions = output.outputs
        if output.prompt_logprobs is None and all(one.logprobs is None for one in completions):
            return output
        return replace(
            output,
            outputs=[replace(one, logprobs=self._texts.named(one.logprobs)) for one in completions],
            prompt_logprobs=self._texts.named(output.prompt_logprobs),
        )

    def of_event(self, event: StreamOutput) -> StreamOutput:
        """A token that is to be handed out."""
        if event.logprobs is None:
            return event
        (row,) = self._texts.named([event.logprobs])
        return replace(event, logprobs=row)


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    """The outputs of one prompt, whose request has the name of the first."""
    first, *others = outputs
    if not others:
        return first
    metrics = SpecStats()
    for output in outputs:
        metrics.merge(output.metrics)
    return replace(
        first,
        outputs=[completion for output in outputs for completion in output.outputs],
        metrics=metrics,
        finished=all(output.finished for output in outputs),
    )


@dataclass(frozen=True)
class StreamOutput:
    """One more token of a request; the texts of all of them, joined, are the final text.

    Args:
        index: which of the streamed prompts.
        token_id: the new token; None where the request ended without one (`timeout`).
        text: characters that became certain; may be empty.
        metrics: of the whole request, with the last token only.
        logprobs: of this token, where asked for.
        output: which of the prompt's n outputs.
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
    output: int = 0
