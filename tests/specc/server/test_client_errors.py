"""Errors as OpenAI's clients know them: the class, the code and the field to blame."""

from __future__ import annotations

import openai
import pytest

from tests.specc.server.serving import MODEL, assert_error, serve, slow_down

COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("size", [96, 5000, 100_000])
def test_a_prompt_that_does_not_fit_is_known_as_one(server, size: int) -> None:
    """By its code, for langchain, and by the words that litellm looks for."""
    client = server.client
    for param, call in (
        ("prompt", lambda: client.completions.create(model=MODEL, prompt="a" * size)),
        ("prompt", lambda: client.completions.create(model=MODEL, prompt=[[1], [1] * size])),
        ("messages", lambda: client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a" * size}]
        )),
        ("messages", lambda: client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a" * size}], stream=True
        )),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        error = caught.value
        assert (error.code, error.param, error.type) == (
            "context_length_exceeded", param, "invalid_request_error"
        )  # fmt: skip
        assert "This model's maximum context length is 96 tokens." in error.message
        assert f"reduce the length of the {param}" in error.message


def test_so_is_a_request_that_the_cache_cannot_hold(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.cache.allocator, "num_blocks", 16)
        error = assert_error(server.post(COMPLETIONS, {"prompt": ["a", "a" * 80]}), 400, "prompt 1")
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_errors_are_of_the_classes_that_clients_expect() -> None:
    with serve(api_keys=("one",), allowed_hosts=("here",), max_body_bytes=2000) as server:
        server.key = "one"
        # the same client, with other keys and names
        wrong_key = server.client.with_options(api_key="two")
        wrong_host = server.client.with_options(default_headers={"host": "elsewhere"})
        chat = {"model": MODEL, "messages": USER}
        for client, body, kind, code, param in (
            (server.client, {"n": 0}, openai.BadRequestError, "invalid_value", "n"),
            (server.client, {"n": "x"}, openai.BadRequestError, "invalid_type", "n"),
            (server.client, {"top_p": 2}, openai.BadRequestError, "invalid_value", "top_p"),
            (server.client, {"stop": ""}, openai.BadRequestError, "invalid_value", "stop"),
            (server.client, {"messages": []}, openai.BadRequestError, "invalid_value", "messages"),
            (server.client, {"messages": [{}]}, openai.BadRequestError,
             "missing_required_parameter", "messages.0.role"),
            (server.client, {"extra_body": {"suffix": "a"}}, openai.BadRequestError,
             "unsupported_parameter", "suffix"),
            (server.client, {"extra_body": {"cache_salt": ""}}, openai.BadRequestError,
             "invalid_value", "cache_salt"),
            (server.client, {"model": "x"}, openai.NotFoundError, "model_not_found", "model"),
            (wrong_key, {}, openai.AuthenticationError, "invalid_api_key", None),
            (wrong_host, {}, openai.PermissionDeniedError, "host_not_allowed", None),
            (server.client, {"user": "a" * 3000}, openai.APIStatusError, "request_too_large", None),
        ):  # fmt: skip
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(**chat | body)
            error = caught.value
            assert type(error) is kind, body
            assert (error.code, error.param) == (code, param), body
            assert error.request_id
        with pytest.raises(openai.NotFoundError):
            server.client.models.retrieve("x")
        with pytest.raises(openai.NotFoundError):
            server.client.embeddings.create(model=MODEL, input="a")


def test_a_busy_server_is_tried_again() -> None:
    with serve(max_waiting=1) as server:
        undo = slow_down(server, 0.05)
        with pytest.raises(openai.InternalServerError) as caught:
            server.client.completions.create(model=MODEL, prompt=["ab"] * 6, max_tokens=90)
        assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
        assert caught.value.response.headers["retry-after"] == "1"
        undo()
