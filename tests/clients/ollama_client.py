"""Run in the clients' environment: Ollama's own."""

from ollama import Client, ResponseError
from report import ANSWER, ASK, ASK_AND_THINK, MODEL, NUMBER, THINKING, URL, WEATHER, run, same
from weather import WARM, Weather

client = Client(host=URL)
TURN = {"role": "user", "content": ASK}


def chat():
    answer = client.chat(MODEL, [TURN])
    same((answer.message.content, answer.done_reason), (ANSWER, "stop"))
    same(answer.eval_count, len(ANSWER.encode()) + 1)
    thought = client.chat(MODEL, [{"role": "user", "content": ASK_AND_THINK}], think=True).message
    same((thought.content, thought.thinking), (ANSWER, THINKING))
    same(client.generate(f"{MODEL}:latest", ASK, system="Be brief.").response, ANSWER)
    assert MODEL in [each.model for each in client.list().models]
    try:
        client.chat("x", [TURN])
    except ResponseError as error:
        same(error.status_code, 404)
    else:
        raise AssertionError("no error of an unknown model")


def stream():
    parts = list(client.chat(MODEL, [TURN], stream=True, options={"temperature": 0}))
    same("".join(part.message.content for part in parts), ANSWER)
    same((parts[-1].done, len(parts) > 3), (True, True))
    texts = [part.response for part in client.generate(MODEL, ASK, stream=True)]
    same("".join(texts), ANSWER)


def tools():
    given = []

    def weather(city: str, degrees: int) -> int:
        """How warm it is.

        Args:
            city: Where.
            degrees: How many.
        """
        given.append({"city": city, "degrees": degrees})
        return NUMBER

    first = client.chat(MODEL, [TURN], tools=[weather]).message
    (call,) = first.tool_calls
    result = weather(**call.function.arguments)
    same(given, [WEATHER])
    turns = [TURN, first, {"role": "tool", "tool_name": "weather", "content": str(result)}]
    same(client.chat(MODEL, turns, tools=[weather]).message.content, ANSWER)


def schema():
    answer = client.chat(MODEL, [TURN], format=Weather.model_json_schema())
    same(Weather.model_validate_json(answer.message.content), WARM)


if __name__ == "__main__":
    run(chat=chat, stream=stream, tools=tools, schema=schema)
