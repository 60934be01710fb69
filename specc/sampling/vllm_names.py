"""Options that users of vLLM and transformers pass by name, and what to do where specc has not
got them.

A name that would change what comes out is never ignored: it is refused, with the way to the same
here. Values that ask for what happens anyway are taken.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from specc.errors import RequestError

Params = TypeVar("Params")


class Unsupported(NamedTuple):
    """What is said about an option.

    Args:
        needed: what there is instead.
        do: what to do.
        idle: values that ask for nothing; the option is then dropped. `...` is any.
    """

    needed: str
    do: str
    idle: Collection[Any] = (None,)


def _renamed(name: str) -> Unsupported:
    return Unsupported(f"{name}, as it is called here", f"pass {name}", ())


def _no_beams(*idle: Any) -> Unsupported:
    return Unsupported(
        "greedy decoding or sampling: a beam search keeps other outputs than the target's own",
        "leave it out; n gives several outputs of one prompt",
        (None, *idle),
    )


_CONTROLS = (
    "use the controls that exist: penalties, temperature and filters, stop_token_ids, and"
    " structured_outputs for what an output must look like"
)
SAMPLING: Mapping[str, Unsupported] = {
    "best_of": Unsupported("n outputs, all of which come back", "pass n, and choose among them"),
    "use_beam_search": _no_beams(False),
    "beam_width": _no_beams(1),
    "num_beams": _no_beams(1),
    "length_penalty": _no_beams(1),
    "early_stopping": _no_beams(False),
    "logits_processors": Unsupported(
        "options that the engine itself applies: a processor would be Python between verification"
        " and acceptance, once for every node of every tree, and is no part of an engine",
        _CONTROLS,
        (None, [], ()),
    ),
    "detokenize": Unsupported("text and token ids, which both come", "leave it out", (None, True)),
    "truncate_prompt_tokens": Unsupported(
        "a prompt that fits", "cut the token ids of the prompt before you pass them"
    ),
    "guided_decoding": Unsupported(
        "structured_outputs",
        "pass structured_outputs=StructuredOutputsParams(json=…, regex=…, choice=…, grammar=…)",
    ),
    "spaces_between_special_tokens": Unsupported(
        "text as the tokenizer decodes it", "leave it out, or decode token_ids", (None, True)
    ),
    "output_kind": Unsupported(
        "whole outputs of generate, and new tokens of stream", "leave it out, or use stream"
    ),
    "flat_logprobs": Unsupported("a dict for each token", "leave it out", (None, False)),
    "skip_reading_prefix_cache": Unsupported(
        "what the engine was loaded with", "load it with shares_prefixes=False", (None, False)
    ),
    "extra_args": Unsupported("options of specc", "leave it out", (None, {})),
    "thinking_token_budget": Unsupported("max_tokens", "lower max_tokens"),
    "output_text_buffer_length": Unsupported("stop strings, which need no length", "leave it out"),
    "skip_clone": Unsupported(
        "options that are never changed", "leave it out", (None, True, False)
    ),
    "max_new_tokens": _renamed("max_tokens"),
    "max_length": Unsupported("max_tokens, which counts output tokens only", "pass max_tokens", ()),
    "min_length": Unsupported("an output's own length", "pass ignore_eos=True and max_tokens"),
    "num_return_sequences": _renamed("n"),
    "do_sample": Unsupported("temperature: 0 is greedy", "pass temperature", ()),
    "stop_strings": _renamed("stop"),
    "eos_token_id": _renamed("stop_token_ids"),
    "random_seed": _renamed("seed"),
    "speculate": _renamed("speculative"),
}


def answer_names(
    given: Mapping[str, Any],
    known: Collection[str],
    answers: Mapping[str, Unsupported],
    error: Callable[[str, str, str], Exception],
) -> dict[str, Any]:
    """The options that are known, without those that ask for nothing.

    Args:
        given: name → value.
        known: names that the asking class has got.
        answers: name → what is said about it.
        error: made of found, needed and do.
    Raises:
        Exception: what `error` makes of an option that there is not.
    """
    kept = {}
    for name, value in given.items():
        if name in known:
            kept[name] = value
            continue
        found = f"{name}={_shown(value)}"
        if name not in answers:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            do = f"pass {close[0]}?" if close else "leave it out"
            raise error(found, f"one of {', '.join(sorted(known))}", do)
        needed, do, idle = answers[name]
        if not any(other is ... or _is_same(value, other) for other in idle):
            raise error(found, needed, do)
    return kept


def answers_vllm_names(kind: type[Params]) -> type[Params]:
    """Decorator of a dataclass of a request's options: unknown names get an answer."""
    make: Callable[..., None] = kind.__init__
    known = {field.name for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]

    @functools.wraps(make)
    def __init__(self: Params, *args: Any, **options: Any) -> None:
        if options.keys() <= known:
            make(self, *args, **options)
        else:
            make(self, *args, **answer_names(options, known, SAMPLING, RequestError))

    kind.__init__ = __init__  # type: ignore[method-assign, assignment]
    return kind


def _is_same(value: Any, other: Any) -> bool:
    """Equal, where a flag is no number; arrays and the like are equal to nothing."""
    if isinstance(value, bool) != isinstance(other, bool):
        return False
    return value is other or (isinstance(value, type(other)) and bool(value == other))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
