"""Tokens that end an output, by a GGUF file's own fields, as llama.cpp knows them.

There are several: the end of a sequence (eos), of a turn (eot), of a message that calls a tool
(eom), those that begin another file or repository in code, and tokens that no field names, which
are known by their text.
Source: llama.cpp, src/llama-vocab.cpp, `special_eog_ids`, as `llama_vocab_is_eog` tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PREFIX = "tokenizer.ggml."
_CONTROL = 3
_BY_TEXT = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
        "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]",
        "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
        "<｜end▁of▁sentence｜>", "[e~[",
    }
)  # fmt: skip
# fields, and the texts that one token is known by where a file does not name it
_FILL = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# what ends an output only where none of these is an end, too: where a message ends between two
# others, and where `</s>` is text
_UNLESS = (
    ("<|end|>", ({"<|return|>", "<|call|>"}, {"<|return|>", "<|calls|>"}, {"<|call|>", "<|flush|>"},
                 {"<|calls|>", "<|flush|>"})),
    ("</s>", ({"<|tool_response>"}, {"<|plamo:eos|>"})),
)  # fmt: skip
# eos where the file names none, by the kind of its tokenizer
_USUAL_EOS = {"llama": 2, "gpt2": 11}


def end_token_ids(fields: Mapping[str, Any]) -> list[int]:
    """Ids of all tokens that end an output: eos first, then the others in order.

    Args:
        fields: of the file, lists included; without tokens, nothing ends an output.
    """
    tokens = _tokens(fields)
    numbers = {token: number for number, token in enumerate(tokens)}
    eos = _eos(fields, tokens)
    found = {number for token, number in numbers.items() if token in _BY_TEXT}
    found |= {number for name in ("eot", "eom") for number in _named(fields, name, tokens)}
    for name, texts in _FILL.items():
        known = [numbers[text] for text in texts if text in numbers]
        found |= set(_named(fields, name, tokens) or known[:1])
    found |= set(eos)
    texts_found = {tokens[number] for number in found}
    for text, unless in _UNLESS:
        if any(others <= texts_found for others in unless):
            found.discard(numbers.get(text, -1))
    first = [number for number in eos if number in found]
    return [*first, *sorted(found - set(first))]


def control_token_ids(fields: Mapping[str, Any]) -> set[int]:
    """Ids of the ends that are control tokens for their text, whatever the file calls them."""
    tokens = _tokens(fields)
    return {number for number in end_token_ids(fields) if tokens[number] in _BY_TEXT}


def _tokens(fields: Mapping[str, Any]) -> list[str]:
    """The tokens; none of a file whose field is no list, which is refused with its tokenizer."""
    found = fields.get(f"{_PREFIX}tokens")
    return found if isinstance(found, list) else []


def _eos(fields: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """The end of a sequence, of the file or as usual for its kind of tokenizer; at most one."""
    if named := _named(fields, "eos", tokens):
        return named
    usual = _USUAL_EOS.get(str(fields.get(f"{_PREFIX}model")), -1)
    types = fields.get(f"{_PREFIX}token_type")
    # llama.cpp takes the number, whatever it is; a letter of somebody's alphabet ends nothing
    is_control = isinstance(types, list) and 0 <= usual < len(types) and types[usual] == _CONTROL
    return [usual] if is_control else []


def _named(fields: Mapping[str, Any], name: str, tokens: Sequence[str]) -> list[int]:
    """What a field of the file names; a number that no token has is passed over."""
    number = fields.get(f"{_PREFIX}{name}_token_id")
    return [number] if type(number) is int and 0 <= number < len(tokens) else []
