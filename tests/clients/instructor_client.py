"""Run in the clients' environment: instructor, over OpenAI's client."""

import instructor
from openai import OpenAI
from report import ASK, MODEL, URL, WEATHER, run, same
from weather import Weather

openai = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "max_retries": 0}


def extracts(*modes):
    for mode in modes:
        client = instructor.from_openai(openai, mode=mode)
        # it is of a class that is made from this one
        same(client.create(response_model=Weather, **ASKED).model_dump(), WEATHER)


def tools():
    extracts(instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT)


def schema():
    extracts(instructor.Mode.JSON_SCHEMA)


def stream():
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    found = list(client.create_partial(response_model=Weather, **ASKED))
    same(found[-1].model_dump(), WEATHER)
    assert len(found) > 3


def responses():
    extracts(instructor.Mode.RESPONSES_TOOLS)


if __name__ == "__main__":
    run(stream=stream, tools=tools, schema=schema, responses=responses)
