"""What attacks the endpoints beside /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.attackers import (
    CHATS,
    COMPLETIONS,
    Attack,
    SlowRead,
    chained_rules,
    chained_schema,
    request,
)

MESSAGES, RESPONSES, LLAMA = "/v1/messages", "/v1/responses", "/completion"
OLLAMA_CHAT, OLLAMA_TEXT = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "a"}
WORDS = "def function(argument): return argument + 1\n"


def nested(depth: int = 60) -> dict[str, object]:
    """An object in an object in an object, …"""
    deep: dict[str, object] = {}
    for _ in range(depth):
        deep = {"a": deep}
    return deep


class Messages(Attack):
    """Conversations of Anthropic's form with blocks without end, in each of its lists."""

    name, num_workers = "messages", 3

    def prepare(self) -> list[bytes]:
        deep = nested()
        text = {"type": "text", "text": "a" * 300}
        call = {"type": "tool_use", "id": "1", "name": "f", "input": deep}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [text] * 7000}
        signature = "specc.text." + "QUFB" * 1_500_000
        thinking = {"type": "thinking", "thinking": "", "signature": signature}
        turns: list[list[tuple[str, object]]] = [
            [("user", [text] * 16_000)],
            [("user", [text] * 17_000)],  # more than a server takes
            [("user", "a"), ("assistant", "b")] * 4000,
            [("user", "a"), ("assistant", [call] * 200), ("user", [result])],
            [("user", "a"), ("assistant", [thinking]), ("user", "a")],
            [("user", [{"type": "image", "source": deep}] * 100)],
        ]
        tools = [{"name": f"f{i}", "input_schema": deep} for i in range(200)]
        choice = {"tools": tools, "tool_choice": {"type": "any"}}
        bodies = [
            {"model": "engine", "max_tokens": 4}
            | {"messages": [{"role": role, "content": content} for role, content in each]}
            | ({} if index else choice)
            for index, each in enumerate(turns)
        ]
        counts = [{name: body[name] for name in ("model", "messages")} for body in bodies]
        return [
            *(request(MESSAGES, body) for body in bodies),
            *(request(f"{MESSAGES}/count_tokens", body) for body in counts),
        ]


class Responses(Attack):
    """Items without end, responses that fill what is kept, long chains, and guessed ids."""

    name, num_workers = "responses", 3

    def prepare(self) -> list[bytes]:
        deep = nested()
        text = {"type": "input_text", "text": "a" * 300}
        call = {"type": "function_call", "name": "f", "call_id": "1", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "1", "output": [text] * 7000}
        thinking = {"type": "reasoning", "summary": [], "content": []}
        user = {"role": "user", "content": "a"}
        inputs: list[object] = [
            [user] * 16_000,
            [user] * 100_000,  # more than a server takes
            [user, *[thinking] * 7000],
            [user, *[call] * 7000, output],
            [{"role": "user", "content": [deep] * 200}],
            [{"type": "item_reference", "id": f"msg_{i:048x}i0"} for i in range(7000)],
            "a" * 4_000_000,
        ]
        tools = [{"type": "function", "name": f"f{i}", "parameters": deep} for i in range(200)]
        schema = {"type": "json_schema", "name": "a", "schema": chained_schema(5000)}
        options: list[dict[str, object]] = [
            {"tools": tools, "tool_choice": "required"},
            {"text": {"format": schema}},
            {"truncation": "auto", "input": [user] * 4000},
            {"previous_response_id": "resp_" + "0" * 48},
            # short to answer, and long to keep
            *(
                {"input": [user, *[thinking] * 1000], "metadata": {"a": "b" * 512}}
                for _ in range(20)
            ),
        ]
        bodies = [{"max_output_tokens": 4, "input": each} for each in inputs]
        bodies += [{"max_output_tokens": 4, "input": "a"} | each for each in options]
        paths = [f"{RESPONSES}/resp_{i:048x}" for i in range(8)]
        return [
            *(request(path, method=method) for path in paths for method in ("GET", "DELETE")),
            *(request(f"{path}/input_items?limit=100", method="GET") for path in paths),
            *(request(f"{path}/cancel") for path in paths),
            *(request(RESPONSES, body) for body in bodies),
        ]


