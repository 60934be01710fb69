"""llama.cpp's own API: /completion and /props; its other paths are OpenAI's, or not built.

Options that would change an output, and that are not built, are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from specc.sampling.params import MAX_LOGPROBS
from specc.server.endpoints import Endpoints, blaming
from specc.server.errors import bad_request
from specc.server.native_apis.llama_answer import LlamaAnswer
from specc.server.native_apis.options import (
    NEUTRAL,
    NO_EFFECT,
    Count,
    SamplingOptions,
    read_options,
    sampling_fields,
)
from specc.server.prompts import Completion
from specc.server.protocol import CompletionRequest, Prompts, parse

_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "dynatemp_range": (0,), "n_indent": (0,), "n_cmpl": (1,), "dry_multiplier": (0,),
    "xtc_probability": (0,), "top_n_sigma": (-1,), "min_keep": (0,), "t_max_predict_ms": (0,),
    "samplers": (), "response_fields": ([],), "lora": ([],), "timings_per_token": (False,),
    "return_progress": (False,), "post_sampling_probs": (False,), "t_max_prompt_ms": (-1,),
    "multimodal_data": ([],),
}  # fmt: skip
_NO_EFFECT = NO_EFFECT | {
    "dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "xtc_threshold", "n_keep", "n_discard", "n_cache_reuse", "id_slot",
    "cache_prompt", "sse_ping_interval",
}  # fmt: skip


class LlamaRequest(SamplingOptions):
    """Of /completion."""

    model: str | None = None
    prompt: Prompts
    n_predict: Count | None = None
    stream: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Any = None
    n_probs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    grammar: str | None = None
    json_schema: Any = None
    return_tokens: bool | None = None
    cache_salt: str | None = None


def props(endpoints: Endpoints, model: str, chat_template: str | None) -> dict[str, Any]:
    """The body of /props."""
    engine = endpoints.service.engine
    return {
        "default_generation_settings": {"id": 0, "n_ctx": engine.max_seq_len},
        "total_slots": engine.cache.shape.max_num_seqs,
        "model_alias": model,
        "model_path": model,
        "chat_template": chat_template or "",
        "modalities": {"vision": False, "audio": False},
    }


class LlamaCompletion:
    """The handler of /completion."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def __call__(self, request: Request) -> Response:
        """Raises what handlers of `Endpoints` do."""

        def read(body: bytes) -> tuple[LlamaRequest, Completion, str]:
            given = self._endpoints.parse_body(body)
            unknown = self._endpoints.unknown
            wanted = read_options(LlamaRequest, given, _NEUTRAL, _NO_EFFECT, unknown)
            found = self._endpoints.read_completion(parse(CompletionRequest, _fields(wanted)))
            if len(found.token_ids) != 1:
                raise bad_request(
                    f"{len(found.token_ids)} prompts", "one", "send a request for each", "prompt"
                )
            wanted.prompt = wanted.json_schema = None
            return wanted, found, self._endpoints.prompts.text(found.token_ids[0])

        with blaming("prompt"):
            wanted, found, prompt = await self._endpoints.in_thread(request, read)
            options = self._endpoints.options(found.wanted, found.wanted.logprobs)
            model = self._endpoints.model_of(found.params)
            answer = LlamaAnswer(
                model, prompt, bool(wanted.return_tokens), self._endpoints.tokens, options
            )
            return await self._endpoints.answer_completion(request, found, answer)


def _fields(wanted: LlamaRequest) -> dict[str, Any]:
    """Of a request to OpenAI's API."""
    form = {"grammar": wanted.grammar or None, "json": wanted.json_schema}
    form = {name: value for name, value in form.items() if value is not None}
    return sampling_fields(wanted, wanted.n_predict) | {
        "model": wanted.model,
        "prompt": wanted.prompt,
        "stream": wanted.stream,
        "ignore_eos": wanted.ignore_eos,
        "logit_bias": _bias(wanted.logit_bias),
        "logprobs": wanted.n_probs or None,
        "structured_outputs": form or None,
        "return_spec_metrics": True,
        "cache_salt": wanted.cache_salt,
    }


def _bias(given: Any) -> Any:
    """Token id → number; of pairs, as llama.cpp has them, too.

    Raises:
        ApiError: something else: a text for a token, or false for its number.
    """
    if not isinstance(given, list):
        return given
    pairs = [pair for pair in given if isinstance(pair, list) and len(pair) == 2]
    are_numbers = all(type(i) is int and type(bias) in (int, float) for i, bias in pairs)
    if len(pairs) != len(given) or not are_numbers:
        raise bad_request(
            "logit_bias of another form", "pairs of a token id and a number from -100 to 100",
            "correct it", "logit_bias",
        )  # fmt: skip
    return {str(token): bias for token, bias in pairs}
