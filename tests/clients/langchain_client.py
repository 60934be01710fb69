"""Run in the clients' environment: langchain's classes for OpenAI and for Anthropic."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from report import ANSWER, ASK, ASK_AND_THINK, MODEL, THINKING, URL, WEATHER, run, same
from weather import WARM, Weather

SHARED = {"model": MODEL, "api_key": "none", "max_retries": 0}
chats = ChatOpenAI(base_url=f"{URL}/v1", stream_usage=True, **SHARED)
responding = ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **SHARED)
anthropic = ChatAnthropic(base_url=URL, max_tokens=500, **SHARED)


def calls_and_goes_on(model):
    turns = [HumanMessage(ASK)]
    bound = model.bind_tools([Weather])
    first = bound.invoke(turns)
    (call,) = first.tool_calls
    same((call["name"], call["args"]), ("Weather", WEATHER))
    turns += [first, ToolMessage("21", tool_call_id=call["id"])]
    same(bound.invoke(turns).text, ANSWER)


def streams(model):
    chunks = list(model.stream(ASK))
    same("".join(chunk.text for chunk in chunks), ANSWER)
    assert len(chunks) > 3
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert sum(each["output_tokens"] for each in usage) > len(ANSWER.encode()), usage


def chat():
    answer = chats.invoke(ASK)
    same((answer.text, answer.response_metadata["finish_reason"]), (ANSWER, "stop"))


def stream():
    streams(chats)


def tools():
    calls_and_goes_on(chats)


def schema():
    for method in ("json_schema", "function_calling"):
        same(chats.with_structured_output(Weather, method=method).invoke(ASK), WARM)


def responses():
    same(responding.invoke(ASK).text, ANSWER)
    streams(responding)
    calls_and_goes_on(responding)
    same(responding.with_structured_output(Weather).invoke(ASK), WARM)


def messages():
    same(anthropic.invoke(ASK).text, ANSWER)
    thought = anthropic.invoke(ASK_AND_THINK).content
    same([block.get("thinking") for block in thought], [THINKING, None])
    streams(anthropic)
    calls_and_goes_on(anthropic)
    same(anthropic.with_structured_output(Weather).invoke(ASK), WARM)


if __name__ == "__main__":
    run(chat=chat, stream=stream, tools=tools, schema=schema, responses=responses,
        messages=messages)  # fmt: skip
