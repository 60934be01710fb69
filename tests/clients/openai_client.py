"""Run in the clients' environment: OpenAI's own."""

import json

from openai import OpenAI
from pydantic import BaseModel
from report import ANSWER, ASK, ASK_AND_THINK, MODEL, NUMBER, SCHEMA, URL, WEATHER, WORD, run, same

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
USER = [{"role": "user", "content": ASK}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


class Weather(BaseModel):
    city: str
    degrees: int


def chat():
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    same((answer.choices[0].message.content, answer.choices[0].finish_reason), (ANSWER, "stop"))
    same(answer.usage.completion_tokens, len(ANSWER.encode()) + 1)


def stream():
    with client.chat.completions.stream(model=MODEL, messages=USER) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        final = events.get_final_completion().choices[0].message
    same(("".join(deltas), final.content), (ANSWER, ANSWER))
    assert len(deltas) > 3


def tools():
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=[TOOL]) as events:
        message = events.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    same((call.function.name, json.loads(call.function.arguments)), ("weather", WEATHER))
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    turns = [*USER, message.model_dump(exclude_none=True, exclude={"parsed"}), result]
    for call_ in turns[1]["tool_calls"]:
        call_["function"].pop("parsed_arguments", None)
    answer = client.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL])
    same(answer.choices[0].message.content, ANSWER)


def schema():
    answer = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Weather)
    same(answer.choices[0].message.parsed, Weather(city=WORD, degrees=NUMBER))


def responses():
    answer = client.responses.create(model=MODEL, input=ASK, store=False)
    same((answer.output_text, answer.status), (ANSWER, "completed"))
    with client.responses.stream(model=MODEL, input=ASK_AND_THINK, store=False) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    same((kinds[0], kinds[-1]), ("response.created", "response.completed"))
    same(final.output_text, ANSWER)
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    first = client.responses.create(model=MODEL, input=ASK, tools=[tool])
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    last = client.responses.create(model=MODEL, input=[result], previous_response_id=first.id,
                                   tools=[tool])  # fmt: skip
    same(last.output_text, ANSWER)
    parsed = client.responses.parse(model=MODEL, input=ASK, text_format=Weather).output_parsed
    same(parsed.model_dump(), WEATHER)


if __name__ == "__main__":
    run(chat=chat, stream=stream, tools=tools, schema=schema, responses=responses)
