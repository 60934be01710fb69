"""Prompts that are cut to a number of tokens, and the best of several outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specc.errors import RequestError
from specc.runtime.requests.prompt_cut import PromptCut
from specc.runtime.requests.request_maker import RequestMaker
from tests.runtime.conftest import TinyModel, build_engine, text_tokenizer
from tests.specc.server.serving import Server, assert_error
from tests.specc.server.test_tokenizing import (
    BOS,
    IDS,
    USER,
    WORDS,
    serve_with_bos,
    with_bos,
)

ONE = {"temperature": 0, "max_tokens": 1, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_with_bos() as running:
        yield running


def prompt_of(server: Server, **body: Any) -> list[int]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = server.post(path, ONE | body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return (found if "messages" in body else found["choices"][0])["prompt_token_ids"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("adds_special", [True, False])
@pytest.mark.parametrize("count", [2, 7, 10, 11, 12])
def test_texts_are_cut_as_transformers_cuts_them(
    server, side: str, adds_special: bool, count: int
) -> None:
    """A BOS that the tokenizer adds stays."""
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=with_bos(text_tokenizer()), truncation_side=side
    )
    want = theirs(WORDS, add_special_tokens=adds_special, truncation=True, max_length=count)
    found = prompt_of(
        server,
        prompt=WORDS,
        add_special_tokens=adds_special,
        truncate_prompt_tokens=count,
        truncation_side=side,
    )
    assert found == want["input_ids"]


def test_a_bos_of_the_engine_stays() -> None:
    """Of a GGUF file, the engine adds it, not the tokenizer; whatever begins with it has one."""
    engine = build_engine()
    engine.bos_token_id, engine.add_bos = BOS, True
    maker = RequestMaker(engine, None)
    for text in (WORDS, f" {WORDS}"):
        assert maker.tokenize(text) == IDS
        assert maker.tokenize(text, cut=PromptCut(11)) == IDS
        assert maker.tokenize(text, cut=PromptCut(4)) == [BOS, 7, 8, 9]
        assert maker.tokenize(text, cut=PromptCut(4, "right")) == [BOS, 0, 1, 2]
    assert maker.tokenize(WORDS, has_special_tokens=True, cut=PromptCut(4)) == [6, 7, 8, 9]
    with pytest.raises(RequestError, match="truncate_prompt_tokens=1"):
        maker.tokenize(WORDS, cut=PromptCut(1))


def test_ids_and_chats(server) -> None:
    """Token ids, and chats, which hold their special tokens, keep their last ones."""
    assert prompt_of(server, prompt=IDS, truncate_prompt_tokens=3) == [7, 8, 9]
    right = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    assert prompt_of(server, prompt=[IDS, [5]], **right) == IDS[:3]
    assert prompt_of(server, prompt=[1] * 500, truncate_prompt_tokens=95) == [1] * 95
    assert prompt_of(server, messages=USER, truncate_prompt_tokens=3) == [7, 8, 26]
    assert prompt_of(server, messages=USER, **right) == [20, 7, 8]


def test_as_many_as_fit(server) -> None:
    long = {"prompt": "ab" * 3000, "truncate_prompt_tokens": -1}
    assert len(prompt_of(server, **long)) == 95
    found = prompt_of(server, **long, max_tokens=16)
    assert (len(found), found[0], found[-2:]) == (80, BOS, [0, 1])
    assert len(prompt_of(server, **long, max_tokens=-1)) == 95
    assert len(prompt_of(server, messages=USER * 50, truncate_prompt_tokens=-1)) == 95


def test_what_is_left_is_echoed_and_scored(server) -> None:
    body = {"prompt": WORDS, "truncate_prompt_tokens": 4, "echo": True, "logprobs": 0}
    (choice,) = server.complete(**ONE | body | {"max_tokens": 0})["choices"]
    assert choice["text"] == " hij"
    assert choice["logprobs"]["tokens"] == [" ", "h", "i", "j"]
    ids, model = [BOS, 7, 8, 9], TinyModel()
    want = [model.dense_logits(ids[:i]).log_softmax(0)[ids[i]].item() for i in (1, 2, 3)]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    "body",
    [
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": 96},
        {"truncate_prompt_tokens": "5"},
        {"truncate_prompt_tokens": 1},  # BOS alone
        {"truncate_prompt_tokens": 4, "prompt": "a" * (2 << 20)},
        {"truncation_side": "middle"},
    ],
)
def test_what_is_refused(server, body: Any) -> None:
    error = assert_error(server.post("/v1/completions", {"prompt": WORDS} | body), 400)
    assert error["param"] in (*body, "truncate_prompt_tokens")


def mean_logprob(prompt: Sequence[int], tokens: Sequence[int]) -> float:
    model, seen, total = TinyModel(), [*prompt], 0.0
    for token in tokens:
        total += model.dense_logits(seen).log_softmax(0)[token].item()
        seen.append(token)
    return total / len(tokens)


@pytest.mark.parametrize("n", [1, 2])
def test_the_best_of_several(server, n: int) -> None:
    """By the mean of their tokens: a sum would prefer short ones. All of them are counted."""
    body = {"prompt": [[1, 2, 3], [4]], "seed": 3, "max_tokens": 9, "return_token_ids": True}
    body["stop_token_ids"] = [*range(12)]
    every = server.complete(**body, n=6)
    answer = server.complete(**body, n=n, best_of=6)
    assert answer["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    found = [choice["token_ids"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * n))
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    want = []
    for prompt, first in (([1, 2, 3], 0), ([4], 6)):
        own = [choice["token_ids"] for choice in every["choices"][first : first + 6]]
        assert len({len(tokens) for tokens in own}) > 1
        want += sorted(own, key=lambda ids, prompt=prompt: -mean_logprob(prompt, ids))[:n]
    assert found == want
    # those who ask for log probabilities have as many as they asked for
    (first, *_) = server.complete(**body, n=n, best_of=6, logprobs=2)["choices"]
    assert first["token_ids"] == found[0]
    assert len(first["logprobs"]["top_logprobs"][0]) in (2, 3)


@pytest.mark.parametrize(
    "body", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 129}]
)
def test_what_cannot_be_chosen(server, body: Any) -> None:
    answer = server.post("/v1/completions", {"prompt": "a"} | body)
    assert assert_error(answer, 400)["param"] == "best_of"
