"""Run in the clients' environment: llama-index's class for servers like OpenAI's."""

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from report import ANSWER, ASK, MODEL, NUMBER, URL, WEATHER, run, same
from weather import WARM, Weather

OPTIONS = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "none", "is_chat_model": True,
           "context_window": 4096, "max_retries": 0}  # fmt: skip
model = OpenAILike(is_function_calling_model=True, **OPTIONS)
TURN = ChatMessage(role="user", content=ASK)


def chat():
    same(model.chat([TURN]).message.content, ANSWER)
    same(model.complete(ASK).text, ANSWER)
    plain = OpenAILike(**(OPTIONS | {"is_chat_model": False, "max_tokens": 100}))
    same(plain.complete(ASK).text, ANSWER)


def stream():
    for found in (list(model.stream_chat([TURN])), list(model.stream_complete(ASK))):
        same("".join(each.delta or "" for each in found), ANSWER)
        assert len(found) > 3


def tools():
    given = []

    def weather(city: str, degrees: int) -> int:
        """How warm it is."""
        given.append({"city": city, "degrees": degrees})
        return NUMBER

    tool = FunctionTool.from_defaults(weather)
    first = model.chat_with_tools([tool], chat_history=[TURN])
    (call,) = model.get_tool_calls_from_response(first)
    output = tool(**call.tool_kwargs)
    same(given, [WEATHER])
    of_call = {"tool_call_id": call.tool_id}
    answer = ChatMessage(role="tool", content=str(output), additional_kwargs=of_call)
    turns = [TURN, first.message, answer]
    same(model.chat_with_tools([tool], chat_history=turns).message.content, ANSWER)


def schema():
    same(model.as_structured_llm(Weather).chat([TURN]).raw, WARM)
    json_schema = OpenAILike(should_use_structured_outputs=True, **OPTIONS)
    same(json_schema.structured_predict(Weather, PromptTemplate(ASK)), WARM)


if __name__ == "__main__":
    run(chat=chat, stream=stream, tools=tools, schema=schema)
