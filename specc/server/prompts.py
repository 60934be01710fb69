"""Prompts of completions, in the forms that clients send, and their token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specc.runtime.requests.prompt_cut import PromptCut
from specc.runtime.service.service import Service
from specc.sampling.params import SamplingParams
from specc.server.config import MAX_CHOICES
from specc.server.errors import ApiError, bad_request
from specc.server.fields import whole_numbers
from specc.server.params import num_outputs
from specc.server.protocol import CompletionRequest, GenerationRequest


@dataclass(frozen=True)
class Completion:
    """A completion that can be answered.

    Args:
        form: the field of its output format.
        token_ids: of its prompts.
        echo: their texts, to be repeated.
    """

    wanted: CompletionRequest
    params: SamplingParams
    form: str | None
    token_ids: list[list[int]]
    echo: tuple[str, ...] | None


class PromptReader:
    """From a request's prompts to token ids, and back to text."""

    def __init__(self, service: Service) -> None:
        self._engine = service.engine
        self._requests = service.core.requests

    def cut(self, wanted: GenerationRequest, params: SamplingParams) -> PromptCut | None:
        """What stays of prompts, where a request says so.

        Raises:
            ApiError: more than the engine has room for.
        """
        count = wanted.truncate_prompt_tokens
        if count is None:
            return None
        most = self._engine.max_seq_len - 1
        if not -1 <= count <= most or count == 0:
            raise bad_request(
                f"truncate_prompt_tokens={count}", f"1 … {most}, or -1 for as many as fit",
                "correct it", "truncate_prompt_tokens",
            )  # fmt: skip
        if count == -1:
            # beside the output, unless that may have all of the context anyway
            output = min(params.max_tokens or most, most)
            count = most if output == most else most + 1 - output
        return PromptCut(count, wanted.truncation_side or "left")

    def read(
        self, wanted: CompletionRequest, cut: PromptCut | None
    ) -> tuple[list[list[int]], tuple[str, ...] | None]:
        """Token ids of the prompts, and their texts if they are echoed.

        Raises:
            ApiError: prompts of another form.
            RequestError: one that is too long, or cannot be tokenized.
        """
        prompts = _prompts(wanted.prompt)
        check_count(len(prompts) * num_outputs(wanted))
        has_special = wanted.add_special_tokens is False
        token_ids = []
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                token_ids.append(self._requests.tokenize(prompt, has_special, index, cut))
                continue
            ids = prompt if cut is None else cut.of(prompt)
            self._requests.check_length(len(ids), index)
            token_ids.append(ids)
        if not wanted.echo:
            return token_ids, None
        pairs = zip(prompts, token_ids, strict=True)
        # of a cut one, what is left
        own = (p if isinstance(p, str) and cut is None else self.text(ids) for p, ids in pairs)
        return token_ids, tuple(own)

    def text(self, token_ids: list[int]) -> str:
        """Of token ids, special ones included; of those that there are."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return ""
        # the engine refuses others on submission
        known = [token for token in token_ids if 0 <= token < self._engine.vocab_size]
        # decoding a batch releases the GIL
        return tokenizer.decode_batch([known], skip_special_tokens=False)[0]


def check_count(count: int) -> None:
    """Raises ApiError: a request for more outputs than one may have."""
    if count > MAX_CHOICES:
        raise _too_many(count)


def _too_many(count: int) -> ApiError:
    return bad_request(
        f"{count} outputs, prompts times n", f"at most {MAX_CHOICES}", "ask for fewer", "n"
    )


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request, in any of the four forms that OpenAI's API takes."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        # 5.0 is 5 here, too
        prompt = whole_numbers(prompt)
        if isinstance(prompt[0], list):
            prompt = [whole_numbers(item) for item in prompt]
        if type(prompt[0]) is not int and len(prompt) > MAX_CHOICES:
            # before checking each of them
            raise _too_many(len(prompt))
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return prompt
        lists = all(isinstance(item, list) for item in prompt)
        if lists and all(type(token) is int for item in prompt for token in item):
            return prompt
    raise bad_request(
        "the prompt is empty, or of another form",
        "a string, a list of token ids, or a list of either",
        "correct it",
        "prompt",
    )
