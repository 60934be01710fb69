"""The tokenizer that a GGUF file's own fields say, as a tokenizer.json.

    data = tokenizer_of(reader.fields, reader.location())

Four kinds are read (`tokenizer.ggml.model`): `gpt2`, pairs of bytes with the file's merges;
`llama`, SentencePiece's pairs by score; `gemma4`, pairs of characters with the file's merges; and
`t5`, SentencePiece's unigrams. How the first splits text before that is named by
`tokenizer.ggml.pre`, see `gguf_splits`; a name that is not known is refused: its tokens would be
others.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; llama.cpp, src/llama-vocab.cpp,
`llm_tokenizer_bpe`, `llm_tokenizer_spm`, `llm_tokenizer_ugm` and `llama_vocab::impl::load`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specc.errors import VocabMismatchError
from specc.passes.frontend.gguf_ends import control_token_ids
from specc.passes.frontend.gguf_splits import SPLITS, Split

_log = logging.getLogger("specc.gguf")
_PREFIX = "tokenizer.ggml."
# token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
# tokens that only a text's own characters make: found in texts as they are, or never
_WHOLE = (_UNKNOWN, _CONTROL, _BYTE)
# GPT-2's characters for bytes that UTF-8 never has
_NEVER_BYTES = frozenset(map(chr, (0xC0, 0xC1, *range(0xF5, 0x100))))
# of kinds, tokens that texts have around them and their numbers, where the file says nothing
_AROUND: Mapping[str, Mapping[str, bool]] = {
    "gpt2": {},
    "llama": {"bos": True},
    "gemma4": {"bos": True},
    "t5": {"eos": True},
}
_NUMBERS: Mapping[str, Mapping[str, int]] = {"llama": {"bos": 1, "eos": 2}, "t5": {"eos": 1}}
_USUAL_UNKNOWN = 2
# of the kind gpt2, names of `tokenizer.ggml.pre` whose pairs are of characters
_OF_CHARACTERS = ("gemma4", "sarvam-moe")
# who has special tokens after which texts lose their spaces, and those of its tokens that have not
_PHI3_AS_THEY_ARE = ("<unk>", "<s>", "<|endoftext|>")
_DO = "put the file in a directory with config.json and tokenizer.json of the model, and pass that"

_Build = Callable[[Mapping[str, Any], Sequence[str], Sequence[int], str], Tokenizer]


def tokenizer_of(fields: Mapping[str, Any], where: str) -> bytes:
    """Content of a tokenizer.json.

    Args:
        where: the file, for errors.
    Raises:
        VocabMismatchError: another kind of tokenizer, or fields that are missing or do not fit.
    """
    kind = str(fields.get(f"{_PREFIX}model"))
    if kind not in _BUILDERS:
        raise VocabMismatchError(
            f"{where} has a tokenizer of the kind {kind}",
            "gpt2 (pairs of bytes), llama (SentencePiece, pairs), gemma4 or t5 (SentencePiece,"
            " unigrams)",
            _DO,
        )
    tokens = _list(fields, "tokens", str, where)
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    types = _list(fields, "token_type", int, where) if f"{_PREFIX}token_type" in fields else []
    if types and len(types) != len(tokens):
        raise VocabMismatchError(
            f"{where} has {len(tokens)} tokens, and types of {len(types)}",
            "a type for each token",
            "download it again",
        )
    if len(set(tokens)) < len(tokens):
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise VocabMismatchError(f"{where} has the token {twice!r} twice", "each token once", _DO)
    if types or kind in ("gpt2", "gemma4"):
        control = control_token_ids(fields)
        given = types or [_NORMAL] * len(tokens)
        types = [_CONTROL if i in control else own for i, own in enumerate(given)]
    tokenizer = _BUILDERS[kind](fields, tokens, types, where)
    strips = _is_phi3(fields)
    added = [
        AddedToken(
            token,
            normalized=False,
            special=own in (_CONTROL, _UNKNOWN),
            rstrip=strips and token not in _PHI3_AS_THEY_ARE,
        )
        for token, own in zip(tokens, types, strict=True)
        if own in (_CONTROL, _UNKNOWN, _USER)
    ]
    # in this order, so that none of them gets another number
    tokenizer.add_tokens(added)
    _put_around(tokenizer, fields, tokens, kind, where)
    return tokenizer.to_str().encode()


def _split_of(fields: Mapping[str, Any], where: str) -> Split:
    name = fields.get(f"{_PREFIX}pre")
    if not name:
        _log.warning(
            "%s does not say how its tokenizer splits text (tokenizer.ggml.pre): it is split as"
            " llama.cpp does it then, which may not be the way that the model has learned; if"
            " output is bad, take a file that was converted since May 2024",
            where,
        )
        name = "default"
    if name not in SPLITS:
        raise VocabMismatchError(
            f"{where} splits text in the way {name} (tokenizer.ggml.pre)",
            "a way that llama.cpp has for decoders, such as llama-bpe, qwen2 or gpt-2",
            _DO,
        )
    return SPLITS[name]


def _by_bytes(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> Tokenizer:
    if fields.get(f"{_PREFIX}pre") in _OF_CHARACTERS:
        return _by_characters(fields, tokens, types, where)
    split = _split_of(fields, where)
    model = models.BPE(
        _numbers(tokens), _merges(fields, tokens, where), ignore_merges=split.takes_words
    )
    tokenizer = Tokenizer(model)
    if split.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(Regex(item), behavior="isolated") for item in split.patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_])
    # DeepSeek's vocabularies have these letters as tokens of users; as bytes, they are no text
    letters = [
        decoders.Replace(token, bytes_.pre_tokenize_str(token)[0][0])
        for token, own in zip(tokens, types, strict=True)
        if own == _USER and token in _NEVER_BYTES
    ]
    whole = decoders.ByteLevel()
    tokenizer.decoder = decoders.Sequence([*letters, whole]) if letters else whole
    return tokenizer


def _by_characters(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> Tokenizer:
    model = models.BPE(
        _numbers(tokens),
        _merges(fields, tokens, where),
        unk_token=_unknown(tokens, types),
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    tokenizer = Tokenizer(model)
    _write_spaces(tokenizer, has_prefix=False)
    return tokenizer


def _by_scores(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> Tokenizer:
    scores, numbers = _scores(fields, tokens, types, where), _numbers(tokens)
    model = models.BPE(
        numbers,
        _merges_of(numbers, scores, types),
        unk_token=_unknown(tokens, types),
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    tokenizer = Tokenizer(model)
    _write_spaces(tokenizer, has_prefix=fields.get(f"{_PREFIX}add_space_prefix", True))
    return tokenizer


def _by_unigrams(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> Tokenizer:
    scores = _scores(fields, tokens, types, where)
    unknown = fields.get(f"{_PREFIX}unknown_token_id", _USUAL_UNKNOWN)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise VocabMismatchError(
            f"{where} has {unknown} for the token of what it does not know",
            f"a number below {len(tokens)} as tokenizer.ggml.unknown_token_id",
            _DO,
        )
    model = models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown)
    tokenizer = Tokenizer(model)
    before: list[Any] = []
    if charsmap := fields.get(f"{_PREFIX}precompiled_charsmap"):
        try:
            before.append(normalizers.Precompiled(bytes(item & 255 for item in charsmap)))
        except Exception as error:  # of the library, which raises nothing narrower
            raise VocabMismatchError(
                f"{where} has a malformed tokenizer.ggml.precompiled_charsmap ({error})",
                "SentencePiece's table of characters",
                "download it again",
            ) from error
    has_prefix = fields.get(f"{_PREFIX}add_space_prefix", False)
    if fields.get(f"{_PREFIX}remove_extra_whitespaces", False):
        # with one space left before the first word, whatever add_space_prefix says
        at_ends = normalizers.Replace(Regex(r"\A +| +\z"), "")
        before += [at_ends, normalizers.Replace(Regex(" {2,}"), " ")]
        has_prefix = True
    _write_spaces(tokenizer, has_prefix, before)
    return tokenizer


_BUILDERS: Mapping[str, _Build] = {
    "gpt2": _by_bytes,
    "llama": _by_scores,
    "gemma4": _by_characters,
    "t5": _by_unigrams,
}


def _write_spaces(tokenizer: Tokenizer, has_prefix: bool, before: Sequence[Any] = ()) -> None:
    """Tokens have U+2581 where texts have spaces, and one before a text where it `has_prefix`."""
    spaces = normalizers.Replace(" ", _SPACE)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps = [*before, spaces]
    if has_prefix:
        steps.insert(-1, normalizers.Prepend(_SPACE))
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else spaces
    tokenizer.decoder = decoders.Sequence(parts)


def _merges_of(
    numbers: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, the best scores first, as SentencePiece merges them."""
    found = []
    for token, number in numbers.items():
        if types[number] in _WHOLE:
            continue
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in numbers and right in numbers:
                order = (-scores[number], number, numbers[left], numbers[right])
                found.append((order, (left, right)))
    return [pair for _, pair in sorted(found)]


