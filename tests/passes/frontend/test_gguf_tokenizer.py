"""Tokenizers of GGUF files: their ids are those of other code for the same rules."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from specc.errors import VocabMismatchError
from specc.passes.frontend.gguf_splits import SPLITS
from specc.passes.frontend.gguf_tokenizer import tokenizer_of
from specc.runtime.outputs.detokenizer import Detokenizer

# llama.cpp's own patterns by name, or those of tokenizer.json that its comments quote
PATTERNS = json.loads((Path(__file__).parent / "gguf_patterns.json").read_text())
TEXTS = (
    "", " ", "Hello world,  it's 1 22 333 4444 55555 666666 7777777 o'clock", "I'LL WE'VE don't",
    "a1b2 x=12345;y[3]\n\n\n  z\t\tq\r\n\r\n end  ", "HelloWorld HTTPServer iPhone ÄpfelÖl éa",
    "path/to/file/\n http://a.b/c?d=e&f", "世界、カタカナひらがな漢字123 한국어 ㄅㄆㄇ ภาษาไทย！？",
    "нещо на Български дом", "🙂🙂 ok ½ ² $5+3=8 <= ^~| `code` _a_ __b", "  (x) . , ! word.Word",
    "<sentinel:12>IMGIMGABCZ    tab\tline\n    four", "e\u0301te\u0301 \u1ec7 a b c d",
    "“x”… \n \n\n \t",
)  # fmt: skip


def alphabet() -> dict[int, str]:
    """GPT-2's character for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + n) for n, b in enumerate(others)}


BYTES = alphabet()


def as_bytes(text: str) -> str:
    return "".join(BYTES[byte] for byte in text.encode())


@pytest.fixture(scope="module")
def byte_fields() -> dict[str, Any]:
    """Pairs of bytes that go across words: whole texts are tokens, where nothing splits them.

    A few words are tokens that no merges make.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=sorted(BYTES.values()), show_progress=False
    )
    trained.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [item if isinstance(item, str) else " ".join(item) for item in model["merges"]]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    words = [as_bytes(word) for word in (" WE", "Word", " code", "line", "HTTP")]
    tokens = ["<s>", *tokens, *(word for word in words if word not in tokens)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
    }


def threes(part: str) -> list[str]:
    """Digits in groups of three from the last one on, in llama.cpp's own code."""
    found = []
    for run in regex.findall(r"\p{N}+|\P{N}+", part):
        first = len(run) % 3 if run[0].isnumeric() else len(run)
        found += [run[:first], *(run[at : at + 3] for at in range(first, len(run), 3))]
    return found


def words_of(text: str, patterns: Sequence[str]) -> list[str]:
    """What patterns match and what lies between, one pattern after the other."""
    words = [text]
    for pattern in patterns:
        if pattern == r"\p{AFMoE_digits}":
            words = [item for word in words for item in threes(word)]
            continue
        found = []
        for word in words:
            last = 0
            for match in regex.compile(pattern, regex.VERSION1).finditer(word):
                found += [word[last : match.start()], match.group()]
                last = match.end()
            found.append(word[last:])
        words = found
    return [word for word in words if word]


