"""Tokens of two tokenizers are the same if they stand for the same bytes, or play the same role."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specc.compiler.vocabulary import Vocabulary, byte_letters, match
from specc.errors import VocabMismatchError
from tests.vocabularies import SPECIAL, byte_level, save, sentencepiece

TEXTS = st.text(alphabet="ab é→\n", min_size=1, max_size=3)
BYTES = st.binary(min_size=1, max_size=2) | TEXTS.map(str.encode)


class Config:
    """Of a model without special tokens, unless it says so."""

    def __init__(self, **ids):
        self.__dict__ |= ids


def read(path, tokenizer, config=None, **own):
    return Vocabulary.read(save(path, tokenizer, **own), config or Config())


def vocabulary(texts, single=(), roles=None, source="here"):
    held = {i: text for i, text in texts.items() if text}
    return Vocabulary(source, held, frozenset(single), roles or {}, len(texts))


def test_the_alphabet_is_that_of_gpt2():
    assert byte_letters() == [bytes_to_unicode()[byte] for byte in range(256)]


@settings(max_examples=20, deadline=None)
@given(st.lists(BYTES, min_size=1, max_size=12, unique=True))
def test_names_of_bytes(tmp_path_factory, tokens):
    """What the library decodes, as far as a token is whole characters."""
    tokenizer = byte_level(tokens)
    found = read(tmp_path_factory.mktemp("byte"), tokenizer)
    assert found.texts == dict(enumerate(tokens))
    for index, text in found.texts.items():
        assert tokenizer.decode([index]) == text.decode(errors="replace")


@settings(max_examples=20, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=12, unique=True), st.sets(st.integers(0, 255)))
def test_names_of_pieces(tmp_path_factory, texts, single):
    names = [text.replace(" ", "▁") for text in texts]
    tokenizer = sentencepiece([*names, *(f"<0x{byte:02X}>" for byte in sorted(single))])
    found = read(tmp_path_factory.mktemp("piece"), tokenizer, unk_token="<unk>")
    first = len(SPECIAL)
    expected = [text.encode() for text in texts] + [bytes((byte,)) for byte in sorted(single)]
    assert found.texts == dict(enumerate(expected, start=first))
    assert found.single_bytes == set(range(first + len(texts), first + len(expected)))
    assert found.roles["unk"] == (0,)
    # a first space is taken off a text, so another token comes before
    for index, text in found.texts.items():
        if index not in found.single_bytes:
            assert (
                tokenizer.decode([first, index])[len(tokenizer.decode([first])) :] == text.decode()
            )


@st.composite
def vocabularies(draw):
    """Texts by id, with holes, the same text twice, and single bytes among them."""
    texts = draw(st.lists(BYTES, min_size=1, max_size=14))
    ids = draw(st.permutations(range(len(texts) + 3)))[: len(texts)]
    single = {
        i for i, text in zip(ids, texts, strict=True) if len(text) == 1 and draw(st.booleans())
    }
    return vocabulary(dict(zip(ids, texts, strict=True)), single)


@settings(max_examples=80, deadline=None)
@given(vocabularies(), vocabularies())
def test_map_by_an_oracle(target, draft):
    """All pairs, one by one, against what `match` finds."""

    def nearest(held, ids, is_byte):
        return min(
            ids, key=lambda i: ((i in held.single_bytes) != is_byte, i in held.single_bytes, i)
        )

    expected, is_enough = {}, False
    for own, text in draft.texts.items():
        ids = [i for i, other in target.texts.items() if other == text]
        if ids:
            is_enough = True
            chosen = nearest(target, ids, own in draft.single_bytes)
            expected.setdefault(chosen, set()).add(own)
    if not is_enough:
        with pytest.raises(VocabMismatchError):
            match(target, draft)
        return
    found, _ = match(target, draft)
    assert {i: set(ids) for i, ids in found.from_draft.items()} == expected
    assert len([own for ids in found.from_draft.values() for own in ids]) == len(
        {own for ids in found.from_draft.values() for own in ids}
    )
    for index, text in target.texts.items():
        ends = [(len(other), own) for own, other in draft.texts.items() if text.endswith(other)]
        longest = max((size for size, _ in ends), default=0)
        ids = [own for size, own in ends if size == longest]
        own = nearest(draft, ids, index in target.single_bytes) if ids else found.unknown
        assert found.to_draft[index] == own
    assert found.num_unread == sum(
        text not in draft.texts.values() for text in target.texts.values()
    )


def test_byte_level_and_pieces():
    """Ġthe is ▁the, Ä is the first byte of ä, and A is the piece, not the byte."""
    target = vocabulary({0: b" the", 1: b"\xc3", 2: b"A", 3: b"Athe"})
    draft = vocabulary({5: b"\xc3", 6: b"A", 7: b" the", 8: b"A", 9: b"the"}, single=(5, 6))
    found, (told,) = match(target, draft)
    assert found.from_draft == {1: (5,), 2: (8, 6), 0: (7,)}
    assert found.to_draft == {0: 7, 1: 5, 2: 8, 3: 9}
    assert (found.num_proposed, found.num_target, found.num_unread) == (3, 4, 1)
    assert "the draft proposes 3 of 4 target ids, and reads 1 as" in told


def test_a_byte_and_a_piece_of_both_stay_apart():
    first = vocabulary({0: b"A", 1: b"A"}, single=(0,))
    second = vocabulary({3: b"A", 4: b"A"}, single=(4,))
    found, _ = match(first, second)
    assert found.from_draft == {1: (3,), 0: (4,)}
    assert found.to_draft == {0: 4, 1: 3}


def test_special_tokens_by_role(tmp_path):
    """An ordinary token that reads </s> is not the end of a text, nor is its own name a role."""
    tokens = [b"a", b"b", b"</s>", b"<s>", b"<unk>"]
    target = read(
        tmp_path / "target", byte_level(tokens, ["<|end|>", "<|begin|>", "<|mine|>"]),
        Config(bos_token_id=6, eos_token_id=[5]),
    )  # fmt: skip
    assert target.roles == {"bos": (6,), "eos": (5,), "unk": ()}
    draft = read(
        tmp_path / "draft", sentencepiece(["a", "b"]), unk_token="<unk>", bos_token="<s>",
        eos_token={"content": "</s>"},
    )  # fmt: skip
    assert draft.roles == {"bos": (1,), "eos": (2,), "unk": (0,)}
    assert draft.texts == {3: b"a", 4: b"b"}
    found, _ = match(target, draft)
    assert found.from_draft == {0: (3,), 1: (4,), 5: (2,), 6: (1,)}
    # what is in no role is unknown; the text of the others ends with no token of the draft's
    assert found.to_draft == {0: 3, 1: 4, 2: 0, 3: 0, 4: 0, 5: 2, 6: 1}
    assert found.unknown == 0
    assert found.inputs(9, 5).tolist() == [3, 4, 0, 0, 0, 2, 1, 0, 0]


def test_special_tokens_of_no_role_by_name(tmp_path):
    """What stands around turns of a chat, where it is special in both: not an ordinary token."""
    special = ["<|end|>", "<|turn|>", "<|c|>"]
    target = read(tmp_path / "target", byte_level([b"a"], special), Config(eos_token_id=1))
    draft = read(
        tmp_path / "draft", sentencepiece(["a", "<|c|>"], (*SPECIAL, "<|turn|>", "<|end|>")),
        unk_token="<unk>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    assert target.others == {"<|turn|>": 2, "<|c|>": 3}
    assert draft.others == {"<|turn|>": 3, "<|end|>": 4}
    found, _ = match(target, draft)
    # <|c|> of the draft is an ordinary token, and the target's <|end|> has a role
    assert found.from_draft == {0: (5,), 1: (2,), 2: (3,)}
    assert found.to_draft == {0: 5, 1: 2, 2: 3}
    assert (found.num_proposed, found.num_unread) == (3, 1)


def test_a_token_of_two_roles(tmp_path):
    """What the draft ends texts with begins them, too; the target has two."""
    target = vocabulary({0: b"a", 1: b"", 2: b""}, roles={"bos": (1,), "eos": (2,)})
    draft = vocabulary({0: b"", 1: b"a"}, roles={"bos": (0,), "eos": (0,)})
    found, _ = match(target, draft)
    assert found.from_draft == {0: (1,), 2: (0,)}
    assert found.to_draft == {0: 1, 1: 0, 2: 0}
    back, _ = match(draft, target)
    assert back.from_draft == {1: (0,), 0: (2, 1)}
    # what begins every prompt matters, what ends it is hardly ever read
    assert back.to_draft == {0: 1, 1: 0}


def test_added_text_is_what_the_library_decodes(tmp_path):
    """As it stands where it is no text of the byte alphabet; with ▁ for a space among pieces."""
    letters, pieces = byte_level([b"a"]), sentencepiece(["a"])
    letters.add_tokens([AddedToken("Ġ ", special=False), AddedToken("ab", special=False)])
    assert read(tmp_path / "byte", letters).texts == {0: b"a", 1: "Ġ ".encode(), 2: b"ab"}
    pieces.add_tokens([AddedToken("▁▁", special=False)])
    assert read(tmp_path / "piece", pieces).texts == {3: b"a", 4: b"  "}
    assert letters.decode([0, 1, 2]) == "aĠ ab"
    assert pieces.decode([3, 4, 3]) == "a  a"


def test_unigram(tmp_path):
    pieces = [("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    file = save(tmp_path, tokenizer)
    data = json.loads(file.read_text())
    data["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    file.write_text(json.dumps(data))
    found = Vocabulary.read(file, Config())
    assert (found.texts, found.roles["unk"]) == ({1: b" a", 2: b"b"}, (0,))


@pytest.mark.parametrize(
    "model",
    [
        models.WordPiece({"a": 0, "##b": 1}, unk_token="a"),
        models.WordLevel({"a": 0}, unk_token="a"),
        models.BPE({"a": 0}, []),
        models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"),
    ],
    ids=["wordpiece", "wordlevel", "characters", "suffix"],
)
def test_tokens_without_known_bytes_are_refused(tmp_path, model):
    with pytest.raises(VocabMismatchError) as caught:
        read(tmp_path, Tokenizer(model))
    assert "SentencePiece" in caught.value.needed


def test_too_few_tokens_in_both():
    target = vocabulary({i: f"t{i}".encode() for i in range(100)}, source="one")
    texts = {i: f"{'t' if i < 4 else 'd'}{i}".encode() for i in range(90)}
    with pytest.raises(VocabMismatchError) as caught:
        match(target, vocabulary(texts, source="two"))
    assert caught.value.found == "4 of 100 tokens of one among the 90 of two"
    assert caught.value.needed.startswith("5% of the smaller vocabulary")
    texts[4] = b"t4"
    _, (told,) = match(target, vocabulary(texts))
    assert "6% of the smaller vocabulary, so expect little" in told


def test_rows_of_no_token():
    """Rows beyond a tokenizer are read as unknown and never proposed; so are those of no model."""
    found, _ = match(vocabulary({0: b"a", 1: b"b"}), vocabulary({1: b"a", 3: b"b", 7: b"a"}))
    ids, known = found.outputs(4, 5)
    assert known.tolist() == [True, True, False, False]
    assert ids.tolist() == [[1, 3, 0, 0]]
    ids, known = found.outputs(4, 8)
    assert ids.tolist() == [[1, 3, 0, 0], [7, 3, 0, 0]]
    assert found.inputs(4, 8).tolist() == [1, 3, 0, 0]
    ids, known = found.outputs(1, 2)
    assert (ids.tolist(), known.tolist()) == ([[1]], [True])
