"""From the tensors of a request in the Triton Inference Server to a prompt and its parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specc.errors import RequestError
from specc.sampling.generation_config import SamplingDefaults
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.system.json_file import parse_json
from specc.triton.tensors import (
    CUMULATIVE_LOGPROB,
    FINISH_REASON,
    INPUTS,
    LOGPROBS,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    OUTPUT_IDS,
    OUTPUTS,
    PERF_METRICS,
    PROMPT_LOGPROBS,
    TEXT,
    TritonTensor,
)

_INPUTS = {tensor.name: tensor for tensor in INPUTS}
_ALL_OUTPUTS = frozenset(tensor.name for tensor in OUTPUTS)
# input → the field of SamplingParams, where its name is another one
_FIELDS = {"stop_words": "stop"}
_SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "rule", "logprobs", "prompt_logprobs",
    "lora", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculative",
    "stop_token_ids", "min_tokens", "allowed_token_ids", "bad_words", "stop_words",
)  # fmt: skip
# type of a guide → how StructuredOutputsParams calls it
_GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
# input that asks for outputs which are not there otherwise
_FLAGS = {
    "return_num_input_tokens": (NUM_INPUT_TOKENS,),
    "return_num_output_tokens": (NUM_OUTPUT_TOKENS,),
    "return_output_ids": (OUTPUT_IDS,),
    "return_perf_metrics": PERF_METRICS,
}
_DO = "correct the request"
# words that may end an output, their characters together, and ids: looked for at every token, in
# the engine's thread
MAX_STOP_WORDS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS = 16, 1024, 256
_TYPES: dict[str, tuple[type, ...]] = {
    "STRING": (str,),
    "BOOL": (bool,),
    "FP32": (int, float),
    "INT32": (int,),
    "UINT64": (int,),
}


@dataclass(frozen=True)
class TritonRequest:
    """A request, read and checked as far as it can be without its engine.

    Args:
        prompt: text, or token ids.
        is_streamed: a response for every update; else one for the whole request.
        echoed: text that goes before the output.
        outputs: names of the tensors to send.
        priority: lower ones are served first.
        timeout_s: seconds after which the request ends with what it has.
        prediction: text of the output, as far as it is known.
        cache_salt: of those with which the request shares rows and outputs.
    """

    prompt: str | list[int]
    params: SamplingParams
    is_streamed: bool
    echoed: str
    outputs: Collection[str]
    priority: int
    timeout_s: float | None
    prediction: str | None
    cache_salt: str | None


def read_request(
    tensors: Mapping[str, Any],
    parameters: str,
    requested: Collection[str],
    defaults: SamplingDefaults,
) -> TritonRequest:
    """Read a request.

    Args:
        tensors: input name → numpy array, of whatever shape.
        parameters: JSON object; its values count as inputs of these names. HTTP's `generate` puts
            there what a body holds under `parameters`, and keys that it does not know.
        requested: names of outputs; all of them where the client names none.
        defaults: options of sampling that the client leaves out.
    Raises:
        RequestError: an input has a wrong name, type, number of values, or value.
    """
    given = {name: _from_array(name, array) for name, array in tensors.items()}
    for name, value in _json_object(parameters).items():
        # an id, which Triton passes on; and its own parameters
        if name == "id" or name.startswith("triton_"):
            continue
        if name in given:
            raise RequestError(f"{name} as an input and as a parameter", "one of the two", _DO)
        given[name] = _from_json(name, value)
    prompt = _prompt(given)
    num_ids = len(given.get("stop_token_ids", ()))
    if num_ids > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"{num_ids} stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}", _DO)
    options = {_FIELDS.get(name, name): given[name] for name in _SAMPLING if name in given}
    options["stop"] = _stop(options.get("stop", ()))
    options["bad_words"] = [text for text in options.get("bad_words", ()) if text] or None
    params = defaults.params(
        **options, logit_bias=_bias(given), structured_outputs=_structured(given)
    )
    echoed = ""
    if not given.get("exclude_input_in_output", True):
        if not isinstance(prompt, str):
            raise RequestError(
                "exclude_input_in_output false with input_ids",
                "text_input: its text is what is repeated",
                "pass text_input, or leave exclude_input_in_output out",
            )
        echoed = prompt
    return TritonRequest(
        prompt,
        params,
        is_streamed=given.get("stream", False),
        echoed=echoed,
        outputs=_outputs(given, frozenset(requested)),
        priority=given.get("priority", 0),
        timeout_s=_timeout(given.get("timeout")),
        prediction=given.get("prediction"),
        cache_salt=given.get("cache_salt"),
    )


def _stop(words: Collection[str]) -> list[str]:
    stop = [word for word in words if word]
    length = sum(map(len, stop))
    if len(stop) > MAX_STOP_WORDS or length > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"{len(stop)} stop_words of {length} characters together",
            f"at most {MAX_STOP_WORDS}, of {MAX_STOP_CHARACTERS}",
            _DO,
        )
    return stop


def _prompt(given: Mapping[str, Any]) -> str | list[int]:
    found = [name for name in ("text_input", "input_ids") if name in given]
    if len(found) != 1:
        raise RequestError(
            f"{' and '.join(found) or 'neither text_input nor input_ids'}",
            "one of text_input and input_ids",
            _DO,
        )
    return given[found[0]]


def _bias(given: Mapping[str, Any]) -> dict[int, float] | None:
    ids, values = (given.get(f"logit_bias_{end}", []) for end in ("ids", "values"))
    if len(ids) != len(values) or len(set(ids)) < len(ids):
        raise RequestError(
            f"logit_bias_ids of {len(ids)} values, {len(set(ids))} of them different, and"
            f" logit_bias_values of {len(values)}",
            "as many of both, and each token id once",
            _DO,
        )
    return dict(zip(ids, values, strict=True)) or None


def _structured(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind, guide = (given.get(f"guided_decoding_guide{end}") for end in ("_type", ""))
    if kind is None and guide is None:
        return None
    if kind == "json" and not guide:
        return StructuredOutputsParams(json_object=True)
    if kind not in _GUIDES or guide is None:
        raise RequestError(
            f"guided_decoding_guide_type {kind!r} {'with' if guide else 'without'} a guide",
            f"{', '.join(_GUIDES)}, each with guided_decoding_guide; or json, without one",
            _DO,
        )
    return StructuredOutputsParams(**{_GUIDES[kind]: guide})


def _outputs(given: Mapping[str, Any], requested: frozenset[str]) -> frozenset[str]:
    if requested and requested != _ALL_OUTPUTS:
        return requested
    chosen = {TEXT.name, FINISH_REASON.name}
    for flag, tensors in _FLAGS.items():
        if given.get(flag, False):
            chosen |= {tensor.name for tensor in tensors}
    if "logprobs" in given:
        chosen |= {LOGPROBS.name, CUMULATIVE_LOGPROB.name}
    if "prompt_logprobs" in given:
        chosen.add(PROMPT_LOGPROBS.name)
    return frozenset(chosen)


def _timeout(value: float | None) -> float | None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise RequestError(f"timeout {value:g}", "seconds, more than 0", _DO)
    return value


def _from_array(name: str, array: Any) -> Any:
    tensor = _known(name)
    values = array.reshape(-1).tolist()
    if tensor.kind == "STRING":
        values = [_text(name, value) for value in values]
    if tensor.holds_many:
        return values
    if len(values) != 1:
        raise RequestError(f"{name} of shape {list(array.shape)}", "one value", _DO)
    return values[0]


def _from_json(name: str, value: Any) -> Any:
    tensor = _known(name)
    is_flag = isinstance(value, bool)
    if not isinstance(value, _TYPES[tensor.kind]) or is_flag != (tensor.kind == "BOOL"):
        raise RequestError(
            f"parameter {name} of type {type(value).__name__}", f"type {tensor.kind}", _DO
        )
    return [value] if tensor.holds_many else value


def _known(name: str) -> TritonTensor:
    if name not in _INPUTS:
        shown = name if len(name) <= 60 else name[:59] + "…"
        raise RequestError(f"input or parameter {shown!r}", f"some of {', '.join(_INPUTS)}", _DO)
    return _INPUTS[name]


def _text(name: str, value: Any) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} holds bytes that are not UTF-8 ({error.reason} at {error.start})",
            "UTF-8",
            "encode the text as UTF-8",
        ) from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        return parse_json(text) if text else {}
    except ValueError as error:
        raise RequestError(
            f"parameters that Triton hands on as no JSON ({error})",
            "parameters without quotes and backslashes",
            "pass them as inputs",
        ) from error
