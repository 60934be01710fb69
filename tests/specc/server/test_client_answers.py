"""What clients of OpenAI and vLLM read in answers without having asked for it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.specc.server.serving import GREEDY, MODEL, assert_error, serve
from tests.specc.server.test_api import events
from tests.specc.server.test_clients import BODIES, CHATS, COMPLETIONS, USER, ask, text_of


@pytest.mark.parametrize("stream", [False, True])
def test_what_vllms_clients_read_is_there(server, stream: bool) -> None:
    """As attributes, null where there is nothing, in every chunk."""
    more = {"stream": stream, "extra_body": {"x": 1}} | GREEDY
    chat = server.client.chat.completions.create(model=MODEL, messages=USER, **more)
    text = server.client.completions.create(model=MODEL, prompt="ab", **more)
    for answer in [*chat, *text] if stream else [chat, text]:
        assert (answer.system_fingerprint, answer.service_tier) == (None, None)
        (choice,) = answer.choices
        assert choice.token_ids is None
        assert choice.stop_reason is None
        holder = choice if hasattr(choice, "text") else answer
        assert holder.prompt_token_ids is None
        if not stream:
            assert answer.kv_transfer_params is None
            assert holder.prompt_logprobs is None
    if not stream:
        message = chat.choices[0].message
        unused = (message.reasoning, message.reasoning_content, message.refusal, message.audio,
                  message.function_call, message.annotations)  # fmt: skip
        assert unused == (None,) * 6


@pytest.mark.default("/v1/chat/completions")
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_requests_have_ids(server, path: str) -> None:
    prefix = "cmpl-" if path == COMPLETIONS else "chatcmpl-"
    body = BODIES[path] | GREEDY
    for stream in (False, True):

        def post(stream: bool = stream, **more: Any) -> tuple[str, str]:
            headers = more.pop("headers", {})
            answer = server.post(path, body | {"stream": stream} | more, headers=headers)
            first = events(answer.text)[0] if stream else answer.json()
            return first["id"], answer.headers["x-request-id"]

        assert post(headers={"X-Request-Id": "a b/1"}) == (f"{prefix}a b/1", "a b/1")
        assert post(request_id="mine") == (f"{prefix}mine", f"{prefix}mine")
        found = post(request_id="mine", headers={"x-request-id": "theirs"})
        assert found == (f"{prefix}theirs", "theirs")
        for wrong in (
            {},
            {"headers": {"x-request-id": "a" * 257}},
            {"headers": {"x-request-id": b"\xe9"}},
        ):
            own, header = post(**wrong)
            assert own == header
            assert own.startswith(prefix)
            assert len(own) == len(prefix) + 32
    for wrong in ("", "é", "a" * 257, 5):
        assert_error(server.post(path, body | {"request_id": wrong}), 400, param="request_id")
    # two of a name at a time are no matter
    headers = {"x-request-id": "same"}
    assert server.post(path, body | {"n": 3}, headers=headers).status_code == 200


@pytest.mark.default("True")
@pytest.mark.parametrize("is_on", [False, True])
def test_ids_of_other_responses(is_on: bool) -> None:
    with serve(enable_request_id_headers=is_on) as server:
        for path in ("/health", "/v1/models", "/nothing"):
            headers = server.get(path, headers={"X-Request-Id": "mine"}).headers
            assert headers.get("x-request-id") == ("mine" if is_on else None)
            assert len(server.get(path).headers.get("x-request-id", "")) == (32 if is_on else 0)
        answer = server.post(COMPLETIONS, {"prompt": ""}, headers={"X-Request-Id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
        answer = server.post(COMPLETIONS, {"prompt": "a"}, headers={"X-Request-Id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]


GETS = ("/health", "/ping", "/version", "/load", "/metrics", "/stats", "/", "/openapi.json",
        "/v1/models", f"/v1/models/{MODEL}", "/tokenizer_info")  # fmt: skip


def test_head_and_trailing_slashes(server) -> None:
    for path in GETS:
        full = server.get(path)
        assert full.status_code == 200
        head = server.http.request("HEAD", server.base + path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == full.headers["content-type"]
        slashed = server.http.get(f"{server.base}{path}/", follow_redirects=False)
        assert slashed.status_code == 200
    for path, body in BODIES.items():
        answer = server.post(f"{path}/", body | GREEDY, follow_redirects=False)
        assert text_of(answer.json()) == ask(server, path)
        head = server.http.request("HEAD", server.base + path)
        assert (head.status_code, head.headers["allow"]) == (405, "POST")
    assert server.http.request("HEAD", f"{server.base}/nothing").status_code == 404


def test_keys_are_asked_for_whatever_the_path_ends_with() -> None:
    with serve(api_keys=("one",)) as server:
        for path in ("/v1/models", "/v1/models/", "/v1//", "/v1/completions//"):
            assert server.get(path).status_code == 401
            assert server.http.request("HEAD", server.base + path).status_code == 401


def test_the_token_that_ends_a_chat_comes_without_content(server) -> None:
    """Clients put texts together from the tokens of chunks with content, whatever they say."""
    ends = set()
    for seed in range(6):
        stream = server.client.chat.completions.create(
            model=MODEL, messages=USER, stream=True, logprobs=True, temperature=1, seed=seed,
            extra_body={"structured_outputs": {"regex": "[ab]{4}"}, "return_token_ids": True},
        )  # fmt: skip
        choices = [chunk.choices[0] for chunk in stream]
        said = [choice for choice in choices if choice.delta.content]
        content = "".join(choice.delta.content for choice in said)
        assert re.fullmatch("[ab]{4}", content)
        tokens = [token.token for choice in said for token in choice.logprobs.content]
        assert "".join(tokens) == content
        (end,) = choices[-1].logprobs.content
        assert end.token not in content
        ends.add((choices[-1].delta.content, choices[-1].finish_reason))
        assert all(len(c.token_ids) == len(c.logprobs.content) for c in choices)
        assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    # beside text, and in a step of its own
    assert ends == {("", "stop"), (None, "stop")}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_usage_in_streams(server, path: str) -> None:
    """As with vLLM: in each chunk only for who wants it in the last one, too."""

    def usages(options: Any) -> list[bool | None]:
        body = BODIES[path] | GREEDY | {"stream": True, "stream_options": options}
        *chunks, done = events(server.post(path, body).text)
        assert done == "[DONE]"
        assert [bool(chunk["choices"]) for chunk in chunks[:-1]] == [True] * (len(chunks) - 1)
        last = bool(chunks[-1]["choices"])
        found = {
            chunk.get("usage", 0) is not None and bool(chunk.get("usage")) for chunk in chunks[:-1]
        }
        assert len(found) == 1
        return [found.pop(), not last]

    none, last, every = [False, False], [False, True], [True, True]
    for options, want in (
        (None, none),
        ({}, none),
        ({"include_usage": None, "continuous_usage_stats": None}, none),
        ({"include_usage": False, "continuous_usage_stats": True}, none),
        ({"include_usage": True}, last),
        ({"include_usage": True, "continuous_usage_stats": False}, last),
        ({"include_usage": True, "continuous_usage_stats": True}, every),
        ({"continuous_usage_stats": True}, every),
    ):
        assert usages(options) == want, options
    # options of no stream, which ask for nothing
    for options in ({}, {"include_usage": None}):
        assert ask(server, path, stream_options=options) == ask(server, path)
    answer = server.post(path, BODIES[path] | {"stream_options": {"include_usage": True}})
    assert_error(answer, 400, param="stream_options")
