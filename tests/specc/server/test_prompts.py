"""What answers say of prompts and tokens: log probabilities, ids, and limits that are null."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.conftest import TinyModel, build_engine
from tests.specc.server.serving import GREEDY, Server, greedy_ids, greedy_text, serve
from tests.specc.server.test_api import events

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PROMPT = "hello world"


@pytest.fixture(scope="module")
def scores(server) -> list[torch.Tensor]:
    """[V] of each token of the prompt and of its greedy output but the first."""
    model = TinyModel()
    tokens = [*ids_of(server), *greedy_ids(server.engine, PROMPT, 12)]
    return [model.dense_logits(tokens[:i]).log_softmax(0) for i in range(1, len(tokens))]


def ids_of(server: Server, text: str = PROMPT) -> list[int]:
    return server.engine.tokenizer.encode(text).ids


def check_prompt(found: list[Any], ids: list[int], scores: list[torch.Tensor], count: int) -> None:
    assert found[0] is None
    for token, entries, row in zip(ids[1:], found[1:], scores, strict=False):
        own = entries[str(token)]
        assert own["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        assert own["rank"] == 1 + int((row > row[token] + 1e-6).sum())
        assert set(map(str, row.topk(count).indices.tolist())) <= set(entries)
        assert token > 25 or own["decoded_token"] == chr(97 + token)
    assert len(found) == len(ids)


@pytest.mark.parametrize(
    ("of_prompt", "of_output"),
    [
        pytest.param(1, 3, marks=pytest.mark.slow),
        (3, 1),
        (0, 2),
        pytest.param(2, 0, marks=pytest.mark.slow),
    ],
)
def test_both_counts_of_candidates_hold(server, of_prompt: int, of_output: int) -> None:
    """A prompt's log probabilities in two places, each with as many candidates as asked for."""
    counts = {"prompt_logprobs": of_prompt, "logprobs": of_output}
    (both,) = server.complete(prompt=PROMPT, echo=True, **counts, **GREEDY)["choices"]
    (own,) = server.complete(prompt=PROMPT, prompt_logprobs=of_prompt, **GREEDY)["choices"]
    (echo,) = server.complete(prompt=PROMPT, echo=True, logprobs=of_output, **GREEDY)["choices"]
    assert both["prompt_logprobs"] == own["prompt_logprobs"]
    assert both["logprobs"] == echo["logprobs"]


