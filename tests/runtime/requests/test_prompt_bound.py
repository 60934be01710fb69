"""The least number of tokens of a text is never more than it has, and refuses what cannot fit."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from specc.runtime.requests.prompt_bound import PromptBound

LETTERS = string.ascii_letters + string.digits + string.punctuation
WORDS = ["th", "the", "ing", "he", "in", "aaaaaaaa", "aaaa", "aa", "==", "====", "12", "fi", "ss"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BLANKS = "   \t\n\r\u00a0\u3000\u2003"
NFC, NFKC = normalizers.NFC(), normalizers.NFKC()


def bpe(
    symbols: list[str], words: list[str] | None = None, unk: str | None = None, **options: Any
) -> Tokenizer:
    """Of single symbols, and of words with the merges that lead to them, left to right."""
    vocab = {symbol: i for i, symbol in enumerate(dict.fromkeys(symbols))}
    merges = []
    for word in words or []:
        for end in range(1, len(word)):
            pair = word[:end], word[end]
            if pair[0] in vocab and pair[1] in vocab:
                vocab.setdefault(word[: end + 1], len(vocab))
                if pair not in merges:
                    merges.append(pair)
    return Tokenizer(models.BPE(vocab, merges, unk_token=unk, **options))


def unigram(pieces: list[str], byte_fallback: bool = False) -> Tokenizer:
    scored = [("<unk>", 0.0), *((piece, -1.0 - 1 / len(piece)) for piece in pieces)]
    if byte_fallback:
        scored += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    return Tokenizer(models.Unigram(scored, 0, byte_fallback))


def with_parts(tokenizer: Tokenizer, normalizer: Any = None, pre: Any = None, *added: AddedToken):
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if added:
        tokenizer.add_tokens(list(added))
    return tokenizer


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLIT_BYTES = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\p{N}|\s+|[^\s\p{N}]+"), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
)
LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
byte_words = [*WORDS, "ĠĠ", "ĠĠĠĠ", "Ġthe", "ĊĊ", "æ¼", "æ¼¢"]
marked = [*LETTERS, "▁", "▁▁", "▁▁▁▁"]

# name → how to build it, and whether letters count
ZOO: dict[str, tuple[Callable[[], Tokenizer], bool]] = {
    "byte-level": (lambda: with_parts(bpe(BYTES, byte_words), None, BYTE_LEVEL), True),
    "split": (lambda: with_parts(bpe(BYTES, byte_words), None, SPLIT_BYTES), True),
    "nfc": (lambda: with_parts(bpe(BYTES, byte_words), NFC, SPLIT_BYTES), True),
    "nfkc-lower": (
        lambda: with_parts(
            bpe(BYTES, byte_words),
            normalizers.Sequence([NFKC, normalizers.Lowercase(), normalizers.StripAccents()]),
            BYTE_LEVEL,
            AddedToken("<PAD>", normalized=True),
            AddedToken("ﬁﬁﬁﬁﬁﬁﬁﬁ", normalized=True),
        ),
        True,
    ),
    "missing-bytes": (
        lambda: with_parts(bpe([b for b in BYTES if b not in "aæ"], byte_words), None, BYTE_LEVEL),
        True,
    ),
    "added-with-blanks": (
        lambda: with_parts(
            bpe(BYTES, byte_words),
            None,
            BYTE_LEVEL,
            AddedToken("<sep>", lstrip=True, rstrip=True),
            AddedToken("a" * 40),
        ),
        True,
    ),
    "llama": (
        lambda: with_parts(
            bpe([*marked, *FALLBACK, "<unk>"], [*WORDS, "▁▁▁▁", "▁the"], "<unk>",
                byte_fallback=True, fuse_unk=True),
            LLAMA,
        ),
        True,
    ),
    "bpe-unk": (lambda: bpe([*LETTERS, "<unk>", " "], WORDS, "<unk>"), True),
    "bpe-fused-unk": (lambda: bpe([*LETTERS, "<unk>"], WORDS, "<unk>", fuse_unk=True), True),
    "bpe-drops": (lambda: bpe([*"theing"], WORDS), True),
    "bpe-suffix": (
        lambda: with_parts(
            bpe([*LETTERS, *(c + "</w>" for c in LETTERS if c != "q"), "<unk>"], WORDS, "<unk>",
                end_of_word_suffix="</w>", fuse_unk=True),
            None,
            pre_tokenizers.Whitespace(),
        ),
        True,
    ),
    "bpe-prefix": (
        lambda: bpe(
            [*LETTERS, *("##" + c for c in LETTERS if c != "q"), "<unk>"],
            unk="<unk>",
            fuse_unk=True,
            continuing_subword_prefix="##",
        ),
        True,
    ),
    "words-of-bytes": (
        lambda: with_parts(
            bpe(BYTES, byte_words),
            None,
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTE_LEVEL]),
        ),
        True,
    ),
    "bpe-removed": (
        lambda: with_parts(
            bpe([*LETTERS], WORDS), None, pre_tokenizers.Split(Regex("a+"), "removed")
        ),
        False,
    ),
    "unigram": (
        lambda: with_parts(unigram([*marked, *WORDS]), None, pre_tokenizers.Metaspace()), True
    ),
    "unigram-bytes": (
        lambda: with_parts(
            unigram([*marked, *WORDS], True),
            normalizers.Sequence([normalizers.Strip(), normalizers.Replace(" ", "▁")]),
        ),
        True,
    ),
    "replace-all": (
        lambda: with_parts(bpe([*LETTERS], WORDS), normalizers.Replace(Regex("[a-z]+"), "a")), False
    ),
    "wordpiece": (
        lambda: with_parts(
            Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]")),
            normalizers.BertNormalizer(),
            pre_tokenizers.BertPreTokenizer(),
        ),
        False,
    ),
    "wordlevel": (
        lambda: with_parts(
            Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
            None,
            pre_tokenizers.Whitespace(),
        ),
        False,
    ),
}  # fmt: skip


def texts(tokenizer: Tokenizer) -> list[str]:
    """What the bound could be wrong about, and noise."""
    chance = random.Random(7)
    rest = [
        "é",
        "e\u0301",
        "e\u0301\u0323",
        "漢",
        "字",
        "ﬁ",
        "İ",
        "\u212a",
        "▁",
        "😀",
        "\x00",
        "\u1100\u1161",
    ]
    added = [
        str(token) for token in (t.content for t in tokenizer.get_added_tokens_decoder().values())
    ]
    words = [*WORDS, *(word.upper() for word in WORDS), *rest, *added, *BLANKS, *"abqzAQ!"]
    found = [unit * 50 for unit in words]
    found += [f"{one}{two}" * 30 for one in rest for two in ("a", " ", "漢", "\u0301")]
    found += [" " * 300 + token + " \u3000" * 100 for token in added]
    # of each token as many as there are: a byte counts as much as in the worst of them
    for token in tokenizer.get_vocab():
        text = tokenizer.decode([tokenizer.token_to_id(token)], skip_special_tokens=False)
        found += [text * 20, token * 20]
    found += ["".join(chance.choices(words, k=chance.randrange(60))) for _ in range(300)]
    return found


@pytest.mark.parametrize("name", ZOO)
def test_never_more_than_there_are(name: str) -> None:
    build, counts_letters = ZOO[name]
    tokenizer = build()
    bound = PromptBound(tokenizer)
    assert bool(bound.weights[ord("t")]) is counts_letters
    for text in texts(tokenizer):
        data = text.encode()
        least, num_unbounded = bound.least_tokens(data, 10**9)
        real = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert least <= real, (text[:80], least, real)
        assert 0 <= num_unbounded <= len(data)


def test_how_much_it_sees() -> None:
    """A letter counts as in the longest token that has it; what does not count is told."""
    plain = PromptBound(ZOO["byte-level"][0]())
    # `aaaaaaaa` is the longest with an a, `ing` with an n
    assert plain.least_tokens(b"a" * 8000, 10**9) == (1000, 0)
    assert plain.least_tokens(b"n" * 999, 10**9) == (333, 0)
    assert plain.least_tokens("é".encode() * 500, 10**9) == (1000, 0)
    composed = PromptBound(ZOO["nfc"][0]())
    # an e may become an é, where a mark follows it
    assert composed.least_tokens(b"n" * 999, 10**9) == (333, 0)
    assert composed.least_tokens(("n" * 998 + "n\u0301").encode(), 10**9) == (333, 3)
    # first bytes of ideographs count under all forms, the others do not
    assert composed.least_tokens("漢".encode() * 100, 10**9)[0] == 100
    dropping = PromptBound(ZOO["wordpiece"][0]())
    assert dropping.least_tokens(b"a" * 8000, 10**9) == (0, 8000)


def test_it_stops_when_it_has_seen_enough() -> None:
    bound = PromptBound(ZOO["byte-level"][0]())
    data = b"a" * (1 << 23)
    least, _ = bound.least_tokens(data, 100)
    assert 100 <= least < 1 << 16
    # parts of a text count as the whole
    assert bound.least_tokens(data, 10**9) == (1 << 20, 0)
    odd = ("n" * 262143 + "\u0301") * 2
    composed = PromptBound(ZOO["nfc"][0]())
    assert composed.least_tokens(odd.encode(), 10**9) == (-(-2 * 262142 // 3), 6)


def test_the_examples_tokenizer() -> None:
    root = Path(__file__).resolve().parents[3]
    tokenizer = Tokenizer.from_file(str(root / "examples/pair/target/tokenizer.json"))
    bound = PromptBound(tokenizer)
    assert (bound.weights > 0).all()
    sources = sorted((root / "runtime").glob("**/s*.py"))
    for file in [*sorted((root / "docs").rglob("*.md")), *sources]:
        text = file.read_text(encoding="utf-8")
        least, num_unbounded = bound.least_tokens(text.encode(), 10**9)
        real = len(tokenizer.encode(text).ids)
        # and it is worth something: a text of ten times the context is always refused
        assert real / 10 < least <= real
        assert num_unbounded == 0
    assert json.loads(tokenizer.to_str())["model"]["type"] == "BPE"
