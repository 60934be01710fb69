"""Ollama's API over the same service: what its clients read, and what is refused."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from specc.runtime.requests.chat_template import ChatTemplate
from tests.specc.server.scripted import TEMPLATE
from tests.specc.server.serving import MODEL, Server, greedy_text, serve
from tests.specc.server.test_tools import ADD, CALL, NOW, OTHER, TEXT

CHAT, GENERATE, PROMPT = "/api/chat", "/api/generate", "hello world"
USER = {"role": "user", "content": "hi"}
OPTIONS = {"temperature": 0, "num_predict": 12}
CALLS = [
    {"function": {"name": "add", "arguments": {"x": 1, "y": 2}}},
    {"function": {"name": "now", "arguments": {}}},
]


def ask(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, {"model": MODEL, "options": OPTIONS, "stream": False} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """Streams are what there is without `stream`."""
    answer = server.post(path, {"model": MODEL, "options": OPTIONS} | body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def check_end(end: dict[str, Any], num_prompt: int, num_output: int, reason: str) -> None:
    assert (end["done"], end["done_reason"]) == (True, reason)
    assert (end["prompt_eval_count"], end["eval_count"]) == (num_prompt, num_output)
    total = end["load_duration"] + end["prompt_eval_duration"] + end["eval_duration"]
    assert end["total_duration"] == pytest.approx(total, abs=2)
    assert min(end["prompt_eval_duration"], end["eval_duration"]) > 0
    assert datetime.fromisoformat(end["created_at"]).tzinfo is not None


def test_chats(server) -> None:
    whole = ask(server, CHAT, messages=[USER])
    want = greedy_text(server.engine, "uhi A", 12)
    assert whole["message"] == {"role": "assistant", "content": want}
    assert whole["model"] == MODEL
    check_end(whole, 5, 12, "length")
    *parts, end = stream(server, CHAT, messages=[USER], model=f"{MODEL}:latest")
    assert len(parts) > 1
    assert "".join(part["message"]["content"] for part in parts) == want
    assert {part["done"] for part in parts} == {False}
    assert end["message"] == {"role": "assistant", "content": ""}
    assert end["model"] == f"{MODEL}:latest"
    check_end(end, 5, 12, "length")
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": PROMPT, "raw": True}, PROMPT),
        ({"prompt": PROMPT}, f"u{PROMPT} A"),
        ({"prompt": PROMPT, "system": "be brief"}, f"sbe brief u{PROMPT} A"),
    ],
)
def test_prompts(server, body: Any, prompt: str) -> None:
    whole = ask(server, GENERATE, **body)
    assert whole["response"] == greedy_text(server.engine, prompt, 12)
    check_end(whole, len(prompt), 12, "length")
    *parts, end = stream(server, GENERATE, **body)
    assert "".join(part["response"] for part in parts) == whole["response"]
    assert end["response"] == ""
    check_end(end, len(prompt), 12, "length")


def test_a_model_without_a_template_reads_prompts_as_they_are() -> None:
    with serve(template=None) as server:
        want = greedy_text(server.engine, PROMPT, 12)
        assert ask(server, GENERATE, prompt=PROMPT)["response"] == want
        answer = server.post(GENERATE, {"model": MODEL, "prompt": PROMPT, "system": "s"})
        assert (answer.status_code, "--chat-template" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("whole", [True, False])
def test_thinking_and_calls(rig, whole: bool) -> None:
    """In steps of 1 to 8 tokens; calls are told whole, with objects for arguments."""
    server, script = rig
    prompt = ChatTemplate(TEMPLATE, {}).render([USER], options={"tools": [ADD, NOW]})
    script.set(TEXT, prompt, whole)
    body = {"messages": [USER], "tools": [ADD, NOW], "options": {"temperature": 0}}
    message = ask(server, CHAT, **body)["message"]
    assert message["thinking"].strip() == "add, 🙂"
    assert message["content"].strip() == "I add."
    assert message["tool_calls"] == CALLS
    *parts, end = stream(server, CHAT, **body)
    for name in ("thinking", "content"):
        assert "".join(part["message"].get(name, "") for part in parts) == message[name]
    assert [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]] == [
        CALLS
    ]
    assert end["done_reason"] == "stop"


def test_a_call_that_is_cut_is_none(rig) -> None:
    server, script = rig
    prompt = ChatTemplate(TEMPLATE, {}).render([USER], options={"tools": [ADD, NOW]})
    script.set(f"{OTHER}\n{CALL}", prompt)
    body = {"messages": [USER], "tools": [ADD, NOW]}
    for num_tokens in (60, 70, 80):
        body["options"] = {"temperature": 0, "num_predict": num_tokens}
        answer = ask(server, CHAT, **body)
        assert answer["done_reason"] == "length"
        assert answer["message"]["tool_calls"] == CALLS[1:]
        *parts, _ = stream(server, CHAT, **body)
        assert parts[-1]["message"]["tool_calls"] == CALLS[1:]


def test_what_the_template_gets(rig, monkeypatch) -> None:
    """Calls and the answers to them have ids, whatever Ollama's clients leave out."""
    server, script = rig
    conversation = [
        USER,
        {"role": "assistant", "content": "", "thinking": "add", "tool_calls": CALLS},
        {"role": "tool", "tool_name": "add", "content": "3"},
        {"role": "tool", "tool_name": "now", "content": "noon"},
    ]
    calls = [{"id": f"call_1_{i}", "type": "function"} | call for i, call in enumerate(CALLS)]
    theirs = [
        USER,
        {"role": "assistant", "content": "", "thinking": "add", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "call_1_0", "name": "add"},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1_1", "name": "now"},
    ]
    script.set("ok", ChatTemplate(TEMPLATE, {}).render(theirs))
    prompts, make = [], server.service.core.requests.make

    def seen(prompt: Any, *given: Any, **options: Any) -> Any:
        prompts.append(made := make(prompt, *given, **options))
        return made

    monkeypatch.setattr(server.service.core.requests, "make", seen)
    answer = ask(server, CHAT, messages=conversation)
    assert answer["message"]["content"] == "ok"
    found = server.post("/tokenize", {"messages": theirs}).json()
    assert answer["prompt_eval_count"] == found["count"]
    (request,) = prompts
    assert request.token_ids[: request.num_prompt_tokens] == found["tokens"]


