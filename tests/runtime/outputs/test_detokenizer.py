"""Incremental detokenization: nothing unstable is handed out, and deltas are the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specc.runtime.outputs.detokenizer import Detokenizer

EMOJIS = "a b😀é👩‍👩‍👧‍👦€日本 stop\ufffd"


def make_tokenizer() -> Tokenizer:
    """Byte-level: every byte, plus tokens that hold parts of characters and whole words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # halves of 😀 (F0 9F 98 80), a continuation byte with a letter, two letters, words
    more = [byte_level.pre_tokenize_str(text)[0][0] for text in ("😀", "€", " stop", "ab", "top")]
    smile = more[0]
    more += [smile[:2], smile[2:], smile[3] + "a", "b" + smile[:3]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate([*alphabet, *more])}, []))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


TOKENIZER = make_tokenizer()
SIZE = TOKENIZER.get_vocab_size()
EOS = TOKENIZER.token_to_id("<eos>")
TEXT_IDS = st.text(st.sampled_from(EMOJIS), max_size=8).map(lambda text: TOKENIZER.encode(text).ids)
# whole characters, arbitrary bytes, special tokens, and ids that the tokenizer does not have
IDS = st.lists(TEXT_IDS | st.lists(st.integers(0, SIZE + 3), max_size=4), max_size=8).map(
    lambda parts: [token for part in parts for token in part]
)
STOPS = st.lists(st.text(st.sampled_from(EMOJIS), min_size=1, max_size=5), max_size=3)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def run(token_ids: list[int], detokenizer: Detokenizer) -> tuple[list[str], str | None, int]:
    """Feed tokens until a stop string ends it; returns deltas, stop string, tokens used."""
    deltas = []
    for count, token in enumerate(token_ids, start=1):
        is_last = count == len(token_ids)
        stop = detokenizer.push(token)
        if stop is None and is_last:
            stop = detokenizer.flush()
        deltas.append(detokenizer.take_delta(stop is not None or is_last))
        if stop is not None:
            return deltas, stop, count
    return deltas, None, len(token_ids)


@settings(max_examples=200, deadline=None)
@given(IDS)
def test_text_equals_decoding_at_once(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER, [])
    deltas, _, _ = run(token_ids, detokenizer)
    assert detokenizer.text == TOKENIZER.decode(token_ids, skip_special_tokens=False)
    assert "".join(deltas) == detokenizer.text


@settings(max_examples=200, deadline=None)
@given(IDS, IDS, STOPS, st.booleans(), st.booleans())
def test_deltas_are_the_text(
    prompt: list[int], token_ids: list[int], stops: list[str], include: bool, skip: bool
) -> None:
    skipped = frozenset({EOS}) if skip else frozenset()
    detokenizer = Detokenizer(TOKENIZER, prompt, stops, include, skipped)
    deltas, stop, used = run(token_ids, detokenizer)
    text = detokenizer.text
    assert "".join(deltas) == text
    if stop is None:
        assert not any(s in text for s in stops)
        return
    assert stop in stops
    if include:
        assert text.endswith(stop)
        text = text[: -len(stop)]
    assert not any(s in text for s in stops)
    # not one token later than the stop string's last character
    before = Detokenizer(TOKENIZER, prompt, (), False, skipped)
    for token in token_ids[: used - 1]:
        before.push(token)
    assert not any(s in before.text for s in stops)


def test_incomplete_characters_are_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, [])
    first, second = TOKENIZER.token_to_id("ðŁ"), TOKENIZER.token_to_id("ĺĢ")
    detokenizer.push(first)
    assert detokenizer.take_delta(False) == ""
    detokenizer.push(second)
    assert detokenizer.take_delta(False) == "😀"


def test_incomplete_end_is_shown_when_nothing_follows() -> None:
    detokenizer = Detokenizer(TOKENIZER, [])
    for token in [*ids_of("ab"), TOKENIZER.token_to_id("ðŁ")]:
        detokenizer.push(token)
    assert detokenizer.text == "ab"
    detokenizer.flush()
    assert detokenizer.text == "ab\ufffd"


def test_whole_characters_before_an_incomplete_one_are_not_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, [])
    detokenizer.push(TOKENIZER.token_to_id("bðŁĺ"))
    assert detokenizer.take_delta(False) == "b"
    detokenizer.push(TOKENIZER.token_to_id("Ģa"))
    assert detokenizer.take_delta(False) == "😀a"


