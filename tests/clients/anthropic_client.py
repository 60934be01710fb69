"""Run in the clients' environment: Anthropic's own."""

from anthropic import Anthropic, NotFoundError
from report import ANSWER, ASK, ASK_AND_THINK, MODEL, SCHEMA, THINKING, URL, WEATHER, run, same

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
USER = {"role": "user", "content": ASK}
OPTIONS = {"model": MODEL, "max_tokens": 500}
TOOL = {"name": "weather", "description": "How warm it is", "input_schema": SCHEMA}


def messages():
    answer = client.messages.create(messages=[USER], system="Be brief.", **OPTIONS)
    same([block.to_dict() for block in answer.content], [{"type": "text", "text": ANSWER}])
    same((answer.stop_reason, answer.usage.output_tokens), ("end_turn", len(ANSWER.encode()) + 1))
    count = client.messages.count_tokens(messages=[USER], system="Be brief.", model=MODEL)
    usage = answer.usage
    same(count.input_tokens, usage.input_tokens + usage.cache_read_input_tokens)
    stop = client.messages.create(messages=[USER], stop_sequences=["degrees"], **OPTIONS)
    same((stop.stop_reason, stop.stop_sequence), ("stop_sequence", "degrees"))
    try:
        client.messages.create(messages=[USER], model="x", max_tokens=5)
    except NotFoundError as error:
        same(error.body["error"]["type"], "not_found_error")
    else:
        raise AssertionError("no error of an unknown model")


def stream():
    turn = {"role": "user", "content": ASK_AND_THINK}
    with client.messages.stream(messages=[turn], **OPTIONS) as events:
        texts = list(events.text_stream)
        final = events.get_final_message()
    same("".join(texts), ANSWER)
    same([block.type for block in final.content], ["thinking", "text"])
    same(final.content[0].thinking, THINKING)
    assert len(texts) > 3


def tools():
    turns = [USER]
    with client.messages.stream(messages=turns, tools=[TOOL], **OPTIONS) as events:
        first = events.get_final_message()
    (call,) = [block for block in first.content if block.type == "tool_use"]
    same((first.stop_reason, call.name, call.input), ("tool_use", "weather", WEATHER))
    turns.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
    turns.append({"role": "user", "content": [result]})
    last = client.messages.create(messages=turns, tools=[TOOL], **OPTIONS)
    same(last.content[0].text, ANSWER)
    forced = client.messages.create(
        messages=[USER], tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}, **OPTIONS
    )
    same((forced.content[0].input, forced.stop_reason), (WEATHER, "tool_use"))


def schema():
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(messages=[USER], output_config=form, **OPTIONS)
    same(answer.content[0].text, '{"city": "Bonn", "degrees": 21}')


if __name__ == "__main__":
    run(messages=messages, stream=stream, tools=tools, schema=schema)