def test_how_much_it_thinks() -> None:
    template = "{{ messages[0].content }}{{ enable_thinking }}{{ reasoning_effort }}"
    with serve(template=template) as server:
        for think, text in ((None, ""), (True, "True"), (False, "False"), ("low", "Truelow")):
            answer = ask(server, CHAT, messages=[USER], think=think)
            assert answer["prompt_eval_count"] == len("hi" + text)


def test_options_mean_what_they_mean_elsewhere(server) -> None:
    options = {"seed": 5, "temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.01}
    own = {"num_predict": 9, "repeat_penalty": 1.3, "repeat_last_n": -1, "stop": ["q"]}
    theirs = {"max_tokens": 9, "repetition_penalty": 1.3, "stop": ["q"]}
    want = server.complete(prompt=PROMPT, **options, **theirs)["choices"][0]["text"]
    idle = {"num_ctx": 96, "num_gpu": 1, "mirostat": 0, "num_thread": 8, "penalize_newline": False}
    body = {"prompt": PROMPT, "raw": True, "options": options | own | idle, "keep_alive": "5m"}
    assert ask(server, GENERATE, **body)["response"] == want
    # without a number, up to the end of the context
    answer = ask(server, GENERATE, prompt=PROMPT, raw=True, options={"temperature": 0, "stop": []})
    assert answer["eval_count"] == 96 - 11 or answer["done_reason"] == "stop"


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {}}])
def test_forms(rig, form: Any) -> None:
    server, script = rig
    script.set("{}", ChatTemplate(TEMPLATE, {}).render([USER]))
    assert json.loads(ask(server, CHAT, messages=[USER], format=form)["message"]["content"]) == {}


def test_salts_part_callers(server) -> None:
    body = {"prompt": "zyxwvutsrqponmlkjihgfedcba", "raw": True}

    def cached(**more: Any) -> int:
        stats = server.service.core.scheduler.stats
        before = stats.num_cached_tokens
        ask(server, GENERATE, **body, **more)
        return int(stats.num_cached_tokens - before)

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert min(cached(), cached(cache_salt="a")) > 0


def test_loading_and_names(server) -> None:
    for path, body in ((CHAT, {}), (CHAT, {"messages": []}), (GENERATE, {})):
        answer = ask(server, path, **body)
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    names = [model["model"] for model in server.get("/api/tags").json()["models"]]
    assert names == [MODEL, "other"]


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (CHAT, {"messages": [USER | {"images": ["aGk="]}]}, "images"),
        (CHAT, {"messages": [USER], "logprobs": True}, "logprobs"),
        (CHAT, {"messages": [USER], "format": "xml"}, "format"),
        (CHAT, {"messages": [USER], "think": "much"}, "think"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": [USER], "options": {"mirostat": 2}}, "mirostat"),
        (CHAT, {"messages": [USER], "options": {"num_ctx": 97}}, "num_ctx=97"),
        (CHAT, {"messages": [USER], "options": {"num_predict": 0}}, "No tokens"),
        (CHAT, {"messages": [USER], "options": {"repeat_penalty": 1.1}}, "repeat_last_n=-1"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix"),
        (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "a", "context": [1]}, "context"),
        (GENERATE, {"prompt": "a", "images": ["aGk="]}, "images"),
        (GENERATE, {"prompt": "a" * 96, "raw": True}, "maximum context length"),
    ],
)
def test_what_is_refused(server, path: str, body: Any, word: str) -> None:
    answer = server.post(path, {"model": MODEL} | body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert word in answer.json()["error"]


def test_unknown_names_and_keys(server) -> None:
    answer = server.post(CHAT, {"model": "gpt", "messages": [USER]})
    assert answer.status_code == 404
    assert "gpt" in answer.json()["error"]
    with serve(strict_fields=True, api_keys=("one",)) as other:
        headers = {"authorization": "Bearer one"}
        for path, body in ((CHAT, {"messages": [USER]}), (GENERATE, {"prompt": "a"})):
            body |= {"model": MODEL, "options": OPTIONS, "keep_alive": "5m"}
            assert other.post(path, body).status_code == 401
            assert other.post(path, body, headers=headers).status_code == 200
            assert other.post(path, body | {"x": 1}, headers=headers).status_code == 400
            wrong = body | {"options": {"num_predikt": 5}}
            assert other.post(path, wrong, headers=headers).status_code == 400
        assert other.get("/api/tags").status_code == 401
