"""Two tokenizers fit if every id that both have means one token."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models

from specc.compiler.tokenizer import TokenMap
from specc.errors import VocabMismatchError

LETTERS = {"a": 0, "b": 1, "c": 2, "d": 3}


def save(path, tokens, added=()):
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
    path.parent.mkdir(exist_ok=True)
    tokenizer.save(str(path))
    return path


def token_map(**tokens):
    return TokenMap("here", {index: token for token, index in tokens.items()})


def test_map_has_special_tokens(tmp_path):
    path = save(tmp_path / "tokenizer.json", LETTERS, ["<eos>", "<pad>"])
    found = TokenMap.from_file(path)
    assert found.tokens == {0: "a", 1: "b", 2: "c", 3: "d", 4: "<eos>", 5: "<pad>"}
    assert found.source == str(path)


def test_equal_maps():
    assert token_map(**LETTERS).require_same(token_map(**LETTERS)) == []


def test_first_differing_token_is_named(tmp_path):
    first = save(tmp_path / "one" / "tokenizer.json", LETTERS)
    second = save(tmp_path / "two" / "tokenizer.json", {"a": 0, "b": 1, "d": 2, "c": 3})
    with pytest.raises(VocabMismatchError) as caught:
        TokenMap.from_file(first).require_same(TokenMap.from_file(second))
    assert caught.value.found == f"token 2 is 'c' in {first} and 'd' in {second}"


def test_differing_special_token_is_named(tmp_path):
    first = save(tmp_path / "one" / "tokenizer.json", LETTERS, ["<eos>"])
    second = save(tmp_path / "two" / "tokenizer.json", LETTERS, ["</s>"])
    with pytest.raises(VocabMismatchError, match="token 4 is '<eos>'"):
        TokenMap.from_file(first).require_same(TokenMap.from_file(second))


def test_longer_draft_is_accepted():
    assert token_map(**LETTERS).require_same(token_map(**LETTERS, e=4, f=9)) == []


def test_missing_tokens_are_warned_about():
    (warning,) = token_map(**LETTERS, e=4, f=9).require_same(token_map(**LETTERS))
    assert "lacks 2 of the target's tokens (first: 4, 'e')" in warning


def test_hole_is_a_missing_token():
    (warning,) = token_map(**LETTERS).require_same(token_map(a=0, b=1, d=3))
    assert "lacks 1 of the target's tokens (first: 2, 'c')" in warning


def test_disjoint_maps_are_refused():
    with pytest.raises(VocabMismatchError) as caught:
        token_map(a=0, b=1).require_same(token_map(c=2, d=3))
    assert "token 0 is 'a'" in caught.value.found
    assert "token 2 is 'c'" in caught.value.found


@pytest.mark.parametrize(("target", "draft"), [({}, {"a": 0}), ({"a": 0}, {}), ({}, {})])
def test_empty_maps_are_refused(target, draft):
    with pytest.raises(VocabMismatchError, match="has no tokens"):
        token_map(**target).require_same(token_map(**draft))


def test_hash_depends_on_the_map_alone(tmp_path):
    one = save(tmp_path / "one.json", {"a": 0, "b": 1})
    two = save(tmp_path / "two.json", {"b": 1, "a": 0})
    other = save(tmp_path / "three.json", {"a": 1, "b": 0})
    longer = save(tmp_path / "four.json", {"a": 0, "b": 1}, ["<eos>"])
    hashes = [TokenMap.from_file(path).sha256() for path in (one, two, other, longer)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("text", [None, "", "{}", "not json", '{"model": 3}'])
def test_unreadable_file_is_refused(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(VocabMismatchError) as caught:
        TokenMap.from_file(path)
    assert caught.value.found.startswith(str(path))
    assert caught.value.needed == "a tokenizer.json that the tokenizers library reads"