def _put_around(
    tokenizer: Tokenizer, fields: Mapping[str, Any], tokens: Sequence[str], kind: str, where: str
) -> None:
    """Tokens before and after every text, where the file says so, or llama.cpp does."""
    usual = dict(_AROUND[kind])
    if kind == "gpt2":
        usual["bos"] = SPLITS.get(str(fields.get(f"{_PREFIX}pre")), SPLITS["default"]).adds_bos
    around = {}
    for name in ("bos", "eos"):
        # files of Gemma 4 say no by mistake
        is_forced = name == "bos" and "gemma4" in (kind, fields.get(f"{_PREFIX}pre"))
        if not (is_forced or fields.get(f"{_PREFIX}add_{name}_token", usual.get(name, False))):
            continue
        number = fields.get(f"{_PREFIX}{name}_token_id", _NUMBERS.get(kind, {}).get(name))
        if type(number) is not int or not 0 <= number < len(tokens):
            raise VocabMismatchError(
                f"{where} puts a token {name} around texts, which is number {number}",
                f"a number below {len(tokens)}, that of tokenizer.ggml.tokens",
                _DO,
            )
        around[name] = (tokens[number], number)
    parts = ["$A:0"]
    pair = ["$A:0", "$B:1"]
    if "bos" in around:
        token = around["bos"][0]
        parts, pair = [f"{token}:0", *parts], [f"{token}:0", "$A:0", f"{token}:1", "$B:1"]
    if "eos" in around:
        token = around["eos"][0]
        place = pair.index("$A:0") + 1
        parts, pair = [*parts, f"{token}:0"], [*pair[:place], f"{token}:0", *pair[place:]]
        pair.append(f"{token}:1")
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, pair=pair, special_tokens=list(around.values())
        )