def merged(parts: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Pairs are merged, the lowest rank first, and of equals the leftmost."""
    while True:
        pairs = [(ranks[pair], at) for at, pair in enumerate(itertools.pairwise(parts))
                 if pair in ranks]  # fmt: skip
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def ranks_of(fields: dict[str, Any]) -> dict[tuple[str, str], int]:
    pairs = (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])
    return {(left, right): rank for rank, (left, right) in enumerate(pairs)}


def built(fields: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_of(fields, "a file"))


@pytest.mark.parametrize("group", PATTERNS, ids=[item["names"][0] for item in PATTERNS])
def test_splits(byte_fields, group) -> None:
    numbers = {token: at for at, token in enumerate(byte_fields["tokenizer.ggml.tokens"])}
    ranks = ranks_of(byte_fields)
    for name in group["names"]:
        tokenizer = built(byte_fields | {"tokenizer.ggml.pre": name})
        for text in TEXTS:
            given = unicodedata.normalize("NFC", text) if SPLITS[name].is_composed else text
            want = []
            for word in map(as_bytes, words_of(given, group["patterns"])):
                if group["takes_words"] and word in numbers:
                    want.append(numbers[word])
                else:
                    want += [numbers[part] for part in merged(list(word), ranks)]
            found = tokenizer.encode(text, add_special_tokens=False).ids
            assert found == want, (name, text)
            assert tokenizer.decode(found) == given
        assert (tokenizer.encode("a").ids[0] == 0) == group["adds_bos"]


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("gpt-2", "gpt2.tokenization_gpt2", "GPT2Tokenizer"),
        ("mpt", "gpt_neox.tokenization_gpt_neox", "GPTNeoXTokenizer"),
        ("command-r", "cohere.tokenization_cohere", "CohereTokenizer"),
        ("qwen2", "qwen2.tokenization_qwen2", "Qwen2Tokenizer"),
        ("qwen35", "qwen3_5.tokenization_qwen3_5", "Qwen3_5Tokenizer"),
    ],
)
def test_tokenizers_of_transformers(byte_fields, name, module, kind) -> None:
    """Splits and Unicode forms are those of the class that publishes them."""
    numbers = {token: at for at, token in enumerate(byte_fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in byte_fields["tokenizer.ggml.merges"]]
    cls = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    reference = cls(vocab=numbers, merges=merges).backend_tokenizer
    found = built(byte_fields | {"tokenizer.ggml.pre": name})
    for text in TEXTS:
        want = reference.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == want, text


def test_every_split_is_compared() -> None:
    names = [name for group in PATTERNS for name in group["names"]]
    assert sorted(names) == sorted(SPLITS)


def test_a_file_that_names_no_split(byte_fields, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="specc.gguf"):
        found = built(byte_fields)
    assert "a file does not say how" in caplog.text
    want = built(byte_fields | {"tokenizer.ggml.pre": "default"})
    assert [found.encode(text).ids for text in TEXTS] == [want.encode(text).ids for text in TEXTS]


def character_fields(tokens: Sequence[str], merges: Sequence[str], **more: Any) -> dict[str, Any]:
    first = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    own = {
        "model": "gemma4", "tokens": [*first, *tokens], "merges": list(merges),
        "token_type": [3, 3, 3, 2, *[6] * 256, *[1] * len(tokens)],
        "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3,
    } | more  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


@pytest.mark.parametrize(
    "more", [{}, {"add_bos_token": False}, {"model": "gpt2", "pre": "sarvam-moe"}]
)
def test_pairs_of_characters(more) -> None:
    """Spaces are U+2581, newlines merge, and what has no token is its bytes in UTF-8."""
    letters = sorted(set("\u2581helowrd\nti.s"))
    merges = ["h e", "l l", "he ll", "hell o", "\u2581 \u2581", "\n \n", "\u2581 w", "o r"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges)]
    fields = character_fields(tokens, merges, **more)
    numbers = {token: at for at, token in enumerate(fields["tokenizer.ggml.tokens"])}
    tokenizer, ranks = built(fields), ranks_of(fields)
    for text in ("hello world", "  hello\n\n\nworld  ", "héllo 🙂!", "", "\u2581w"):
        want = []
        for part in merged(list(text.replace(" ", "\u2581")), ranks):
            known = part in numbers
            want += [numbers[part]] if known else [
                numbers[f"<0x{byte:02X}>"] for byte in part.encode()
            ]  # fmt: skip
        assert tokenizer.encode(text, add_special_tokens=False).ids == want, text
        assert tokenizer.decode(want) == text.replace("\u2581", " ")
    # Gemma 4's files say no by mistake, and llama.cpp passes that over
    assert (tokenizer.encode("w").ids[0] == 2) == ("pre" not in more)


def best_pieces(text: str, scores: dict[str, float], unknown: float) -> list[str]:
    """The pieces with the largest sum of scores; what none knows is one piece."""
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        ways = [
            (best[start][0] + scores[text[start:end]], [*best[start][1], text[start:end]])
            for start in range(end)
            if text[start:end] in scores
        ]
        if text[end - 1] not in scores:
            ways.append((best[end - 1][0] + unknown, [*best[end - 1][1], "<unk>"]))
        best.append(max(ways, key=lambda way: way[0]))
    return [key for key, _ in itertools.groupby(best[-1][1])] if "<unk>" in best[-1][1] else (
        best[-1][1]
    )  # fmt: skip


@pytest.mark.parametrize("merges_spaces", [False, True])
def test_unigrams(merges_spaces) -> None:
    pieces = {
        "\u2581": -2.0, "\u2581he": -3.5, "hello": -4.0, "llo": -3.0, "\u2581hello": -9.0,
        "l": -5.0, "lo": -4.0, "w": -6.0, "or": -3.2, "o": -5.5, "r": -5.1, "ld": -2.5, "d": -7.0,
        "\u2581w": -4.5, "h": -6.5, "e": -6.0,
    }  # fmt: skip
    tokens = ["<pad>", "</s>", "<unk>", *pieces]
    fields = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *pieces.values()],
        "tokenizer.ggml.token_type": [3, 3, 2, *[1] * len(pieces)],
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": merges_spaces,
    }
    tokenizer = built(fields)
    for text in ("hello world", "hello  hello ", " w", "helloworld zz", "lorld"):
        given = " ".join(text.split()) if merges_spaces else text
        want = best_pieces("\u2581" + given.replace(" ", "\u2581"), pieces, -9.0 - 10)
        found = tokenizer.encode(text)
        assert found.ids == [tokens.index(piece) for piece in (*want, "</s>")], text
        if "<unk>" not in want:
            assert tokenizer.decode(found.ids) == given


def test_a_charsmap_that_is_none() -> None:
    fields = {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["<pad>", "</s>", "<unk>", "a"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0], "tokenizer.ggml.token_type": [3, 3, 2, 1],
        "tokenizer.ggml.precompiled_charsmap": [7, -1, 3],
    }  # fmt: skip
    with pytest.raises(VocabMismatchError, match="precompiled_charsmap"):
        tokenizer_of(fields, "a file")


def score_fields(tokens: Sequence[str], types: Sequence[int], **more: Any) -> dict[str, Any]:
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    own = {
        "model": "llama", "tokens": [*first, *tokens], "token_type": [2, 3, 3, *[6] * 256, *types],
        "scores": [0.0] * 259 + [-float(at) for at in range(len(tokens))],
    } | more  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


def test_runs_of_spaces_that_users_defined() -> None:
    """Gemma 1's are tokens of U+2581, which merges make; later files have them as spaces."""
    old = score_fields(["\u2581\u2581", "\u2581", "a"], [4, 1, 1], add_space_prefix=False)
    new = score_fields(["  ", "\u2581", "a"], [4, 1, 1], add_space_prefix=False)
    whole = old | {"tokenizer.ggml.scores": [0] * 259 + [0, -1, -2]}
    for fields in (old, new, whole):
        # first and last numbers are llama.cpp's own where the file has none
        assert built(fields).encode("  a").ids == [1, 259, 261]


def test_special_tokens_of_phi_3_take_spaces_along() -> None:
    tokens = ["\u2581", "a", "\n", "<|end|>", "<|endoftext|>"]
    fields = score_fields(tokens, [1, 1, 1, 3, 3], add_space_prefix=False)
    text = "a<|end|>\na<|endoftext|>\na<unk>"
    plain = [1, 260, 262, 261, 260, 263, 261, 260, 0]
    assert built(fields).encode(text).ids == plain
    for more in ({"general.name": "Phi3"}, {"general.architecture": "phi3"}):
        assert built(fields | more).encode(text).ids == [1, 260, 262, 260, 263, 261, 260, 0]


def test_tokens_without_text(byte_fields) -> None:
    """Several are no reason to refuse a file: llama.cpp numbers them."""
    tokens = [*byte_fields["tokenizer.ggml.tokens"], "", ""]
    types = [*byte_fields["tokenizer.ggml.token_type"], 1, 1]
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    found = built(byte_fields | more | {"tokenizer.ggml.pre": "gpt-2"})
    assert found.id_to_token(len(tokens) - 1) == f"[EMPTY_{len(tokens) - 1}]"


def test_streams(byte_fields) -> None:
    """One token after the other is the text of all, for every kind of decoder."""
    letters = {"tokenizer.ggml.token_type": [
        4 if token in "öÀÿ" else 1 for token in byte_fields["tokenizer.ggml.tokens"]
    ]}  # fmt: skip
    pieces = ["\u2581", "\u2581a", "hello", "é", "l"]
    some = [
        byte_fields | {"tokenizer.ggml.pre": "llama-bpe"},
        byte_fields | letters | {"tokenizer.ggml.pre": "deepseek-coder"},
        character_fields(pieces, []),
        score_fields(pieces, [1] * len(pieces)),
        score_fields(pieces, [1] * len(pieces), model="t5", unknown_token_id=0),
    ]
    for fields in some:
        tokenizer = built(fields)
        for text in (*TEXTS, "schöne Àÿ 🙂🙂", " a hello é"):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            stream, found = Detokenizer(tokenizer, []), ""
            for number in ids:
                stream.push(number)
                found += stream.take_delta(is_final=False)
            stream.flush()
            found += stream.take_delta(is_final=True)
            assert found == tokenizer.decode(ids, skip_special_tokens=False), text


def test_letters_that_users_defined(byte_fields) -> None:
    """They are tokens of texts, and stand for themselves, not for a byte of no text."""
    tokens, types = byte_fields["tokenizer.ggml.tokens"], byte_fields["tokenizer.ggml.token_type"]
    kinds = [4 if token in "öÀÿ" else kind for token, kind in zip(tokens, types, strict=True)]
    more = {"tokenizer.ggml.pre": "deepseek-coder", "tokenizer.ggml.token_type": kinds}
    found = built(byte_fields | more)
    ids = found.encode("schöne Àÿ öö é").ids
    assert tokens.index("ö") in ids
    assert found.decode(ids) == "schöne Àÿ öö é"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model": "bert"}, "of the kind bert"),
        ({"model": "rwkv"}, "of the kind rwkv"),
        ({"pre": "jina-v2-code"}, "in the way jina-v2-code"),
        ({"merges": ["a nothing"]}, "the merge 'a nothing', and no such tokens"),
        ({"merges": [" a"]}, "the merge ' a'"),
    ],
)
def test_what_is_refused(byte_fields, changes, found) -> None:
    more = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(VocabMismatchError) as caught:
        tokenizer_of(byte_fields | {"tokenizer.ggml.pre": "gpt-2"} | more, "a file")
    assert found in caught.value.found
