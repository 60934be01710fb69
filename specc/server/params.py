"""From a request's fields to `SamplingParams`, one for each of its outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

from specc.errors import RequestError
from specc.sampling.generation_config import SamplingDefaults
from specc.sampling.params import MAX_LOGPROBS, SamplingParams
from specc.sampling.structured import KINDS, StructuredOutputsParams
from specc.server.config import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from specc.server.errors import ApiError, api_error_of, bad_request
from specc.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, ResponseFormat

# fields that mean the same in both
_SAME = (
    "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
    "rule", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "speculative", "prompt_logprobs",
    "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip
_COMPLETION_TOKENS = 16
# `max_tokens` of llama.cpp's clients: up to the end of the context
_NO_LIMIT = -1
_SEEDS = 1 << 63


def completion_params(request: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Raises ApiError or RequestError: a value that is out of range or cannot be served."""
    num_best, count = request.n or 1, num_outputs(request)
    if count < num_best or (count > num_best and request.stream):
        raise bad_request(
            f"best_of={count}, n={num_best}" + (", and a stream" if request.stream else ""),
            "best_of of n or more, and of n in a stream: all have to end before the best are known",
            "correct it", "best_of",
        )  # fmt: skip
    tokens = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    tokens = 1 if is_prompt_alone(request) else tokens
    params = _params(request, tokens, request.logprobs, defaults)
    if request.echo and request.logprobs is not None:
        most = max(request.logprobs, params.prompt_logprobs or 0)
        params = dataclasses.replace(params, prompt_logprobs=most)
    if count > num_best and params.logprobs is None:
        # the best are chosen by them
        params = dataclasses.replace(params, logprobs=0)
    return params


def num_outputs(request: GenerationRequest) -> int:
    """Of each prompt; `best_of` may be more than come back."""
    own = request.best_of if isinstance(request, CompletionRequest) else None
    return own or request.n or 1


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
    # the newer name wins, as with vLLM
    tokens = request.max_completion_tokens
    tokens = request.max_tokens if tokens is None else tokens
    tokens = max_seq_len if tokens is None else tokens
    top = request.top_logprobs
    if top and not request.logprobs:
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
    if (seed := request.seed) is not None:
        given["seed"] = _seed(seed)
    own = None if max_tokens == _NO_LIMIT else max_tokens
    limits = [count for count in (own, defaults.max_tokens) if count is not None]
    return defaults.params(
        max_tokens=min(limits, default=None),
        logprobs=logprobs,
        stop=_stop(request.stop),
        structured_outputs=_structured(request),
        **given,
    )


def _seed(seed: int) -> int | None:
    """As vLLM takes it: -1 is none, other negative ones are seeds like any."""
    if seed == -1:
        return None
    return seed % _SEEDS if -_SEEDS <= seed < 0 else seed


def _stop(stop: Any) -> list[str]:
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if isinstance(strings, list) and len(strings) > MAX_STOP_STRINGS:
        raise bad_request(
            f"{len(strings)} stop strings", f"at most {MAX_STOP_STRINGS}", "pass fewer", "stop"
        )
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise bad_request(
            "the field stop is neither", "a string or a list of strings", "correct it", "stop"
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


def structure_field(request: GenerationRequest) -> str | None:
    """The field that says which form outputs have, if one does."""
    found = _forms(request)
    return found[0][0] if found else None


def _structured(request: GenerationRequest) -> StructuredOutputsParams | None:
    """From all ways to ask for it: clients send one form by its old and by its new name.

    Raises:
        ApiError: they say different things, or nothing.
    """
    forms = _forms(request)
    if not forms:
        return None
    # option → the field that has it, and its value
    found: dict[str, tuple[str, Any]] = {}
    for field, options in forms:
        for name, value in options.items():
            other, known = found.setdefault(name, (field, value))
            if _plain(name, known) != _plain(name, value):
                raise _different(other, field)
    fields = list(dict.fromkeys(found[name][0] for name in found if name in KINDS))
    if len(fields) > 1:
        raise _different(*fields[:2])
    if not fields:
        field = forms[0][0]
        raise bad_request(f"{field} without a form", "json, regex, choice, …", "add one", field)
    try:
        return StructuredOutputsParams(**{name: value for name, (_, value) in found.items()})
    except RequestError as error:
        raise api_error_of(error, fields[0]) from error


def _forms(request: GenerationRequest) -> list[tuple[str, dict[str, Any]]]:
    """(field, options of `StructuredOutputsParams` that it has) of each field that is given."""
    forms = []
    if request.response_format is not None and request.response_format.type != "text":
        forms.append(("response_format", _of_format(request.response_format)))
    if request.structured_outputs is not None:
        own = request.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        if own.get("json_object") is False:
            del own["json_object"]
        forms.append(("structured_outputs", own))
    for name in ("json", "regex", "choice", "grammar", "whitespace_pattern"):
        value = getattr(request, f"guided_{name}")
        if value is not None:
            forms.append((f"guided_{name}", {name: value}))
    return forms


def has_form(request: GenerationRequest) -> bool:
    """Whether a request says which form its outputs have."""
    return any(name in KINDS for _, options in _forms(request) for name in options)


def structured_options(request: GenerationRequest) -> dict[str, Any]:
    """What a request says of JSON besides its form, by names of `StructuredOutputsParams`."""
    forms = [options for _, options in _forms(request)]
    return {k: v for options in forms for k, v in options.items() if k not in KINDS}


def _plain(name: str, value: Any) -> Any:
    """To be compared: a schema may be given as its text."""
    if name == "json" and isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _different(field: str, other: str) -> ApiError:
    return bad_request(
        f"{field} and {other} that say different things", "one of them, or both alike",
        f"leave {other} out", other,
    )  # fmt: skip


def _of_format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        schema = wanted.schema_
        return {"json_object": True} if schema is None else {"json": schema}
    if wanted.type != "json_schema":
        raise bad_request(
            f"response_format of type {wanted.type!r}",
            "text, json_object or json_schema",
            "choose one of them",
            "response_format.type",
        )
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(
            400,
            "Missing required parameter: 'response_format.json_schema.schema'. Please add it.",
            param="response_format.json_schema.schema",
            code="missing_required_parameter",
        )
    return {"json": wanted.json_schema.schema_}