class Tokens(Attack):
    """Texts and token ids without end, for what generates nothing; and prompts to be cut."""

    name, num_workers = "tokens", 3

    def prepare(self) -> list[bytes]:
        text = WORDS * (900_000 // len(WORDS))
        cut = {"max_tokens": 4, "truncate_prompt_tokens": 8}
        return [
            request("/tokenize", {"prompt": text, "return_token_strs": True}),
            request("/tokenize", {"prompt": text * 8}),  # more than a server takes
            request("/tokenize", {"prompt": "é" * 450_000}),
            request("/tokenize", {"messages": [USER] * 16_000}),
            request("/tokenize", {"messages": [USER], "tools": [nested()] * 200}),
            request("/tokenize", {"messages": [USER | {"loops": 90_000}]}),
            request("/detokenize", {"tokens": [1] * 2_500_000}),
            request("/detokenize", {"tokens": [1 << 62] * 1000}),
            request("/tokenizer_info", method="GET"),
            request(COMPLETIONS, {"prompt": text} | cut),
            request(COMPLETIONS, {"prompt": [1] * 1_000_000} | cut),
            request(CHATS, {"messages": [USER | {"content": text}]} | cut),
            *(
                request(COMPLETIONS, {"prompt": "a" * n, "prompt_logprobs": 20, "max_tokens": 1})
                for n in (100, 200)
            ),
            request(COMPLETIONS, {"prompt": ["a"] * 64, "best_of": 64, "max_tokens": 4}),
        ]


class OtherDoors(Attack):
    """Requests of llama.cpp's and Ollama's clients with whatever is long in them."""

    name, num_workers = "native APIs", 3

    def prepare(self) -> list[bytes]:
        schema = chained_schema(5000)
        rules = chained_rules(4000).replace(":", " ::=").replace("start", "root")
        many = {f"option_{i}": i for i in range(100_000)}
        tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": nested()}}
                 for i in range(200)]  # fmt: skip
        calls = [{"function": {"name": "f", "arguments": nested()}}] * 500
        llama: list[dict[str, object]] = [
            {"grammar": rules},
            {"json_schema": schema},
            {"prompt": WORDS * 100_000},
            {"prompt": [1] * 2_500_000},
            {"prompt": ["a"] * 100_000},
            {"logit_bias": [[1, 1]] * 200_000},
            {"stop": ["a"] * 100_000},
            {"n_predict": -1, "ignore_eos": True, "n_probs": 20},
            {"n_predict": 1 << 62},
            many,
        ]
        chats: list[dict[str, object]] = [
            {"messages": [USER] * 16_000},
            {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}, USER]},
            {"messages": [USER | {"images": ["a" * 1000] * 4000}]},
            {"messages": [USER], "tools": tools},
            {"messages": [USER], "format": schema},
            {"messages": [USER], "options": many},
            {"messages": [nested()] * 1000},
        ]
        texts: list[dict[str, object]] = [
            {"prompt": WORDS * 100_000, "raw": True},
            {"prompt": "a", "system": WORDS * 100_000},
            {"prompt": "a", "options": {"num_ctx": 1 << 62}},
            {"prompt": "a", "context": [1] * 1_000_000},
            {"prompt": "a", "keep_alive": -1},
            {},
        ]
        model = {"model": "engine", "stream": False, "options": {"num_predict": 4}}
        return [
            *(request(LLAMA, {"prompt": "a", "n_predict": 4} | each) for each in llama),
            *(request(OLLAMA_CHAT, model | each) for each in chats),
            *(request(OLLAMA_TEXT, model | each) for each in texts),
            *(request(path, method="GET") for path in ("/props", "/api/tags")),
        ]


class Predictions(Attack):
    """Predictions that are long, wrong, of many parts, or of many outputs; and salts."""

    name, num_workers = "predictions", 3

    def prepare(self) -> list[bytes]:
        part = {"type": "text", "text": "a" * 30}
        contents: list[object] = [
            WORDS * 100_000,
            "é" * 1_200_000,
            [part] * 100_000,
            [nested()] * 1000,
            # as long as an engine takes, and never right
            *("".join(chr(97 + (i * i + j) % 26) for i in range(200)) for j in range(4)),
        ]
        chat = {"messages": [USER], "max_tokens": 60, "ignore_eos": True}
        bodies: list[dict[str, object]] = [
            chat | {"prediction": {"type": "content", "content": content}, "n": 1 + index % 8}
            for index, content in enumerate(contents)
        ]
        # more salts than are kept, with outputs of each
        bodies += [chat | {"cache_salt": f"salt {i}"} for i in range(80)]
        bodies.append(chat | {"cache_salt": "a" * 1_000_000})
        return [request(CHATS, body) for body in bodies]


class Operators(Attack):
    """What the operator alone may ask, with keys that are guessed, or none."""

    name, num_workers = "operators", 3

    def prepare(self) -> list[bytes]:
        reload, paths = "/v1/drafts/reload", ("/dev/zero", "../../../etc/passwd", "a" * 4_000_000)
        asked: list[tuple[str, Any]] = [
            *((reload, {"path": path}) for path in paths),
            (reload, {"path": "a", "draft": nested()}),
            *((f"/sleep?level={level}", None) for level in ("1", "2", "9" * 4000)),
            ("/wake_up?" + "&".join(["tags=weights"] * 1000), None),
        ]
        keys = (None, "", "operator", "a" * 4000)
        return [request(path, body, key=key) for path, body in asked for key in keys]


class SlowReadMessages(SlowRead):
    """Messages whose events nobody reads."""

    name, path = "slow-read messages", MESSAGES
    body: ClassVar[dict[str, Any]] = {
        "model": "engine",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 500,
    }


class SlowReadResponses(SlowRead):
    """Responses whose events nobody reads."""

    name, path = "slow-read responses", RESPONSES
    body: ClassVar[dict[str, Any]] = {"input": "a", "max_output_tokens": 500}


class SlowReadLlama(SlowRead):
    """Answers of llama.cpp's form that nobody reads, in events with probabilities."""

    name, path = "slow-read completion", LLAMA
    body: ClassVar[dict[str, Any]] = {"prompt": "a", "n_predict": 500, "n_probs": 20}


class SlowReadOllama(SlowRead):
    """Chats of Ollama's form that nobody reads, in lines of JSON."""

    name, path = "slow-read ollama", OLLAMA_CHAT
    body: ClassVar[dict[str, Any]] = {
        "model": "engine",
        "messages": [USER],
        "options": {"num_predict": 500, "temperature": 0},
    }
