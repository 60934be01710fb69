"""`LoRARequest`, as vLLM's users name the adapter of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specc.errors import RequestError
from specc.vllm.answers import Ignored, answers_names

# the number of no adapter
NO_ADAPTER = -1
_OF_COMPILED = Ignored("an engine has the adapters that it was compiled with", (None, "", False, 0))


@answers_names(
    {
        "lora_path": _OF_COMPILED,
        "lora_local_path": _OF_COMPILED,
        "base_model_name": Ignored(),
        "tensorizer_config_dict": _OF_COMPILED,
        "load_inplace": _OF_COMPILED,
    }
)
@dataclass(frozen=True)
class LoRARequest:
    """`LLM.generate(…, lora_request=LoRARequest("sql"))`: the adapter of that name.

    Args:
        lora_name: as `specc compile --lora NAME=DIR` has called it.
        lora_int_id: vLLM's number of it; the name alone counts here.
    """

    lora_name: str
    lora_int_id: int = 0


def adapter_name(given: Any) -> str | None:
    """The name that a call means: a `LoRARequest`, specc's or vLLM's own, or a name; None is none.

    Raises:
        RequestError: it is none of these.
    """
    name = getattr(given, "lora_name", given)
    if name is None or (isinstance(name, str) and name):
        return name
    raise RequestError(
        f"lora_request of type {type(given).__name__}",
        "a LoRARequest, the name of an adapter, or None",
        'pass LoRARequest("NAME"), or the name',
    )
