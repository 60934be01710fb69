"""Options of sampling that requests to llama.cpp and to Ollama share, by OpenAI's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import Field

from specc.server.errors import ApiError, bad_request
from specc.server.fields import Fields, Int

# options that other servers have and this one has not → values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "penalize_newline": (False,),
}
# of these, none has an effect on an output by itself
NO_EFFECT = frozenset(("mirostat_tau", "mirostat_eta", "repeat_last_n"))


class SamplingOptions(Fields):
    """What both have, by one name."""

    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int | None = None
    stop: Any = None


Count = Annotated[Int, Field(ge=-1)]


def known_options(
    given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], no_effect: Collection[str]
) -> dict[str, Any]:
    """Leave out what changes nothing here.

    Raises:
        ApiError: an option that would change the output, and that this server has not got.
    """
    if given.get("repeat_penalty") not in (None, 1) and given.get("repeat_last_n") != -1:
        raise bad_request(
            f"repeat_penalty={given['repeat_penalty']} of the last tokens alone",
            "repeat_last_n=-1: here a penalty holds for all of them",
            "pass it, or leave repeat_penalty out", "repeat_penalty",
        )  # fmt: skip
    known = {}
    for name, value in given.items():
        if name in neutral:
            if value is not None and not any(_same(value, other) for other in neutral[name]):
                raise ApiError(
                    400,
                    f"Unsupported parameter: {name!r}. Please leave it out.",
                    param=name,
                    code="unsupported_parameter",
                )
        elif name not in no_effect:
            known[name] = value
    return known


def sampling_fields(options: SamplingOptions, num_tokens: int | None) -> dict[str, Any]:
    """Fields of a request to OpenAI's API.

    Args:
        num_tokens: that are wanted; None and -1 are as many as fit.
    Raises:
        ApiError: none is wanted.
    """
    if num_tokens == 0:
        raise bad_request("no tokens wanted", "1 or more, or -1", "ask for some")
    return {
        "max_tokens": -1 if num_tokens is None else num_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": options.seed,
        "stop": options.stop,
    }


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)
