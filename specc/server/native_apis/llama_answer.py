"""Answers of llama.cpp's /completion, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from specc.runtime.service.service import Update
from specc.server.api_responses import Answer, Options
from specc.server.errors import ApiError
from specc.server.generate import Output
from specc.server.logprobs import TokenTexts, chat_logprobs
from specc.server.protocol import GenerationRequest
from specc.server.stream import EventWriter, to_event
from specc.speculation.metrics import SpecStats

# what it calls as here
_SETTINGS = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos",
)  # fmt: skip


def error_form(error: ApiError) -> dict[str, Any]:
    """An error's body: its code is the status."""
    told = error.to_json()["error"]
    return {"error": {"code": error.status, "message": told["message"], "type": told["type"]}}


class LlamaAnswer(Answer):
    """To one prompt, whole or as events.

    Args:
        prompt: its text, special tokens included.
        returns_tokens: a whole answer has the ids of its tokens.
        options: of what is told besides.
    """

    def __init__(
        self, model: str, prompt: str, returns_tokens: bool, tokens: TokenTexts, options: Options
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._begin_s = time.monotonic()
        self._model = model
        self._prompt = prompt
        self._returns_tokens = returns_tokens
        self._tokens = tokens
        self._options = options

    def name(self, request_id: str | None) -> None:
        self.id = request_id or self.id

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        ids = output.token_ids if self._returns_tokens else []
        return self._end(output, output.text, ids) | self._probabilities(output)

    def writer(self, wanted: GenerationRequest, cancel: Callable[[], None]) -> EventWriter:
        return _LlamaWriter(self)

    def part(self, output: Output, update: Update) -> dict[str, Any]:
        """What is new about the output."""
        return {
            "index": 0,
            "content": update.text,
            "tokens": update.token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": output.num_tokens,
            "tokens_evaluated": len(output.job.token_ids),
        } | self._probabilities(update)

    def end(self, output: Output) -> dict[str, Any]:
        """After the last part."""
        return self._end(output, "", [])

    def _end(self, output: Output, text: str, token_ids: list[int]) -> dict[str, Any]:
        reason = output.stop_reason
        by_word = isinstance(reason, str) and output.finish_reason == "stop"
        by_token = "word" if by_word else "eos"
        stats = output.metrics or SpecStats()
        told = {"tokens_cached": stats.num_cached_tokens} if self._options.has_cached_tokens else {}
        return {
            "index": 0,
            "content": text,
            "tokens": token_ids,
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": output.num_tokens,
            "tokens_evaluated": len(output.job.token_ids),
            "generation_settings": self._settings(output),
            "prompt": self._prompt,
            "truncated": False,
            "stop_type": "limit" if output.finish_reason == "length" else by_token,
            "stopping_word": reason if by_word else "",
            "timings": self._timings(output, stats),
        } | told

    def _settings(self, output: Output) -> dict[str, Any]:
        params = output.job.params
        return {name: getattr(params, name) for name in _SETTINGS} | {
            "n_predict": -1 if params.max_tokens is None else params.max_tokens,
            "seed": -1 if params.seed is None else params.seed,
            "repeat_penalty": params.repetition_penalty,
            "stop": list(params.stop_strings),
            "n_probs": self._options.logprobs or 0,
        }

    def _timings(self, output: Output, stats: SpecStats) -> dict[str, Any]:
        """Milliseconds up to the first token, waiting included, and from there on."""
        prompt_s = stats.first_token_s
        rest_s = max(0.0, time.monotonic() - self._begin_s - prompt_s)
        found: dict[str, Any] = {}
        for name, count, seconds in (
            ("prompt", len(output.job.token_ids), prompt_s),
            ("predicted", output.num_tokens, rest_s),
        ):
            found |= {
                f"{name}_n": count,
                f"{name}_ms": 1000 * seconds,
                f"{name}_per_token_ms": 1000 * seconds / max(1, count),
                f"{name}_per_second": count / seconds if seconds else 0.0,
            }
        if self._options.has_metrics and stats.num_draft_tokens:
            accepted = stats.num_accepted_tokens
            found |= {"draft_n": stats.num_draft_tokens, "draft_n_accepted": accepted}
        return found

    def _probabilities(self, news: Output | Update) -> dict[str, Any]:
        count, ids, scores = self._options.logprobs, news.token_ids, news.logprobs or []
        if count is None:
            return {}
        rows = chat_logprobs(self._tokens, ids, scores, count)["content"]
        for row, token_id, entries in zip(rows, ids, scores, strict=True):
            row["id"] = token_id
            best = sorted(entries.items(), key=lambda item: item[1].rank)
            for other, (other_id, _) in zip(row["top_logprobs"], best, strict=False):
                other["id"] = other_id
        return {"completion_probabilities": rows}


class _LlamaWriter(EventWriter):
    def __init__(self, answer: LlamaAnswer) -> None:
        self._answer = answer

    def write(self, outputs: Sequence[Output], index: int, update: Update) -> bytes:
        if not update.text and not update.token_ids:
            return b""
        return to_event(self._answer.part(outputs[index], update))

    def end(self, outputs: Sequence[Output]) -> bytes:
        return to_event(self._answer.end(outputs[0]))

    def fail(self, outputs: Sequence[Output], error: ApiError) -> bytes:
        return to_event(error_form(error))
