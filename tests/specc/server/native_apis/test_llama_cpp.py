"""llama.cpp's API over the same service: what its clients read, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runtime.conftest import EOS, TinyModel
from tests.specc.server.serving import Server, greedy_ids, greedy_text, serve
from tests.specc.server.test_tokenizing import serve_with_bos

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PATH, PROMPT = "/completion", "hello world"
GREEDY = {"temperature": 0, "n_predict": 12}


def complete(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post(PATH, {"prompt": PROMPT} | GREEDY | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    answer = server.post(PATH, {"prompt": PROMPT, "stream": True} | GREEDY | body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in answer.text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_the_whole_answer(server) -> None:
    answer = complete(server, return_tokens=True)
    assert list(answer) == [
        "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted",
        "tokens_evaluated", "generation_settings", "prompt", "truncated", "stop_type",
        "stopping_word", "timings", "tokens_cached",
    ]  # fmt: skip
    assert answer["content"] == greedy_text(server.engine, PROMPT, 12)
    assert answer["tokens"] == greedy_ids(server.engine, PROMPT, 12)
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (12, 11)
    assert (answer["prompt"], answer["model"]) == (PROMPT, "tiny")
    settings, timings = answer["generation_settings"], answer["timings"]
    assert (settings["n_predict"], settings["temperature"], settings["seed"]) == (12, 0, -1)
    assert (timings["prompt_n"], timings["predicted_n"]) == (11, 12)
    assert timings["prompt_ms"] > 0 < timings["predicted_ms"]
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    assert complete(server)["tokens"] == []


def test_its_stream(server) -> None:
    *parts, end = stream(server)
    whole = complete(server)
    assert len(parts) > 1
    assert all(not part["stop"] for part in parts)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [i for part in parts for i in part["tokens"]] == greedy_ids(server.engine, PROMPT, 12)
    assert (end["stop"], end["content"], end["tokens"]) == (True, "", [])
    assert (end["stop_type"], end["tokens_predicted"]) == ("limit", 12)
    assert end.keys() == whole.keys()


def test_why_it_stops(server) -> None:
    text = greedy_text(server.engine, PROMPT, 12)
    answer = complete(server, stop=[text[4:6], "not there"])
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", text[4:6])
    assert answer["content"] == text[: text.index(text[4:6])]
    # without a number, up to the end of the context
    answer = complete(server, n_predict=None, ignore_eos=True)
    assert answer["tokens_predicted"] == 96 - 11
    answer = complete(server, n_predict=-1, logit_bias=[[EOS, 100]])
    assert (answer["stop_type"], answer["content"]) == ("eos", "")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_probabilities(server, is_streamed: bool) -> None:
    parts = stream(server, n_probs=2) if is_streamed else [complete(server, n_probs=2)]
    rows = [row for part in parts for row in part.get("completion_probabilities", ())]
    ids = [*server.engine.tokenizer.encode(PROMPT).ids]
    want = greedy_ids(server.engine, PROMPT, 12)
    assert [row["id"] for row in rows] == want
    model = TinyModel()
    for row, token in zip(rows, want, strict=True):
        scores = model.dense_logits(ids).log_softmax(0)
        assert row["logprob"] == pytest.approx(scores[token].item(), abs=1e-4)
        best = [(top["id"], top["logprob"]) for top in row["top_logprobs"]]
        values, tokens = scores.topk(2)
        assert [other for other, _ in best] == tokens.tolist()
        assert [score for _, score in best] == pytest.approx(values.tolist(), abs=1e-4)
        ids.append(token)


def test_options_mean_what_they_mean_elsewhere(server) -> None:
    options = {"seed": 5, "temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.01}
    own = {"n_predict": 9, "repeat_penalty": 1.3, "repeat_last_n": -1}
    theirs = {"max_tokens": 9, "repetition_penalty": 1.3}
    want = server.complete(prompt=PROMPT, **options, **theirs)["choices"][0]["text"]
    assert complete(server, **options, **own)["content"] == want
    assert complete(server, **options, **own | {"repeat_penalty": 1})["content"] != want
    # token ids, and options that change nothing here
    ids = server.engine.tokenizer.encode(PROMPT).ids
    idle = {"cache_prompt": True, "id_slot": 0, "mirostat": 0, "typical_p": 1.0, "n_keep": 4}
    assert complete(server, prompt=ids, **idle)["content"] == complete(server)["content"]


def test_forms(server) -> None:
    grammar = 'root ::= "ab" | "cd"'
    assert complete(server, grammar=grammar)["content"] in ("ab", "cd")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"n_predict": 0}, "No tokens"),
        ({"n_predict": -2}, "n_predict"),
        ({"mirostat": 1}, "mirostat"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"dry_multiplier": 0.5}, "dry_multiplier"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"n_cmpl": 2}, "n_cmpl"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"repeat_penalty": 1.1}, "repeat_last_n=-1"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n=-1"),
        ({"prompt": ["ab", "c"]}, "2 prompts"),
        ({"prompt": [1, "c"]}, "prompt"),
        ({"logit_bias": [[5, False]]}, "logit_bias"),
        ({"logit_bias": [["a", 1]]}, "logit_bias"),
        ({"n_probs": 21}, "n_probs"),
        ({"temperature": -1}, "temperature"),
        ({"prompt": "a" * 96}, "maximum context length"),
        # a text, and no token
        ({"logit_bias": [["5", 1]]}, "logit_bias"),
    ],
)
def test_what_is_refused(server, body: Any, word: str) -> None:
    answer = server.post(PATH, {"prompt": PROMPT} | body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert list(error) == ["code", "message", "type"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert word in error["message"]


def test_unknown_fields_and_keys() -> None:
    with serve(strict_fields=True, api_keys=("one",)) as server:
        headers = {"authorization": "Bearer one"}
        body = {"prompt": PROMPT} | GREEDY
        for path in (PATH, "/props"):
            assert server.http.request("POST", server.base + path, json=body).status_code == 401
        assert server.get("/props").status_code == 401
        assert server.post(PATH, body | {"n_predikt": 5}, headers=headers).status_code == 400
        assert server.post(PATH, body, headers=headers).status_code == 200
    with serve() as server:
        assert complete(server, n_predikt=5)["content"]


def test_salts_part_callers(server) -> None:
    def cached(**more: Any) -> int:
        return int(complete(server, prompt="abcdefghijklmnopqrstuvwxyz", **more)["tokens_cached"])

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert min(cached(), cached(cache_salt="a")) > 0


def test_callers_with_keys_learn_nothing_of_each_other() -> None:
    """What others have sent shows in tokens of the cache, and in what drafts know."""
    with serve(api_keys=("one", "two")) as server:
        headers = {"authorization": "Bearer one"}
        answer = server.post(PATH, {"prompt": PROMPT} | GREEDY, headers=headers).json()
    assert (answer["tokens_predicted"], answer["timings"]["predicted_n"]) == (12, 12)
    assert "tokens_cached" not in answer
    assert not {"draft_n", "draft_n_accepted"} & answer["timings"].keys()


def test_props_and_health() -> None:
    with serve_with_bos("{{ messages }}") as server:
        found = server.get("/props").json()
        assert found["default_generation_settings"]["n_ctx"] == 96
        assert (found["total_slots"], found["model_alias"]) == (3, "tiny")
        assert found["chat_template"] == "{{ messages }}"
        assert server.get("/health").json() == {"status": "ok"}
        # the prompt as it was run
        assert complete(server)["prompt"] == f" {PROMPT}"
