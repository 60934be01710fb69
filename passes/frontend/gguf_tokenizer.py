"""The tokenizer that a GGUF file's own fields say, as a tokenizer.json.

    data = tokenizer_of(reader.fields, reader.location())

Two kinds are read: `gpt2`, byte-level pairs with the file's merges, and `llama`, SentencePiece's
pairs by score. How text is split before that is named by `tokenizer.ggml.pre`, and a name that is
not known is refused: its tokens would be others.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; llama.cpp, src/llama-vocab.cpp,
`llm_tokenizer_bpe` and `llm_tokenizer_spm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_PREFIX = "tokenizer.ggml."
# token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
# tokenizer.ggml.pre → how text is split; None is that of GPT-2
_SPLITS: Mapping[str, str | None] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": None,
}
_DO = "put the file in a directory with config.json and tokenizer.json of the model, and pass that"


def tokenizer_of(fields: Mapping[str, Any], where: str) -> bytes:
    """Content of a tokenizer.json.

    Args:
        fields: of the file.
        where: the file, for errors.
    Raises:
        VocabMismatchError: another kind of tokenizer, or fields that are missing or do not fit.
    """
    kind = fields.get(f"{_PREFIX}model")
    if kind not in ("gpt2", "llama"):
        raise VocabMismatchError(
            f"{where} has a tokenizer of the kind {kind}", "gpt2 (byte-level) or llama", _DO
        )
    tokens = _list(fields, "tokens", str, where)
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
    if types or kind == "gpt2":
        control = control_token_ids(fields)
        given = types or [_NORMAL] * len(tokens)
        types = [_CONTROL if i in control else own for i, own in enumerate(given)]
    build = _by_bytes if kind == "gpt2" else _by_scores
    tokenizer = build(fields, tokens, types, where)
    added = [
        AddedToken(token, normalized=False, special=own == _CONTROL)
        for token, own in zip(tokens, types, strict=True)
        if own in (_CONTROL, _USER)
    ]
    # in this order, so that none of them gets another number
    tokenizer.add_tokens(added)
    _put_around(tokenizer, fields, tokens, kind, where)
    return tokenizer.to_str().encode()


def _by_bytes(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> Tokenizer:
    name = str(fields.get(f"{_PREFIX}pre"))
    if name not in _SPLITS:
        raise VocabMismatchError(
            f"{where} splits text in the way {name} (tokenizer.ggml.pre)",
            f"one of {', '.join(_SPLITS)}",
            _DO,
        )
    split = _SPLITS[name]
    merges = [_pair(merge, where) for merge in _list(fields, "merges", str, where)]
    # llama.cpp takes a whole word that is a token as it is, where the split is that of Llama 3
    ignores = split == _LLAMA3
    model = models.BPE(_numbers(tokens), merges, ignore_merges=ignores)
    tokenizer = Tokenizer(model)
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is None:
        tokenizer.pre_tokenizer = bytes_
    else:
        words = pre_tokenizers.Split(Regex(split), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _by_scores(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> Tokenizer:
    scores = _list(fields, "scores", float, where)
    if len(scores) != len(tokens) or not types:
        raise VocabMismatchError(
            f"{where} has {len(tokens)} tokens, {len(scores)} scores and {len(types)} types",
            "a score and a type for each token",
            "download it again",
        )
    unknown = next((i for i, own in enumerate(types) if own == _UNKNOWN), None)
    numbers = _numbers(tokens)
    model = models.BPE(
        numbers,
        _merges_of(numbers, scores, types),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get(f"{_PREFIX}add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges_of(
    numbers: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, the best scores first, as SentencePiece merges them."""
    found = []
    for token, number in numbers.items():
        if types[number] in (_UNKNOWN, _CONTROL, _USER, _BYTE):
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
    is_llama3 = _SPLITS.get(str(fields.get(f"{_PREFIX}pre"))) == _LLAMA3
    default = {"bos": kind == "llama" or is_llama3, "eos": False}
    around = {}
    for name, is_usual in default.items():
        if not fields.get(f"{_PREFIX}add_{name}_token", is_usual):
            continue
        number = fields.get(f"{_PREFIX}{name}_token_id")
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


def _list(fields: Mapping[str, Any], name: str, kind: type, where: str) -> list[Any]:
    found = fields.get(f"{_PREFIX}{name}")
    if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
        raise VocabMismatchError(
            f"{where} has no list {_PREFIX}{name} of {kind.__name__}",
            f"what a tokenizer of the kind {fields.get(f'{_PREFIX}model')} consists of",
            _DO,
        )
    return found


def _pair(merge: str, where: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise VocabMismatchError(
            f"{where} has the merge {merge!r}",
            "two tokens and a space between",
            "download it again",
        )
    return left, right


def _numbers(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}
