"""The arguments of `LLM.generate`, under whatever name vLLM's users pass them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specc.errors import RequestError
from specc.lora.request import adapter_name
from specc.runtime.requests.predicted import each_prediction
from specc.runtime.requests.prompt_forms import Prompt, split_prompts
from specc.sampling.params import SamplingParams
from specc.vllm.answers import answer_names
from specc.vllm.calls import ARGUMENTS

_KNOWN = ("params", "prompt_token_ids", "use_tqdm", "priority", "lora_request", "prediction")


@dataclass(frozen=True)
class Call:
    """What is to be generated.

    Args:
        prompts: one or more, in any form.
        priorities: of each; lower is served first.
        predictions: of each, or None.
        use_tqdm: True, False, or what makes a bar.
    """

    prompts: list[Any]
    params: list[SamplingParams]
    priorities: list[int]
    predictions: list[Any]
    use_tqdm: Any

    @contextlib.contextmanager
    def bar(self, total: int) -> Iterator[Callable[[int, int, int], object] | None]:
        """A bar, if one is wanted; yields what moves it on, as `progress` is called.

        Raises:
            RequestError: tqdm is absent.
        """
        if not self.use_tqdm or not total:
            yield None
            return
        make = _tqdm() if self.use_tqdm is True else self.use_tqdm
        with contextlib.closing(make(total=total, desc="prompts", unit="prompt")) as bar:
            seen = 0

            def report(finished: int, total: int, num_tokens: int) -> None:
                nonlocal seen
                bar.update(finished - seen)
                seen = finished

            yield report


def read_call(
    prompts: Any,
    params: Any,
    options: Mapping[str, Any],
    default: SamplingParams,
    is_chat: bool = False,
) -> Call:
    """Check the arguments of a call, but for the prompts themselves.

    Args:
        prompts: in any form; None where `options` have them.
        params: for all prompts, or one for each; None where `options` have them.
        options: of `LLM.generate`.
        default: of prompts, where neither says anything.
        is_chat: its messages come later; no prompts yet.
    Raises:
        RequestError: an option that there is not, no prompts, or numbers that do not fit.
    """
    known = answer_names(options, _KNOWN, ARGUMENTS, RequestError)
    other = known.get("params")
    if params is not None and other is not None:
        raise RequestError(
            "sampling_params and params", "one of the two, which are the same", "leave params out"
        )
    params = other if params is None else params
    prompt_list = [] if is_chat else _prompts(prompts, known.get("prompt_token_ids"))
    count = len(prompt_list)
    if params is None or isinstance(params, SamplingParams):
        params_list = [params or default] * count
    elif isinstance(params, (list, tuple)) and all(isinstance(p, SamplingParams) for p in params):
        params_list = list(params)
    else:
        raise RequestError(
            f"sampling_params of type {type(params).__name__}",
            "SamplingParams, or a list of them",
            "pass SamplingParams(max_tokens=…, temperature=…)",
        )
    if len(params_list) != count and not is_chat:
        raise RequestError(
            f"{count} prompts and {len(params_list)} SamplingParams",
            "one SamplingParams for all prompts, or one for each",
            "pass lists of equal length",
        )
    use_tqdm = known.get("use_tqdm", False)
    if not isinstance(use_tqdm, bool) and use_tqdm is not None and not callable(use_tqdm):
        raise RequestError(f"use_tqdm={use_tqdm!r}", "True, False, or tqdm itself", "correct it")
    params_list = _with_adapters(known.get("lora_request"), params_list)
    priorities = _priorities(known.get("priority"), count)
    predictions = [] if is_chat else each_prediction(known.get("prediction"), count)
    return Call(prompt_list, params_list, priorities, predictions, use_tqdm)


def _prompts(prompts: Any, token_ids: Any) -> list[Prompt]:
    if prompts is None and token_ids is None:
        raise RequestError(
            "neither prompts nor prompt_token_ids", "one prompt or a list", "pass prompts"
        )
    if token_ids is None:
        return split_prompts(prompts)
    lists = split_prompts(token_ids)
    if any(isinstance(item, (str, Mapping)) for item in lists):
        raise RequestError("prompt_token_ids of text", "token ids", "pass it as prompts")
    texts = [None] * len(lists) if prompts is None else split_prompts(prompts)
    if len(texts) != len(lists) or not all(t is None or isinstance(t, str) for t in texts):
        raise RequestError(
            f"{len(texts)} prompts beside {len(lists)} prompt_token_ids",
            "prompt_token_ids alone, or the text of each as prompts",
            "pass one of the two",
        )
    return [{"prompt": t, "prompt_token_ids": ids} for t, ids in zip(texts, lists, strict=True)]


def _with_adapters(given: Any, params: list[SamplingParams]) -> list[SamplingParams]:
    """With the adapters of a call: one for all prompts, or one, or None, for each."""
    is_each = isinstance(given, (list, tuple))
    if is_each and len(given) != len(params):
        raise RequestError(
            f"{len(params)} prompts and {len(given)} lora_request",
            "one for all prompts, or one for each",
            "pass lists of equal length",
        )
    requests = given if is_each else [given] * len(params)
    return [with_adapter(own, one) for own, one in zip(params, requests, strict=True)]


def with_adapter(params: SamplingParams, given: Any) -> SamplingParams:
    """Options with the adapter of a call's `lora_request`; None leaves them as they are.

    Raises:
        RequestError: it names none, or another one than the options.
    """
    name = adapter_name(given)
    if name is None or name == params.lora:
        return params
    if params.lora is not None:
        raise RequestError(
            f"lora_request {name!r} and lora={params.lora!r} of SamplingParams",
            "one adapter",
            "leave one out",
        )
    return replace(params, lora=name)


def _priorities(priority: Any, count: int) -> list[int]:
    priorities = [priority or 0] * count if priority is None or type(priority) is int else priority
    is_list = isinstance(priorities, (list, tuple)) and all(type(p) is int for p in priorities)
    if not is_list or len(priorities) != count:
        raise RequestError(
            f"priority={priority!r}, and {count} prompts",
            "an integer, or one for each prompt",
            "correct it",
        )
    return list(priorities)


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError as error:
        raise RequestError(
            "use_tqdm=True, and no package tqdm",
            "tqdm, which draws the bar",
            "pip install tqdm; or pass progress, a function that is called after every iteration",
        ) from error
    return tqdm


class Seeds:
    """Seeds in the order in which requests come.

    Args:
        seed: that all of them follow from; None leaves it to each request.
    """

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else random.Random(seed)

    def give(self, params: SamplingParams) -> SamplingParams:
        if self._random is None or params.seed is not None:
            return params
        return replace(params, seed=self._random.getrandbits(63))
