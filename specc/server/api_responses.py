"""The shapes of answers: of whole ones, and of the chunks of streams."""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from specc.runtime.outputs.logprobs import TokenLogprobs
from specc.runtime.service.service import Update
from specc.server.errors import ApiError
from specc.server.generate import Output
from specc.server.logprobs import (
    TextOffsets,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    with_best,
)
from specc.server.message_reader import MessageReader
from specc.server.parsers.message import Delta, MessageParser
from specc.server.protocol import GenerationRequest, StreamOptions
from specc.server.stream import EventWriter, to_event
from specc.speculation.metrics import SpecStats

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Options:
    """What an answer holds besides the text.

    Args:
        logprobs: best tokens to name beside each; None leaves them out.
        has_metrics: counters of speculation come with it.
        echo: prompts' texts, to stand before the outputs.
        has_token_ids: of prompts and outputs.
        prompt_logprobs: best tokens to name beside each of a prompt; None leaves them out.
        has_cached_tokens: usage says how much of the prompts was in the cache.
        num_best: outputs of each prompt that come back, of those that were made; None is all.
    """

    logprobs: int | None = None
    has_metrics: bool = False
    echo: tuple[str, ...] | None = None
    has_token_ids: bool = False
    prompt_logprobs: int | None = None
    has_cached_tokens: bool = True
    num_best: int | None = None


class Answer(abc.ABC):
    """To one request, in the shape of its API."""

    id: str

    @abc.abstractmethod
    def name(self, request_id: str | None) -> None:
        """Told once, and first: what the client calls its request, if it calls it anything."""

    @abc.abstractmethod
    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """All of it at once."""

    @abc.abstractmethod
    def writer(self, wanted: GenerationRequest, cancel: Callable[[], None]) -> EventWriter:
        """Of its stream.

        Args:
            cancel: ends the outputs; the writer is then told that they have failed.
        """


