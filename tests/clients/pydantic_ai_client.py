"""Run in the clients' environment: agents of pydantic-ai over three APIs."""

import asyncio

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from report import ANSWER, ASK, MODEL, NUMBER, URL, WEATHER, run, same
from weather import WARM, Weather

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
CHATS = OpenAIChatModel(MODEL, provider=openai)
RESPONSES = OpenAIResponsesModel(MODEL, provider=openai)
MESSAGES = AnthropicModel(
    MODEL,
    provider=AnthropicProvider(base_url=URL, api_key="none"),
    # which it knows of the models of Anthropic's alone
    profile={"supports_json_schema_output": True},
)


def answers(model):
    same(Agent(model, instructions="Be brief.").run_sync(ASK).output, ANSWER)


def streams(model):
    async def read():
        async with Agent(model).run_stream(ASK) as result:
            return [delta async for delta in result.stream_text(delta=True, debounce_by=None)]

    deltas = asyncio.run(read())
    same("".join(deltas), ANSWER)
    assert len(deltas) > 3


def calls(model):
    given = []
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: str, degrees: int) -> int:
        """How warm it is."""
        given.append({"city": city, "degrees": degrees})
        return NUMBER

    same(agent.run_sync(ASK).output, ANSWER)
    same(given, [WEATHER])


def fills(model):
    for form in (NativeOutput(Weather), ToolOutput(Weather)):
        same(Agent(model, output_type=form).run_sync(ASK).output, WARM)


def all_of(model):
    for attempt in (answers, streams, calls, fills):
        attempt(model)


if __name__ == "__main__":
    run(
        chat=lambda: answers(CHATS), stream=lambda: streams(CHATS), tools=lambda: calls(CHATS),
        schema=lambda: fills(CHATS), responses=lambda: all_of(RESPONSES),
        messages=lambda: all_of(MESSAGES),
    )  # fmt: skip