def test_stop_string_across_tokens_is_never_streamed() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ["stop"])
    tokens = [TOKENIZER.token_to_id("ab"), *ids_of("st"), TOKENIZER.token_to_id("s")]
    deltas = []
    for token in tokens:
        assert detokenizer.push(token) is None
        deltas.append(detokenizer.take_delta(False))
    # "st" could have become "stop", then the second s shows that it does not
    assert deltas == ["ab", "", "", "st"]
    assert detokenizer.push(TOKENIZER.token_to_id("top")) == "stop"
    assert detokenizer.take_delta(True) == ""
    assert detokenizer.text == "abst"


def test_earliest_stop_string_wins() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ["p", "to", "op"])
    detokenizer.push(TOKENIZER.token_to_id("Ġstop"))
    assert detokenizer.text == " s"


def test_include_stop_keeps_it_and_cuts_after_it() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ["to"], include_stop=True)
    assert detokenizer.push(TOKENIZER.token_to_id("Ġstop")) == "to"
    assert detokenizer.text == detokenizer.take_delta(True) == " sto"


def test_stop_string_that_only_the_flush_shows() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], ["\ufffd"])
    assert detokenizer.push(TOKENIZER.token_to_id("bðŁĺ")) is None
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.text == "b"


def test_special_tokens() -> None:
    tokens = [*ids_of("a"), EOS, *ids_of("b")]
    hidden = Detokenizer(TOKENIZER, [], skipped_token_ids=frozenset({EOS}))
    shown = Detokenizer(TOKENIZER, [])
    for token in tokens:
        hidden.push(token)
        shown.push(token)
    assert hidden.text == "ab"
    assert shown.text == "a<eos>b"


def test_long_runs_of_skipped_tokens_stay_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    detokenizer = Detokenizer(TOKENIZER, [], skipped_token_ids=frozenset({EOS}))
    monkeypatch.setattr(detokenizer, "_decode", pytest.fail)
    for _ in range(100):
        detokenizer.push(EOS)


def test_decoding_works_on_a_short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    detokenizer = Detokenizer(TOKENIZER, [])
    longest = 0
    decode = detokenizer._decode

    def spy(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    monkeypatch.setattr(detokenizer, "_decode", spy)
    for token in ids_of("a😀b" * 50):
        detokenizer.push(token)
    assert detokenizer.text == "a😀b" * 50
    assert longest <= 8


def test_leading_space_survives_where_a_decoder_strips_it() -> None:
    """Sentencepiece decoders strip the first space; the prompt's last tokens keep it inside."""
    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    detokenizer = Detokenizer(tokenizer, [1])
    detokenizer.push(2)
    assert detokenizer.text == " world"


def test_byte_fallback_deltas_are_the_text() -> None:
    vocab = {"<unk>": 0, "a": 1} | {f"<0x{i:02X}>": i + 2 for i in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for text in ("€", "😀a😀", "aé"):
        token_ids = [1 if c == ord("a") else c + 2 for c in text.encode()]
        detokenizer = Detokenizer(tokenizer, [])
        deltas, _, _ = run(token_ids, detokenizer)
        assert "".join(deltas) == detokenizer.text == text


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_output_that_completes_a_character_of_the_prompt(character):
    tokenizer = TOKENIZER
    ids = tokenizer.encode(character).ids
    for cut in range(1, len(ids)):
        detokenizer = Detokenizer(tokenizer, ids[:cut])
        for token_id in [*ids[cut:], *tokenizer.encode("abc").ids]:
            detokenizer.push(token_id)
        detokenizer.flush()
        assert detokenizer.text == character + "abc"


def test_several_tokens_at_once_read_like_one_by_one() -> None:
    """A decoder that falls back to bytes judges a run of them as a whole."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "<0xFF>": 3, "b": 4, "a": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for tokens in ([1, 2, 3, 4], [5, 1, 2, 4], [3, 3, 4, 1], [1, 2, 5, 3, 5]):
        alone, together = Detokenizer(tokenizer, [5]), Detokenizer(tokenizer, [5])
        for token in tokens:
            alone.push(token)
        together.push(*tokens)
        for detokenizer in (alone, together):
            detokenizer.flush()
        assert together.text == alone.text, tokens
