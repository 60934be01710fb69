"""Options of sampling that requests to llama.cpp and to Ollama share, by OpenAI's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import Field

from specc.server.errors import bad_request
from specc.server.fields import (
    AnyFields,
    Fields,
    Int,
    UnknownFields,
    known_fields,
    parse_fields,
)

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


def read_options(
    kind: type[AnyFields],
    given: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
    no_effect: Collection[str],
    unknown: UnknownFields,
) -> AnyFields:
    """Of another server's request, or of a part of it, what has a meaning here.

    Args:
        neutral, no_effect: see `known_fields`.
    Raises:
        ApiError: an option that would change the output, and that this server has not got.
    """
    if given.get("repeat_penalty") not in (None, 1) and given.get("repeat_last_n") != -1:
        raise bad_request(
            f"repeat_penalty={given['repeat_penalty']} of the last tokens alone",
            "repeat_last_n=-1: here a penalty holds for all of them",
            "pass it, or leave repeat_penalty out", "repeat_penalty",
        )  # fmt: skip
    return parse_fields(kind, known_fields(given, neutral, no_effect), unknown)


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
