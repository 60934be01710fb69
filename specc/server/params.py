"""From a request's fields to `SamplingParams`, one for each of its outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

from specc.sampling.generation_config import SamplingDefaults
from specc.sampling.params import MAX_LOGPROBS, SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.server.config import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from specc.server.errors import ApiError, bad_request
from specc.server.protocol import ChatRequest, CompletionRequest, GenerationRequest

# fields that mean the same in both
_SAME = (
    "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "rule", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "speculative", "prompt_logprobs",
    "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip
_COMPLETION_TOKENS = 16


def completion_params(request: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Raises ApiError or RequestError: a value that is out of range or cannot be served."""
    if request.best_of not in (None, request.n or 1):
        raise bad_request(
            f"best_of={request.best_of} and n={request.n or 1}", "equal ones", "leave best_of out",
            "best_of",
        )  # fmt: skip
    tokens = request.max_tokens
    if tokens is None and "max_tokens" not in request.model_fields_set:
        tokens = _COMPLETION_TOKENS
    tokens = 1 if is_prompt_alone(request) else tokens
    params = _params(request, tokens, request.logprobs, defaults)
    if request.echo and request.logprobs is not None:
        most = max(request.logprobs, params.prompt_logprobs or 0)
        params = dataclasses.replace(params, prompt_logprobs=most)
    return params


def is_prompt_alone(request: CompletionRequest) -> bool:
    """Nothing but the prompt comes back, mostly for its log probabilities.

    Raises:
        ApiError: as a stream.
    """
    is_alone = bool(request.echo) and request.max_tokens == 0
    if is_alone and request.stream:
        raise bad_request(
            "max_tokens=0 in a stream", "1 or more: a stream begins with the first token",
            "leave stream out", "stream",
        )  # fmt: skip
    return is_alone


def chat_params(
    request: ChatRequest, max_seq_len: int, defaults: SamplingDefaults
) -> SamplingParams:
    """Without a limit, an output may fill the context, as it does at OpenAI.

    Raises:
        ApiError: a value that is out of range or cannot be served.
        RequestError: the same.
    """
    if request.max_completion_tokens is not None:
        tokens = request.max_completion_tokens
    else:
        tokens = max_seq_len if request.max_tokens is None else request.max_tokens
    top = request.top_logprobs
    if top is not None and not request.logprobs:
        raise bad_request(
            "top_logprobs without logprobs", "logprobs=true beside it", "pass logprobs",
            "top_logprobs",
        )  # fmt: skip
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise bad_request(
            f"top_logprobs={top}", f"0 … {MAX_LOGPROBS}", "correct it", "top_logprobs"
        )
    return _params(request, tokens, (top or 0) if request.logprobs else None, defaults)


def for_choices(params: SamplingParams, count: int, is_streamed: bool) -> list[SamplingParams]:
    """Of each of a prompt's outputs: with a seed, they have this one and those after it.

    Args:
        params: of the request.
        count: outputs.
        is_streamed: each output begins by itself, and so with the prompt's own log probabilities.
    """
    each = dataclasses.replace(params, n=count).each()
    if not is_streamed or params.prompt_logprobs is None:
        return each
    return [dataclasses.replace(own, prompt_logprobs=params.prompt_logprobs) for own in each]


def _params(
    request: GenerationRequest,
    max_tokens: int | None,
    logprobs: int | None,
    defaults: SamplingDefaults,
) -> SamplingParams:
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request(
            "prompt_logprobs in a stream", "whole answers; or echo beside logprobs",
            "leave one of them out", "prompt_logprobs",
        )  # fmt: skip
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    limits = [count for count in (max_tokens, defaults.max_tokens) if count is not None]
    return defaults.params(
        max_tokens=min(limits, default=None),
        logprobs=logprobs,
        stop=_stop(request.stop),
        structured_outputs=_structured(request),
        **given,
    )


def _stop(stop: Any) -> list[str]:
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if isinstance(strings, list) and len(strings) > MAX_STOP_STRINGS:
        raise bad_request(
            f"{len(strings)} stop strings", f"at most {MAX_STOP_STRINGS}", "pass fewer", "stop"
        )
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise bad_request(
            "stop of another form", "a string or a list of strings", "correct it", "stop"
        )
    if "" in strings:
        raise bad_request("an empty stop string", "non-empty ones", "remove it", "stop")
    length = sum(map(len, strings))
    if length > MAX_STOP_CHARACTERS:
        raise bad_request(
            f"stop strings of {length} characters together",
            f"at most {MAX_STOP_CHARACTERS}",
            "pass shorter ones",
            "stop",
        )
    return strings


def _structured(request: GenerationRequest) -> StructuredOutputsParams | None:
    """From whichever of the three ways to ask for it was used."""
    found: dict[str, dict[str, Any]] = {}
    response_format = request.response_format
    if response_format is not None and response_format.type != "text":
        found["response_format"] = _of_format(request)
    if request.structured_outputs is not None:
        own = request.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        found["structured_outputs"] = own
    guided: dict[str, Any] = {
        "json": request.guided_json,
        "regex": request.guided_regex,
        "choice": request.guided_choice,
        "grammar": request.guided_grammar,
        "whitespace_pattern": request.guided_whitespace_pattern,
    }
    guided = {name: value for name, value in guided.items() if value is not None}
    if guided:
        found["guided_" + next(iter(guided))] = guided
    if not found:
        return None
    if len(found) > 1:
        raise bad_request(
            " and ".join(found), "one of them", "leave the others out", list(found)[-1]
        )
    ((name, options),) = found.items()
    if "json_object" in options and options["json_object"] is False:
        del options["json_object"]
    if not options:
        raise bad_request(f"{name} without a form", "json, regex, choice, …", "add one", name)
    return StructuredOutputsParams(**options)


def _of_format(request: GenerationRequest) -> dict[str, Any]:
    wanted = request.response_format
    assert wanted is not None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type != "json_schema":
        raise bad_request(
            f"response_format of type {wanted.type!r}",
            "text, json_object or json_schema",
            "choose one of them",
            "response_format.type",
        )
    schema = wanted.json_schema.schema_ if wanted.json_schema else None
    if schema is None:
        raise ApiError(
            400,
            "found: response_format of type json_schema without json_schema.schema; needed: a"
            " schema; do: add it",
            param="response_format.json_schema",
        )
    return {"json": schema}
