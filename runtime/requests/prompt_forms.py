"""The forms in which callers pass prompts: text, token ids of any kind, and dicts as vLLM's."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from specc.errors import RequestError

# text, token ids (a list, or an array or tensor of one dimension), or {"prompt": text},
# {"prompt_token_ids": token ids}
Prompt = str | Sequence[int] | Mapping[str, Any] | Any

_NEEDED = "text, a list of token ids, or a dict with prompt or prompt_token_ids"
# keys of vLLM's prompts that no engine of specc reads → what to do
_REFUSED = {
    "multi_modal_data": "pass text or token ids: engines read nothing else",
    "mm_processor_kwargs": "pass text or token ids: engines read nothing else",
    "multi_modal_uuids": "pass text or token ids: engines read nothing else",
    "prompt_embeds": "pass prompt_token_ids: drafts and targets have embeddings of their own",
    "encoder_prompt": "pass prompt: engines have no encoder",
    "decoder_prompt": "pass prompt: engines have no encoder",
    "cache_salt": "load the engine with shares_prefixes=False to keep prompts apart",
    "token_type_ids": "leave it out: engines read token ids only",
}


def split_prompts(prompts: Any) -> list[Any]:
    """One prompt or many; a flat list or array of integers is one prompt, each row of a matrix one.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts]
    if (dims := _dimensions(prompts)) is not None:
        if dims not in (1, 2):
            raise RequestError(
                f"prompts of {dims} dimensions",
                "an array of one dimension, which is one prompt, or of two, a prompt a row",
                "pass one of these, or a list of arrays",
            )
        return [prompts] if dims == 1 else list(prompts)
    try:
        items = list(prompts)
    except TypeError as error:
        raise RequestError(
            f"prompts of type {type(prompts).__name__}", _NEEDED, "pass one, or a list of them"
        ) from error
    return [items] if items and _is_token_id(items[0]) else items


def content_of(index: int, prompt: Any) -> Any:
    """What a prompt holds, text or token ids.

    Raises:
        RequestError: a dict without either, or with what no engine reads.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    for name, do in _REFUSED.items():
        if prompt.get(name) is not None:
            raise RequestError(f"prompt {index} with {name}", "text or token ids", do)
    for name in ("prompt_token_ids", "prompt"):
        if prompt.get(name) is not None:
            return prompt[name]
    keys = ", ".join(map(str, prompt)) or "no keys"
    raise RequestError(f"prompt {index}, a dict with {keys[:80]}", _NEEDED, "pass one of these")


def utf8_of(index: int, text: str) -> bytes:
    """The bytes of a text.

    Raises:
        RequestError: it has none.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"prompt {index} holds a lone surrogate ({error.reason})",
            "text that can be written as UTF-8",
            "decode the text with the encoding that it has",
        ) from error


def token_ids_of(index: int, content: Any) -> list[int]:
    """Token ids as integers of Python.

    Raises:
        RequestError: it is something else.
    """
    dims = _dimensions(content)
    kind = f"type {type(content).__name__}"
    if dims is not None and dims != 1:
        raise RequestError(
            f"prompt {index} of {kind} with {dims} dimensions",
            "token ids in one dimension",
            "pass a row of it",
        )
    values = content.tolist() if dims == 1 else content
    try:
        if isinstance(values, (str, bytes, Mapping)):
            raise TypeError
        values = list(values)
        token_ids = [operator.index(value) for value in values]
        if any(isinstance(value, bool) for value in values):
            raise TypeError
    except TypeError as error:
        dtype = f" and dtype {content.dtype}" if dims == 1 else ""
        raise RequestError(
            f"prompt {index} of {kind}{dtype}", _NEEDED, "pass one of these"
        ) from error
    return token_ids


def _dimensions(value: Any) -> int | None:
    """Of an array or tensor of whatever library; None for anything else."""
    is_array = all(hasattr(value, name) for name in ("ndim", "dtype", "tolist"))
    # numbers of NumPy have all of these, too
    return int(value.ndim) if is_array and not isinstance(value, numbers.Number) else None


def _is_token_id(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, numbers.Integral) or _dimensions(value) == 0