class ApiResponse(Answer):
    """Of completions or chats."""

    prefix, kind, chunk_kind = "", "", ""

    def __init__(self, model: str, tokens: TokenTexts, options: Options) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._tokens = tokens
        self._options = options

    def name(self, request_id: str | None) -> None:
        if request_id is not None:
            self.id = f"{self.prefix}-{request_id}"

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        best = best_of(outputs, self._options.num_best)
        choices = [self._choice(i, output) for i, output in enumerate(best)]
        answer = self._head(self.kind) | {"choices": choices, "usage": self.usage(outputs)}
        return answer | {"kv_transfer_params": None} | self._metrics(outputs)

    def writer(self, wanted: GenerationRequest, cancel: Callable[[], None]) -> EventWriter:
        also = wanted.stream_options or StreamOptions()
        return ChunkWriter(self, also.has_usage, also.has_all_usage)

    def take(self, index: int, update: Update) -> bool:
        """Read an update, each once and in order, before its `chunk`.

        Returns:
            whether a chunk would say anything.
        """
        has_ids = self._options.has_token_ids and bool(update.token_ids)
        return bool(update.text or update.is_last or update.logprobs or has_ids)

    def chunk(self, index: int, output: Output, update: Update, is_first: bool) -> dict[str, Any]:
        choice = self._delta(index, output, update, is_first)
        return self._head(self.chunk_kind) | {"choices": [choice]}

    def chunks(
        self, index: int, output: Output, update: Update, is_first: bool
    ) -> list[dict[str, Any]]:
        """What is new about one output, in one chunk or two."""
        return [self.chunk(index, output, update, is_first)]

    def last_chunk(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Usage alone, after all text."""
        head = self._head(self.chunk_kind) | {"choices": [], "usage": self.usage(outputs)}
        return head | self._metrics(outputs)

    def usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        found = usage_of(outputs)
        return found if self._options.has_cached_tokens else found | {"prompt_tokens_details": None}

    def _head(self, kind: str) -> dict[str, Any]:
        names = {"id": self.id, "object": kind, "created": self._created, "model": self._model}
        # OpenAI's and vLLM's clients read these unasked: null says that there is none
        return names | {"service_tier": None, "system_fingerprint": None}

    def _metrics(self, outputs: Sequence[Output]) -> dict[str, Any]:
        if not self._options.has_metrics:
            return {}
        stats = SpecStats()
        for output in outputs:
            stats.merge(output.metrics or SpecStats())
        return {"metrics": {"speculative_decoding": speculation_of(stats)}}

    def _ids(self, news: Output | Update) -> dict[str, Any]:
        return {"token_ids": news.token_ids if self._options.has_token_ids else None}

    def _prompt_ids(self, output: Output, is_first: bool = True) -> dict[str, Any]:
        has_ids = self._options.has_token_ids and is_first
        return {"prompt_token_ids": output.job.token_ids if has_ids else None}

    def _prompt_logprobs(self, output: Output) -> dict[str, Any]:
        count, scores = self._options.prompt_logprobs, output.prompt_logprobs
        if count is None or scores is None:
            return {"prompt_logprobs": None}
        return {"prompt_logprobs": prompt_logprobs(self._tokens, with_best(scores, count))}

    @abc.abstractmethod
    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        """One output of a whole answer."""

    @abc.abstractmethod
    def _delta(self, index: int, output: Output, update: Update, is_first: bool) -> dict[str, Any]:
        """What is new about one output, in a chunk of a stream."""


class ChunkWriter(EventWriter):
    """Of completions and chats: chunks without names, up to `[DONE]` or an error.

    Args:
        has_usage: a last chunk holds the usage, and all others say that they do not.
        has_all_usage: every chunk holds the usage so far.
    """

    def __init__(self, answer: ApiResponse, has_usage: bool, has_all_usage: bool) -> None:
        self._answer = answer
        self._has_usage = has_usage
        self._has_all_usage = has_all_usage
        # outputs that have a chunk
        self._begun: set[int] = set()

    def write(self, outputs: Sequence[Output], index: int, update: Update) -> bytes:
        """Nothing where a token has no text yet: it is in the next chunk that has some."""
        says_something = self._answer.take(index, update) or self._has_all_usage
        if self._begun and not says_something:
            return b""
        chunks = self._answer.chunks(index, outputs[index], update, index not in self._begun)
        self._begun.add(index)
        if self._has_usage:
            usage = self._answer.usage(outputs) if self._has_all_usage else None
            chunks = [chunk | {"usage": usage} for chunk in chunks]
        return b"".join(map(to_event, chunks))

    def end(self, outputs: Sequence[Output]) -> bytes:
        return (to_event(self._answer.last_chunk(outputs)) if self._has_usage else b"") + _DONE

    def fail(self, outputs: Sequence[Output], error: ApiError) -> bytes:
        return to_event(error.to_json())


class CompletionResponse(ApiResponse):
    """Of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokens: TokenTexts, options: Options) -> None:
        super().__init__(model, tokens, options)
        # output → where its next token begins
        self._offsets: dict[int, TextOffsets] = {}

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        choice = self._of(index, output, output, True)
        return choice | self._prompt_ids(output) | self._prompt_logprobs(output)

    def _delta(self, index: int, output: Output, update: Update, is_first: bool) -> dict[str, Any]:
        return self._of(index, output, update, is_first) | self._prompt_ids(output, is_first)

    def _of(
        self, index: int, output: Output, news: Output | Update, is_first: bool
    ) -> dict[str, Any]:
        echo = self._options.echo[output.job.prompt] if self._options.echo and is_first else None
        has_logprobs = self._options.logprobs is not None
        return {
            "index": index,
            "text": (echo or "") + news.text,
            "logprobs": self._logprobs(index, output, news, echo) if has_logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        } | self._ids(news)

    def _logprobs(
        self, index: int, output: Output, news: Output | Update, echo: str | None
    ) -> dict[str, Any]:
        """Of new tokens, after those of the prompt where the text begins with it."""
        if index not in self._offsets:
            skips_special = output.job.params.skip_special_tokens
            self._offsets[index] = TextOffsets(self._tokens, skips_special)
        offsets, ids = self._offsets[index], news.token_ids
        scores: Sequence[TokenLogprobs | None] = news.logprobs or []
        begins: list[int] = []
        if echo is not None:
            begins = offsets.of_prompt(output.job.token_ids, echo)
        begins = begins + offsets.of_output(ids, news.text)
        if echo is not None and output.prompt_logprobs is not None:
            # both this and `prompt_logprobs` may ask for them, with counts of their own
            own = with_best(output.prompt_logprobs, self._options.logprobs or 0)
            ids, scores = [*output.job.token_ids, *ids], [*own, *scores]
        return completion_logprobs(self._tokens, ids, scores, begins[len(begins) - len(ids) :])


