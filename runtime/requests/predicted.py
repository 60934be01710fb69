"""The forms in which callers pass what they predict of an output: text, token ids, and OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specc.errors import RequestError
from specc.runtime.drafters.host_drafts import hosts_of
from specc.runtime.requests.prompt_forms import token_ids_of

if TYPE_CHECKING:
    from specc.runtime.engine import Engine

_NEEDED = 'text, token ids, or {"type": "content", "content": text or a list of text parts}'
# bytes of a text for each token that an engine has room for: a longer one is not tokenized
_BYTES_PER_TOKEN = 64


def takes_predictions(engine: Engine) -> bool:
    """Whether an engine has steps to which the host proposes."""
    return bool(hosts_of(engine.plans.values()))


def predicted_ids(engine: Engine, prediction: Any) -> list[int]:
    """Token ids of what a caller predicts of an output of an engine.

    Raises:
        RequestError: it has another form, or is longer than any output; there is no tokenizer; the
            engine has no steps for it.
    """
    if not takes_predictions(engine):
        raise RequestError(
            f"prediction, and an engine of the plans {', '.join(engine.plans)}",
            "a plan whose steps take what the host proposes",
            "compile it with --draft suffix, beside another draft with --combine best",
        )
    content = _content(prediction)
    if isinstance(content, str):
        if engine.tokenizer is None:
            raise RequestError(
                "prediction that is text",
                "token ids: this engine has no tokenizer",
                "pass token ids",
            )
        # a lone surrogate is in no output
        data = content.encode("utf-8", "replace")
        _check_bytes(data, engine.max_seq_len)
        # without the lock of the interpreter
        (encoding,) = engine.tokenizer.encode_batch_fast([data.decode()], add_special_tokens=False)
        content = encoding.ids
    _check_ids(content, engine.max_seq_len, engine.vocab_size)
    return content


def each_prediction(given: Any, count: int) -> list[Any]:
    """Of each prompt of a call: one for all, or one, or None, for each.

    Raises:
        RequestError: as many as there are not prompts.
    """
    is_list = isinstance(given, (list, tuple))
    if not is_list or not given or isinstance(given[0], int):
        return [given] * count
    if len(given) != count:
        raise RequestError(
            f"{count} prompts and {len(given)} predictions",
            "one prediction for all prompts, or one, or None, for each",
            "pass lists of equal length",
        )
    return list(given)


def _content(prediction: Any) -> str | list[int]:
    """Text or token ids of a prediction; raises RequestError: it is something else."""
    if isinstance(prediction, Mapping):
        kind, content = prediction.get("type"), prediction.get("content")
        if kind != "content" or content is None:
            raise RequestError(f"prediction of type {kind!r:.40}", _NEEDED, "correct it")
        if isinstance(content, str):
            return content
        parts = content if isinstance(content, (list, tuple)) else [None]
        return "".join(_text_of(part) for part in parts)
    if isinstance(prediction, str):
        return prediction
    try:
        return token_ids_of(0, prediction)
    except RequestError as error:
        found = f"prediction of type {type(prediction).__name__}"
        raise RequestError(found, _NEEDED, "correct it") from error


def _check_bytes(data: bytes, max_seq_len: int) -> None:
    """Raises RequestError: a text that no output can have, before it is tokenized."""
    if len(data) > _BYTES_PER_TOKEN * max_seq_len:
        raise _too_long(f"{len(data)} bytes", max_seq_len)


def _check_ids(token_ids: Sequence[int], max_seq_len: int, vocab_size: int) -> None:
    """Raises RequestError: more tokens than an output can have, or one that there is not."""
    if len(token_ids) > max_seq_len:
        raise _too_long(f"{len(token_ids)} tokens", max_seq_len)
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(
            f"prediction that holds token id {wrong}",
            f"0 … {vocab_size - 1}",
            "tokenize with the engine's own tokenizer",
        )


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or part.get("type", "text") != "text":
        raise RequestError("prediction with a part that is no text", _NEEDED, "correct it")
    return text


def _too_long(found: str, max_seq_len: int) -> RequestError:
    return RequestError(
        f"prediction of {found}",
        f"at most {max_seq_len} tokens: no output of this engine is longer",
        "pass the part that the output is likely to have",
    )
