"""/tokenize, /detokenize and /load: what vLLM's answers hold, and the tokens that requests have."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from tests.runtime.conftest import EOS, build_engine
from tests.specc.server.serving import GREEDY, Server, assert_error, serve, slow_down, wait_for

# a letter is its place in the alphabet, behind a BOS that the tokenizer adds
BOS = 59
WORDS = "abcdefghij"
IDS = [BOS, *range(10)]
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
    "{% if tools %}T{{ tools | length }}{% endif %}{{ mood or '' }}"
    "{% if add_generation_prompt %}A{% endif %}"
)


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="Ġ $A", special_tokens=[("Ġ", BOS)]
    )
    return tokenizer


@contextlib.contextmanager
def serve_with_bos(template: str = TEMPLATE) -> Iterator[Server]:
    engine = build_engine(eos=(EOS,))
    assert engine.tokenizer is not None
    with_bos(engine.tokenizer)
    with serve(engine, template) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_with_bos() as running:
        yield running


def tokenize(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_texts(server) -> None:
    found = tokenize(server, model="tiny", prompt=WORDS)
    assert list(found.items()) == [
        ("count", 11), ("max_model_len", 96), ("tokens", IDS), ("token_strs", None),
    ]  # fmt: skip
    assert tokenize(server, prompt=WORDS, add_special_tokens=False)["tokens"] == IDS[1:]
    found = tokenize(server, prompt="a b", return_token_strs=True)
    assert found["token_strs"] == ["Ġ", "a", "Ġ", "b"]
    assert tokenize(server, prompt="")["tokens"] == [BOS]
    # a text that no request could have
    found = tokenize(server, prompt="ab" * 50_000, return_token_strs=True)
    assert (found["count"], found["tokens"]) == (100_001, [BOS, *[0, 1] * 50_000])
    assert found["token_strs"] == ["Ġ", *"ab" * 50_000]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "uhiA"),
        ({"add_generation_prompt": False}, "uhi"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "uhi"),
        ({"tools": TOOLS}, "uhiT1A"),
        ({"chat_template_kwargs": {"mood": "x"}}, "uhixA"),
        ({"add_special_tokens": True}, " uhiA"),
    ],
)
def test_chats_have_the_tokens_that_they_are_answered_with(server, options, text) -> None:
    found = tokenize(server, messages=USER, return_token_strs=True, **options)
    assert "".join(found["token_strs"]) == text.replace(" ", "Ġ")
    body = {"messages": USER, "return_token_ids": True, "tool_choice": "none"} | options | GREEDY
    answer = server.post("/v1/chat/completions", body)
    assert answer.json()["prompt_token_ids"] == found["tokens"]


def test_back(server) -> None:
    assert server.post("/detokenize", {"tokens": [7, 4, 59, EOS]}).json() == {"prompt": "he <eos>"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    for wrong in ([61], [-1]):
        error = assert_error(server.post("/detokenize", {"tokens": wrong}), 400, str(wrong[0]))
        assert error["param"] == "tokens"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"prompt": "a" * (2 << 20)}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_what_is_refused(server, path: str, body: Any, param: str) -> None:
    assert assert_error(server.post(path, body), 400)["param"] == param


def test_info(server) -> None:
    """What lm-eval's tokenizer over HTTP asks for."""
    found = server.get("/tokenizer_info").json()
    assert found["eos_token"] == "<eos>"
    assert found["bos_token"] is found["pad_token"] is None
    assert found["chat_template"] == TEMPLATE


def test_names_and_keys() -> None:
    engine = build_engine()
    engine.tokenizer = None
    with serve(engine, api_keys=("one",), strict_fields=True) as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert_error(server.post(path, body), 401)
            headers = {"authorization": "Bearer one"}
            assert_error(server.post(path, body | {"model": "gpt"}, headers=headers), 404, "gpt")
            assert_error(server.post(path, body, headers=headers), 400, "tokenizer")
            error = assert_error(server.post(path, body | {"x": 1}, headers=headers), 400)
            assert error["code"] == "unknown_parameter"
        assert_error(server.get("/tokenizer_info"), 401)


def test_load(server) -> None:
    """Requests, not their outputs; those that only tokenize are none."""
    assert server.get("/load").json() == {"server_load": 0}
    undo = slow_down(server, 0.05)
    body = {"prompt": "ab", "n": 2, "max_tokens": 60, "ignore_eos": True}
    threads = [
        threading.Thread(target=server.post, args=("/v1/completions", body | {"stream": stream}))
        for stream in (True, False)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.get("/load").json() == {"server_load": 2}, "they are not counted")
    tokenize(server, prompt="a")
    undo()
    for thread in threads:
        thread.join()
    wait_for(lambda: server.get("/load").json() == {"server_load": 0}, "one is still counted")