def _is_phi3(fields: Mapping[str, Any]) -> bool:
    """Whether special tokens take the spaces after them along: no field says it, but its name."""
    if fields.get(f"{_PREFIX}model") != "llama":
        return False
    name = str(fields.get("general.name")).lower()
    return "phi-3" in name or "phi3" in name or fields.get("general.architecture") == "phi3"


def _scores(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> list[float]:
    scores = _list(fields, "scores", float, where)
    if len(scores) != len(tokens) or not types:
        raise VocabMismatchError(
            f"{where} has {len(tokens)} tokens, {len(scores)} scores and {len(types)} types",
            "a score and a type for each token",
            "download it again",
        )
    return scores


def _unknown(tokens: Sequence[str], types: Sequence[int]) -> str | None:
    """The token of what no other is for."""
    return next((tokens[i] for i, own in enumerate(types) if own == _UNKNOWN), None)


def _list(fields: Mapping[str, Any], name: str, kind: type, where: str) -> list[Any]:
    found = fields.get(f"{_PREFIX}{name}")
    # files may have whole numbers for scores
    kinds = (int, float) if kind is float else kind
    if not isinstance(found, list) or not all(isinstance(item, kinds) for item in found):
        raise VocabMismatchError(
            f"{where} has no list {_PREFIX}{name} of {kind.__name__}",
            f"what a tokenizer of the kind {fields.get(f'{_PREFIX}model')} consists of",
            _DO,
        )
    return found


def _merges(fields: Mapping[str, Any], tokens: Sequence[str], where: str) -> list[tuple[str, str]]:
    known, found = set(tokens), []
    for merge in _list(fields, "merges", str, where):
        # the first character may be a space itself
        place = merge.find(" ", 1)
        left, right = merge[:place], merge[place + 1 :]
        if place < 0 or not right:
            raise VocabMismatchError(
                f"{where} has the merge {merge!r}",
                "two tokens and a space between",
                "download it again",
            )
        if not {left, right, left + right} <= known:
            raise VocabMismatchError(
                f"{where} has the merge {merge!r}, and no such tokens",
                "merges of two tokens to a third",
                _DO,
            )
        found.append((left, right))
    return found


def _numbers(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}