def test_prompt_logprobs(server, scores) -> None:
    """vLLM's: of each choice of a completion, and beside the choices of a chat."""
    answer = server.complete(prompt=[PROMPT, "ab"], n=2, prompt_logprobs=2, **GREEDY)
    choices = answer["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [11, 11, 2, 2]
    check_prompt(choices[0]["prompt_logprobs"], ids_of(server), scores, 2)
    assert choices[1]["prompt_logprobs"] == choices[0]["prompt_logprobs"]
    assert choices[0]["text"] == greedy_text(server.engine, PROMPT, 12)
    assert choices[0]["logprobs"] is None
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0} | GREEDY
    chat = server.post("/v1/chat/completions", body).json()
    assert len(chat["prompt_logprobs"]) == len("uhi A")
    assert "prompt_logprobs" not in chat["choices"][0]
    assert server.complete(prompt="ab", **GREEDY)["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_beside_logprobs(server, scores, n: int, stream: bool) -> None:
    """Of the prompt and of the output, in one list; nothing comes before the first token."""
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "n": n, "stream": stream} | GREEDY
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    ids = [*ids_of(server), *greedy_ids(server.engine, PROMPT, 12)]
    texts = [server.engine.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    chunks = events(answer.text)[:-1] if stream else [answer.json()]
    for index in range(n):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        joined = {
            name: [x for part in parts for x in part["logprobs"][name]]
            for name in parts[0]["logprobs"]
        }
        assert joined["tokens"] == texts
        assert joined["text_offset"] == [sum(map(len, texts[:i])) for i in range(len(texts))]
        assert joined["token_logprobs"][0] is joined["top_logprobs"][0] is None
        want = [float(row[token]) for row, token in zip(scores, ids[1:], strict=True)]
        assert joined["token_logprobs"][1:] == pytest.approx(want, abs=1e-4)
        text = "".join(part["text"] for part in parts)
        assert text == PROMPT + greedy_text(server.engine, PROMPT, 12)


def test_a_prompt_alone(server, scores) -> None:
    """As evaluations ask for it: no output, and none is counted."""
    body = {"prompt": PROMPT, "echo": True, "logprobs": 0, "temperature": 0}
    answer = server.complete(max_tokens=0, **body)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    want = [float(row[token]) for row, token in zip(scores, ids_of(server)[1:], strict=False)]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(want, abs=1e-4)
    assert answer["usage"]["completion_tokens"] == 0
    for wrong in (body | {"stream": True}, {"prompt": PROMPT}):
        assert server.post("/v1/completions", wrong | {"max_tokens": 0}).status_code == 400


def test_no_limit(server) -> None:
    """-1 goes on to the end of the context, as at llama.cpp; null is 16, as without the field."""
    ids = [1] * 80
    options = {"prompt": ids, "temperature": 0, "ignore_eos": True}
    answer = server.complete(**options, max_tokens=-1)
    assert answer["usage"]["completion_tokens"] == 16
    short = [1] * 60
    for more in ({}, {"max_tokens": None}):
        answer = server.complete(**options | {"prompt": short}, **more)
        assert answer["usage"]["completion_tokens"] == 16
    answer = server.complete(**options | {"prompt": short}, max_tokens=-1)
    assert answer["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_token_ids(server, stream: bool) -> None:
    want = greedy_ids(server.engine, PROMPT, 12)
    body = {"prompt": PROMPT, "return_token_ids": True, "stream": stream} | GREEDY
    answer = server.post("/v1/completions", body)
    chunks = events(answer.text)[:-1] if stream else [answer.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == want
    assert choices[0]["prompt_token_ids"] == ids_of(server)
    assert all(choice["prompt_token_ids"] is None for choice in choices[1:])
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream} | GREEDY
    answer = server.post("/v1/chat/completions", body | {"return_token_ids": True})
    chunks = events(answer.text)[:-1] if stream else [answer.json()]
    found = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert found == greedy_ids(server.engine, "uhi A", 12)
    assert chunks[0]["prompt_token_ids"] == ids_of(server, "uhi A")
    assert all(chunk["prompt_token_ids"] is None for chunk in chunks[1:])
    for body in ({}, {"return_token_ids": False}):
        (choice,) = server.complete(prompt="ab", **body, **GREEDY)["choices"]
        assert (choice["token_ids"], choice["prompt_token_ids"]) == (None, None)


def test_n_shares_the_prompt(server) -> None:
    """One of four computes it; the others find all whole blocks but the last token's."""
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    before = server.service.state().stats.num_cached_tokens
    answer = server.complete(prompt=ids, n=4, seed=3, max_tokens=2)
    assert len(answer["choices"]) == 4
    server.wait_until_idle()
    assert server.service.state().stats.num_cached_tokens - before == 3 * 8


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
def test_what_is_refused(server, body, param) -> None:
    answer = server.post("/v1/completions", {"prompt": "ab"} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_engine_without_a_tokenizer_answers_with_ids() -> None:
    engine = build_engine()
    engine.tokenizer = None
    with serve(engine) as server:
        want = TinyModel().greedy([1, 2, 3], 8)
        body = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        for options in ({}, {"return_token_ids": True}):
            (choice,) = server.complete(**body, **options)["choices"]
            assert (choice["text"], choice["token_ids"]) == ("", want)
            assert choice["prompt_token_ids"] == [1, 2, 3]
        (choice,) = server.complete(**body, return_token_ids=False)["choices"]
        assert choice["token_ids"] is None
        answer = server.post("/v1/completions", body | {"stream": True})
        chunks = events(answer.text)[:-1]
        found = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert found == want
        (choice,) = server.complete(**body, prompt_logprobs=1, logprobs=1, echo=True)["choices"]
        assert len(choice["prompt_logprobs"]) == 3
        assert len(choice["logprobs"]["token_logprobs"]) == 11
        server.wait_until_idle()