class ChatResponse(ApiResponse):
    """Of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, tokens: TokenTexts, options: Options, reader: MessageReader
    ) -> None:
        super().__init__(model, tokens, options)
        self._reader = reader
        # output → its parser, and what the last update has brought
        self._parsers: dict[int, MessageParser] = {}
        self._news: dict[int, Delta] = {}

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """A whole answer; what it has of the prompt is beside the choices."""
        first = outputs[0]
        return super().whole(outputs) | self._prompt_ids(first) | self._prompt_logprobs(first)

    def chunk(self, index: int, output: Output, update: Update, is_first: bool) -> dict[str, Any]:
        """What is new about one output; of the prompt, beside the choices of the first chunk."""
        chunk = super().chunk(index, output, update, is_first)
        return chunk | self._prompt_ids(output, is_first)

    def chunks(
        self, index: int, output: Output, update: Update, is_first: bool
    ) -> list[dict[str, Any]]:
        """One, and one more for an end that clients expect alone.

        At OpenAI an end stands alone, and their client takes no call for done that begins beside
        it: it never tells that the arguments are there. And the token that ends an output has no
        text: clients that put texts together from log probabilities pass over it only where a
        chunk has no content.
        """
        chunk = self.chunk(index, output, update, is_first)
        (choice,) = chunk["choices"]
        if choice["finish_reason"] is None:
            return [chunk]
        delta = choice["delta"]
        own: dict[str, Any] = {"logprobs": None, "token_ids": None}
        if {"tool_calls", "function_call"} & delta.keys():
            end: dict[str, Any] = {}
        elif delta.get("content") and ends_by_token(output) and len(update.logprobs or []) > 1:
            end = {"content": ""}
            scores = choice["logprobs"]["content"]
            own["logprobs"] = choice["logprobs"] | {"content": [scores.pop()]}
            if (ids := choice["token_ids"]) is not None:
                choice["token_ids"], own["token_ids"] = ids[:-1], ids[-1:]
        else:
            return [chunk]
        reasons = {name: choice[name] for name in ("finish_reason", "stop_reason")}
        choice |= dict.fromkeys(reasons)
        last_choice = {"index": index, "delta": end} | own | reasons
        return [chunk, chunk | {"choices": [last_choice], "prompt_token_ids": None}]

    def take(self, index: int, update: Update) -> bool:
        """Read an update; its text may be held back, or bring out what was."""
        if index not in self._parsers:
            self._parsers[index] = self._reader.parser()
        news = self._news[index] = self._parsers[index].feed(update.text, update.is_last)
        has_text = super().take(index, replace(update, text=""))
        return has_text or news.says_something

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        parser = self._reader.parser()
        whole = parser.feed(output.text, is_last=True)
        message = {"role": self._reader.role} | self._reader.message(whole)
        for name in ("refusal", "annotations", "audio", "function_call"):
            message.setdefault(name, None)
        return {"index": index, "message": message} | self._end(output, output, parser)

    def _delta(self, index: int, output: Output, update: Update, is_first: bool) -> dict[str, Any]:
        delta = self._reader.delta(self._news.pop(index))
        if is_first:
            content = self._reader.echo + delta.get("content", "")
            delta = {"role": self._reader.role} | delta | {"content": content}
        end = self._end(output, update, self._parsers[index])
        return {"index": index, "delta": delta} | end

    def _end(self, output: Output, news: Output | Update, parser: MessageParser) -> dict[str, Any]:
        count = self._options.logprobs
        logprobs = None
        if count is not None:
            logprobs = chat_logprobs(self._tokens, news.token_ids, news.logprobs or [], count)
        return {
            "logprobs": logprobs,
            "finish_reason": self._reader.finish_reason(output.finish_reason, parser),
            "stop_reason": output.stop_reason,
        } | self._ids(news)


def ends_by_token(output: Output) -> bool:
    """Whether the last token ended an output, and its text is left out."""
    is_text = isinstance(output.stop_reason, str) or output.job.params.include_stop_str_in_output
    return output.finish_reason == "stop" and not is_text


def best_of(outputs: Sequence[Output], count: int | None) -> list[Output]:
    """The best outputs of each prompt, by the mean log probability of their tokens.

    Args:
        outputs: in order of their prompts.
        count: of each prompt; where no more were made, or None, they stay in their order.
    """
    by_prompt: dict[int, list[Output]] = {}
    for output in outputs:
        by_prompt.setdefault(output.job.prompt, []).append(output)
    best: list[Output] = []
    for own in by_prompt.values():
        has_all = count is None or len(own) <= count
        best += own if has_all else sorted(own, key=_badness)[:count]
    return best


def _badness(output: Output) -> float:
    scores = zip(output.token_ids, output.logprobs, strict=True)
    return -sum(entries[token].logprob for token, entries in scores) / max(1, output.num_tokens)


def usage_of(outputs: Sequence[Output]) -> dict[str, Any]:
    """Tokens so far; each prompt counts once, however many outputs it has."""
    by_prompt: dict[int, Output] = {}
    for output in outputs:
        by_prompt.setdefault(output.job.prompt, output)
    prompt = sum(len(output.job.token_ids) for output in by_prompt.values())
    completion = sum(output.num_tokens for output in outputs)
    found = (output.metrics for output in by_prompt.values())
    cached = sum(stats.num_cached_tokens for stats in found if stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def speculation_of(stats: SpecStats) -> dict[str, Any]:
    """Counters of speculation, named as vLLM's; the histogram counts steps by accepted tokens."""
    reached = [stats.num_spec_steps, *stats.accepted_at_depth, 0]
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(reached)],
        "num_spec_steps": stats.num_spec_steps,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": len(stats.accepted_at_depth),
    }
