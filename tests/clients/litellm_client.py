"""Run in the clients' environment: litellm, by its routes of OpenAI, vLLM, Anthropic, Ollama."""

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched

import litellm
from report import ANSWER, ASK, ASK_AND_THINK, MODEL, SCHEMA, THINKING, URL, WEATHER, run, same
from weather import WARM, Weather

ROUTES = {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "anthropic": URL, "ollama_chat": URL}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def ask(route, turns=None, **options):
    turns = turns or [{"role": "user", "content": ASK}]
    return litellm.completion(f"{route}/{MODEL}", turns, api_base=ROUTES[route], api_key="none",
                              num_retries=0, **options)  # fmt: skip


def fails(error_type, route, **options):
    try:
        ask(route, **options)
    except error_type:
        return
    raise AssertionError(f"no {error_type.__name__}")


def chat():
    for route in ROUTES:
        answer = ask(route)
        same((answer.choices[0].message.content, answer.choices[0].finish_reason), (ANSWER, "stop"))
    thought = ask("hosted_vllm", [{"role": "user", "content": ASK_AND_THINK}]).choices[0].message
    same((thought.content, thought.reasoning_content), (ANSWER, THINKING))
    long = [{"role": "user", "content": "x" * 300_000}]
    for route in ("openai", "hosted_vllm", "anthropic"):
        fails(litellm.ContextWindowExceededError, route, turns=long)


def stream():
    for route in ROUTES:
        chunks = list(ask(route, stream=True, stream_options={"include_usage": True}))
        deltas = [each.choices[0].delta.content or "" for each in chunks if each.choices]
        same("".join(deltas), ANSWER)
        assert len(chunks) > 3, route
        built = litellm.stream_chunk_builder(chunks)
        assert built.usage.completion_tokens >= len(ANSWER.encode()), (route, built.usage)


def tools():
    for route in ROUTES:
        turns = [{"role": "user", "content": ASK}]
        message = ask(route, turns, tools=[TOOL]).choices[0].message
        (call,) = message.tool_calls
        same((call.function.name, json.loads(call.function.arguments)), ("weather", WEATHER))
        turns += [message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
        same(ask(route, turns, tools=[TOOL]).choices[0].message.content, ANSWER)


def schema():
    for route in ROUTES:
        answer = ask(route, response_format=Weather)
        same(Weather.model_validate_json(answer.choices[0].message.content), WARM)


def responses():
    options = {"api_base": ROUTES["openai"], "api_key": "none"}
    answer = litellm.responses(model=f"openai/{MODEL}", input=ASK, **options)
    same(answer.output[-1].content[0].text, ANSWER)
    events = list(litellm.responses(model=f"openai/{MODEL}", input=ASK, stream=True, **options))
    same(events[-1].type, "response.completed")


def messages():
    turns = [{"role": "user", "content": ASK}]
    answer = asyncio.run(litellm.anthropic_messages(
        model=f"anthropic/{MODEL}", messages=turns, max_tokens=100, api_base=URL, api_key="none"
    ))  # fmt: skip
    same(answer["content"], [{"type": "text", "text": ANSWER}])


if __name__ == "__main__":
    run(chat=chat, stream=stream, tools=tools, schema=schema, responses=responses,
        messages=messages)  # fmt: skip
