"""Prompts become tokens, or are refused before anybody has worked on them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from specc.errors import RequestError
from specc.runtime.engine import Engine
from specc.runtime.requests.request_maker import RequestMaker
from specc.sampling.params import SamplingParams
from tests.runtime.conftest import EOS, POSITIONS, VOCAB, build_engine

PARAMS = SamplingParams(temperature=0, max_tokens=1)


class Watched:
    """A tokenizer that tells which of its ways was used."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.used: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("encode"):
            self.used.append(name)
        return getattr(self._tokenizer, name)


@pytest.fixture
def engine():
    built = build_engine(eos=(EOS,))
    built.tokenizer = Watched(built.tokenizer)  # type: ignore[assignment]
    return built


def long_text(size: int) -> str:
    words = ["hello", "world", " ", "  ", "\n", "<eos>", "é", "漢", "A1"]
    return "".join(random.Random(1).choices(words, k=size))


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("has_special", [False, True])
def test_long_texts_have_the_same_tokens(
    engine, add_bos: bool, has_special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch as of one text, with what the post-processor and the engine add."""
    plain: Tokenizer = engine.tokenizer._tokenizer
    plain.post_processor = processors.TemplateProcessing(
        single="<eos> $A <eos>", special_tokens=[("<eos>", EOS)]
    )
    monkeypatch.setattr(Engine, "max_seq_len", 1 << 20)
    engine.add_bos, engine.bos_token_id = add_bos, 3
    requests = RequestMaker(engine, None)
    for size in (1, 500, 9000):
        text = long_text(size)
        want = plain.encode(text, add_special_tokens=not has_special).ids
        if add_bos and not has_special:
            want = [3, *want]
        assert requests.tokenize(text, has_special) == want
    assert engine.tokenizer.used == ["encode", "encode_batch_fast", "encode_batch_fast"]


@pytest.mark.parametrize("text", ["a" * 20_000, "a " * 4_000_000, "<eos>" * 50_000])
def test_what_cannot_fit_is_not_tokenized(engine, text: str) -> None:
    requests = RequestMaker(engine, None)
    requests.prepare()
    for prompt in (text, {"prompt": text}):
        with pytest.raises(RequestError, match=f"at most {POSITIONS - 1} tokens"):
            requests.make(prompt, PARAMS)
    with pytest.raises(RequestError, match=r"prompt 7 has \d+ bytes, or \d+ tokens or more"):
        requests.tokenize(text, index=7)
    assert engine.tokenizer.used == []


def test_what_may_be_endless_is_not_tokenized(engine) -> None:
    """This tokenizer has no token for a null character, and leaves it out: any number fits."""
    requests = RequestMaker(engine, None)
    assert requests.max_unbounded_bytes == 1 << 20
    assert requests.tokenize("\x00" * 1000 + "ab") == [0, 1]
    assert requests.tokenize("\x00" * (1 << 20) + "ab") == [0, 1]
    with pytest.raises(
        RequestError, match=r"leave out or put together(.|\n)*or pass its token ids"
    ):
        requests.tokenize("\x00" * ((1 << 20) + 1) + "ab")
    requests.max_unbounded_bytes = 1 << 21
    assert requests.tokenize("\x00" * ((1 << 20) + 1) + "ab") == [0, 1]


class Ids(Sequence[int]):
    """Token ids that nobody may look at."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("somebody looks")


def test_lists_of_ids_that_cannot_fit_are_not_read(engine) -> None:
    requests = RequestMaker(engine, None)
    for prompt in (Ids(POSITIONS), {"prompt_token_ids": Ids(10**7)}):
        with pytest.raises(RequestError, match="tokens"):
            requests.make(prompt, PARAMS)
    # one token has to fit after them
    assert requests.make([1] * (POSITIONS - 1), PARAMS).num_prompt_tokens == POSITIONS - 1


@pytest.mark.parametrize("wrong", [-1, VOCAB, 1 << 70])
def test_ids_that_are_none(engine, wrong: int) -> None:
    requests = RequestMaker(engine, None)
    with pytest.raises(RequestError, match=f"prompt 0 holds token id {wrong}"):
        requests.make([1, wrong, 2], PARAMS)


def test_other_threads_go_on(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long text is tokenized, a thread of this process gets its turns."""
    monkeypatch.setattr(Engine, "max_seq_len", 1 << 30)
    requests = RequestMaker(engine, None)
    text = long_text(200_000)
    turns, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal turns
        while not is_over.is_set():
            time.sleep(0.002)
            turns += 1

    requests.prepare()
    thread = threading.Thread(target=tick)
    thread.start()
    begin_s, before = time.perf_counter(), turns
    token_ids = requests.tokenize(text)
    seconds, turns_meanwhile = time.perf_counter() - begin_s, turns - before
    is_over.set()
    thread.join()
    assert len(token_ids) > 100_000
    # held up for the whole time, it would have two
    assert turns_meanwhile > max(4, seconds / 0.002 / 20)
