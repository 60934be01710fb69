"""The OpenAI client against a server: completions, chats, streams, and the shapes of answers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tokenizers import processors

from specc.sampling.generation_config import SamplingDefaults
from specc.sampling.params import SamplingParams
from specc.server.params import completion_params
from specc.server.protocol import CompletionRequest, parse
from tests.runtime.conftest import build_engine
from tests.specc.server.serving import GREEDY, MODEL, Server, alone, greedy_ids, greedy_text, serve

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PROMPT = "hello world"


@pytest.fixture(scope="module")
def library() -> Any:
    """An engine of the same models, for what a request gives by itself."""
    return build_engine(eos=(60,))


def events(text: str) -> list[Any]:
    """The data of a stream's events, `[DONE]` as it is."""
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_models(server) -> None:
    models = server.client.models.list().data
    assert [model.id for model in models] == [MODEL, "other"]
    assert (models[0].object, models[0].owned_by, models[0].max_model_len) == ("model", "specc", 96)
    assert server.client.models.retrieve("other").id == "other"


def test_a_completion_is_the_targets_own(server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY)
    (choice,) = answer.choices
    assert choice.text == greedy_text(server.engine, PROMPT, 12)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (11, 12, 23)
    assert answer._request_id == answer.id


def test_a_chat_is_the_templates_prompt(server) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    answer = server.client.chat.completions.create(model=MODEL, messages=messages, **GREEDY)
    (choice,) = answer.choices
    # the first letter of each role, its text, and where the assistant begins
    assert choice.message.content == greedy_text(server.engine, "sbe brief uhi A", 12)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == 15


def test_a_chat_may_fill_the_context(server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["usage"]["total_tokens"] == 96
    assert answer["choices"][0]["finish_reason"] == "length"
    body["max_completion_tokens"], body["max_tokens"] = 3, 5
    assert server.post("/v1/chat/completions", body).json()["usage"]["completion_tokens"] == 3


def test_golden_completion(server) -> None:
    """The whole answer, name by name: clients in other languages parse it strictly."""
    answer = server.complete(prompt="ab", stop="Z", **GREEDY)
    assert list(answer) == [
        "id", "object", "created", "model", "service_tier", "system_fingerprint", "choices",
        "usage", "kv_transfer_params",
    ]  # fmt: skip
    assert list(answer["choices"][0]) == [
        "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids",
        "prompt_token_ids", "prompt_logprobs",
    ]  # fmt: skip
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_golden_chat_stream(server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True} | GREEDY
    answer = server.post("/v1/chat/completions", body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"].startswith("chatcmpl-")
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == greedy_text(server.engine, "uhi A", 12)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_streams_are_the_whole_answer_in_parts(server, n: int) -> None:
    options = {"model": MODEL, "prompt": [PROMPT, "ab"], "max_tokens": 10, "n": n, "seed": 5}
    whole = server.client.completions.create(**options)
    texts, reasons, usages = ["" for _ in range(2 * n)], {}, []
    for chunk in server.client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            assert choice.index not in reasons
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert [reasons[i] for i in range(2 * n)] == [c.finish_reason for c in whole.choices]
    assert usages[:-1] == [None] * (len(usages) - 1)
    # what earlier requests left in the cache is not the same
    mine, theirs = usages[-1].to_dict(), whole.usage.to_dict()
    for usage in (mine, theirs):
        del usage["prompt_tokens_details"]
    assert mine == theirs
    assert mine["prompt_tokens"] == 13


def test_usage_in_every_chunk(server) -> None:
    body = {"prompt": "ab", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    *chunks, _ = events(server.post("/v1/completions", body | GREEDY).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}


def test_n_choices_are_seeded_one_after_the_other(server, library) -> None:
    answer = server.complete(prompt=PROMPT, n=3, best_of=3, seed=7, temperature=1.5, max_tokens=16)
    texts = [choice["text"] for choice in answer["choices"]]
    want = [
        alone(library, PROMPT, SamplingParams(temperature=1.5, seed=7 + i, max_tokens=16)).text
        for i in range(3)
    ]
    assert texts == want
    assert len(set(want)) == 3
    # the prompt counts once
    assert answer["usage"]["prompt_tokens"] == 11


def test_temperature_is_one_by_default(server, library) -> None:
    (choice,) = server.complete(prompt=PROMPT, seed=3)["choices"]
    want = alone(library, PROMPT, SamplingParams(temperature=1.0, seed=3, max_tokens=16))
    assert choice["text"] == want.text
    assert choice["text"] != greedy_text(server.engine, PROMPT, 16)


def test_options_reach_the_sampler(server, library) -> None:
    """Every one of them, beside a request of the library with the same."""
    options: dict[str, Any] = {
        "max_tokens": 24, "temperature": 1.3, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 11,
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "rule": "delta", "ignore_eos": True, "stop_token_ids": [59], "stop": ["zz", "Q"],
        "include_stop_str_in_output": True, "skip_special_tokens": False,
        "logit_bias": {"3": -4.5, "60": 2}, "min_tokens": 5, "bad_words": ["ab", "q"],
        "allowed_token_ids": [*range(1, 61)],
    }  # fmt: skip
    (choice,) = server.complete(prompt=PROMPT, speculative=False, priority=3, **options)["choices"]
    want = alone(library, PROMPT, SamplingParams(speculative=False, **options))
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        want.text, want.finish_reason, want.stop_reason,
    )  # fmt: skip
    request = parse(CompletionRequest, {"prompt": PROMPT, "speculative": False} | options)
    assert completion_params(request, SamplingDefaults()) == SamplingParams(
        speculative=False, **options
    )


def test_forms_of_prompts(server) -> None:
    ids = server.engine.tokenizer.encode(PROMPT).ids
    want = greedy_text(server.engine, PROMPT, 12)
    for prompt, count in ((PROMPT, 1), ([PROMPT], 1), (ids, 1), ([ids, ids], 2), ([PROMPT] * 3, 3)):
        answer = server.complete(prompt=prompt, **GREEDY)
        assert [choice["text"] for choice in answer["choices"]] == [want] * count
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        assert answer["usage"]["prompt_tokens"] == count * 11


def test_echo(server) -> None:
    text = greedy_text(server.engine, "ab", 12)
    ids = server.engine.tokenizer.encode("ab").ids
    for prompt in ("ab", ids):
        assert server.complete(prompt=prompt, echo=True, **GREEDY)["choices"][0]["text"] == (
            "ab" + text
        )
    body = {"prompt": "ab", "echo": True, "stream": True} | GREEDY
    *chunks, _ = events(server.post("/v1/completions", body).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab" + text


def test_stop_strings(server) -> None:
    text = greedy_text(server.engine, PROMPT, 12)
    stop = text[5:7]
    (choice,) = server.complete(prompt=PROMPT, stop=stop, **GREEDY)["choices"]
    cut = text[: text.index(stop)]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
    streamed = server.client.completions.create(
        model=MODEL, prompt=PROMPT, stop=[stop], stream=True, **GREEDY
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions(server, stream: bool) -> None:
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPT, logprobs=2, stream=stream, **GREEDY
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    found = [c.logprobs.to_dict() for c in choices if c.logprobs and c.logprobs.tokens]
    joined = {name: [x for part in found for x in part[name]] for name in found[0]}
    ids = greedy_ids(server.engine, PROMPT, 12)
    want = check_logprobs(server, ids, joined["token_logprobs"])
    assert joined["tokens"] == [text_of(server, token) for token in ids]
    assert joined["text_offset"] == list(range(12))
    for best, values in zip(joined["top_logprobs"], want, strict=True):
        assert list(best) == [text_of(server, token) for token in values.topk(2).indices.tolist()]
        assert list(best.values()) == pytest.approx(values.topk(2).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats(server, stream: bool) -> None:
    answer = server.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=3,
        stream=stream, **GREEDY,
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    ids = greedy_ids(server.engine, "uhi A", 12)
    want = check_logprobs(server, ids, [entry.logprob for entry in content], "uhi A")
    for entry, token, values in zip(content, ids, want, strict=True):
        assert entry.token == text_of(server, token)
        assert bytes(entry.bytes).decode() == entry.token
        best = values.topk(3)
        assert [top.token for top in entry.top_logprobs] == [
            text_of(server, other) for other in best.indices.tolist()
        ]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )


def check_logprobs(server: Server, ids: list[int], found: list[float], prompt: str = PROMPT) -> Any:
    """Compare with the target alone; returns its log probabilities at each position."""
    from tests.runtime.conftest import TinyModel

    model, tokens = TinyModel(), list(server.engine.tokenizer.encode(prompt).ids)
    rows = []
    for token in ids:
        rows.append(model.dense_logits(tokens).log_softmax(0))
        tokens.append(token)
    want = [float(row[token]) for row, token in zip(rows, ids, strict=True)]
    assert found == pytest.approx(want, abs=1e-4)
    return rows


def text_of(server: Server, token: int) -> str:
    return server.engine.tokenizer.decode([token], skip_special_tokens=False)


def test_spec_metrics_only_when_asked(server) -> None:
    assert "metrics" not in server.complete(prompt=PROMPT, **GREEDY)
    answer = server.complete(prompt=PROMPT, return_spec_metrics=True, **GREEDY)
    found = answer["metrics"]["speculative_decoding"]
    assert found["num_spec_tokens"] == 4
    # no token accepted, one, … four
    assert len(found["acceptance_histogram"]) == 5
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"]
    accepted = sum(k * count for k, count in enumerate(found["acceptance_histogram"]))
    assert accepted == found["num_accepted_draft_tokens"] > 0
    assert found["mean_acceptance_length"] == 1 + accepted / found["num_spec_steps"]
    # a step emits what it accepted and one more; the first token comes from prefill
    assert accepted + found["num_spec_steps"] + 1 == 12
    assert math.isclose(found["draft_acceptance_rate"], accepted / found["num_draft_tokens"])
    plain = server.complete(prompt=PROMPT, return_spec_metrics=True, speculative=False, **GREEDY)
    assert plain["metrics"]["speculative_decoding"]["num_spec_steps"] == 0


def test_cached_tokens_are_told(server) -> None:
    prompt = "the same beginning of two prompts"
    server.complete(prompt=prompt, **GREEDY)
    usage = server.complete(prompt=prompt + "abc", **GREEDY)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    # whole blocks of four rows
    assert 0 < cached <= len(prompt)
    assert cached % 4 == 0


@pytest.mark.parametrize(
    "form",
    [
        pytest.param({"structured_outputs": {"choice": ["abba", "baab"]}}, id="choice"),
        pytest.param({"guided_choice": ["abba", "baab"]}, id="guided_choice"),
        pytest.param({"structured_outputs": {"regex": "abba|baab"}}, id="regex"),
        pytest.param({"guided_regex": "abba|baab"}, id="guided_regex"),
    ],
)
def test_structured_outputs(server, form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    answer = server.complete(prompt=PROMPT, max_tokens=20, seed=1, **form)
    assert answer["choices"][0]["text"] in ("abba", "baab")
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_special_tokens_come_once() -> None:
    """A prompt gets what the tokenizer and the engine add; a rendered chat holds it already."""
    engine = build_engine()
    engine.tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 60)]
    )
    with serve(engine) as server:
        for add_bos in (False, True):
            engine.add_bos, engine.bos_token_id = add_bos, 5
            more = {"max_tokens": 1}
            used = server.complete(prompt="ab", **more)["usage"]["prompt_tokens"]
            assert used == 3 + add_bos
            plain = server.complete(prompt="ab", add_special_tokens=False, **more)
            assert plain["usage"]["prompt_tokens"] == 2
            chat = {"messages": [{"role": "user", "content": "hi"}]} | more
            answers = [
                server.post("/v1/chat/completions", chat | {"add_special_tokens": add}).json()
                for add in (None, True)
            ]
            assert [a["usage"]["prompt_tokens"] for a in answers] == [5, 6 + add_bos]
            # the text of the tokens, special ones included
            echo = server.complete(prompt=[60, 0], echo=True, **more)["choices"][0]["text"]
            assert echo.startswith("<eos>a")
