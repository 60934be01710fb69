"""Items of a conversation: as clients send them, as they are kept, and as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specc.server.errors import ApiError, bad_request
from specc.server.fields import without_nulls
from specc.server.responses.package import check

Item = dict[str, Any]
KINDS = "message, function_call, function_call_output, reasoning or item_reference"
_ROLES = ("user", "assistant", "system", "developer")
# kinds of parts of messages → their text
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco",
             "reasoning": "rs"}  # fmt: skip


def item_id(kind: str, response_id: str, side: str, index: int) -> str:
    """Of an item of a response; says where it is, and is as hard to guess as the response's.

    Args:
        side: `i` of input, `o` of output.
    """
    return f"{_PREFIXES[kind]}_{response_id.partition('_')[2]}{side}{index}"


def place_of(found: str) -> tuple[str, str, int] | None:
    """(response, side, index) of what `item_id` made; None of any other text."""
    name = found.partition("_")[2]
    at = max(name.rfind("i"), name.rfind("o"))
    number = name[at + 1 :]
    if at < 1 or not (number.isascii() and number.isdecimal()) or len(number) > 9:
        return None
    return f"resp_{name[:at]}", name[at], int(number)


def read_items(
    given: Any, response_id: str, find: Callable[[str, str], Item], side: str = "i"
) -> list[Item]:
    """The `input` of a request as items that are complete: with ids, and lists of parts.

    Args:
        find: an item by its id and the place that names it; raises ApiError where there is none.
    Raises:
        ApiError: an item is malformed, or holds something else than text and calls of functions.
    """
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad_request(
            "the input is empty, or of another form", "a string, or a list of items", "correct it",
            "input",
        )  # fmt: skip
    items = []
    for index, item in enumerate(given):
        place = f"input.{index}"
        if not isinstance(item, Mapping):
            raise bad_request(f"{place} that is no object", "an item", "correct it", place)
        fields = without_nulls(item)
        kind = fields.setdefault("type", "message" if "role" in fields else None)
        if kind == "item_reference" or (kind is None and fields.keys() == {"id"}):
            items.append(find(_string(fields, "id", place), place))
            continue
        if not isinstance(kind, str) or kind not in _PREFIXES:
            raise bad_request(f"{place} of type {kind!r}", KINDS, "leave it out", f"{place}.type")
        own = item_id(kind, response_id, side, index)
        items.append(_READERS[kind](fields, own, place))
    return items


def _message(fields: Item, own: str, place: str) -> Item:
    role, content = fields.get("role"), fields.get("content")
    if role not in _ROLES:
        raise bad_request(
            f"{place} of the role {role!r}", f"one of {', '.join(_ROLES)}", "correct it",
            f"{place}.role",
        )  # fmt: skip
    is_answer = role == "assistant"
    usual = "output_text" if is_answer else "input_text"
    parts = [{"type": usual, "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise bad_request(
            f"{place} without content", "a string, or a list of parts", "correct it",
            f"{place}.content",
        )  # fmt: skip
    read = [_part(part, f"{place}.content.{i}") for i, part in enumerate(parts)]
    if is_answer:
        read = [
            {"annotations": []} | part if part["type"] == "output_text" else part for part in read
        ]
    else:
        # a text is a text, whoever has said it
        read = [{"type": "input_text", "text": _text(part)} for part in read]
    item = {"id": own, "status": "completed"} | fields | {"content": read}
    check("answer" if is_answer else "message", item, place)
    return item


def _part(part: Any, place: str) -> Item:
    """One of a message's or an output's, with its text."""
    fields = without_nulls(part) if isinstance(part, Mapping) else {}
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise bad_request(
            f"{place} of type {kind!r}", "text: input_text, output_text or refusal",
            "leave out what is none, such as images and files", f"{place}.type",
        )  # fmt: skip
    _string(fields, _TEXTS[kind], place)
    return fields


def _text(part: Item) -> str:
    return str(part[_TEXTS[part["type"]]])


def _call(fields: Item, own: str, place: str) -> Item:
    item = {"id": own, "status": "completed"} | fields
    check("function_call", item, place)
    return item


def _output(fields: Item, own: str, place: str) -> Item:
    _string(fields, "call_id", place)
    output = fields.get("output")
    if isinstance(output, list):
        output = [_part(part, f"{place}.output.{i}") for i, part in enumerate(output)]
        output = [{"type": "input_text", "text": _text(part)} for part in output]
    elif not isinstance(output, str):
        _string(fields, "output", place)
    item = {"id": own, "status": "completed"} | fields | {"output": output}
    check("function_call_output", item, place)
    return item


def _reasoning(fields: Item, own: str, place: str) -> Item:
    item = {"id": own, "summary": []} | fields
    check("reasoning", item, place)
    if item.get("encrypted_content") and not item.get("content"):
        raise bad_request(
            f"{place} with nothing but encrypted_content, which only its maker can read",
            "reasoning with its content, as this server returns it", "leave the item out",
            f"{place}.encrypted_content",
        )  # fmt: skip
    return item


_READERS: dict[str, Callable[[Item, str, str], Item]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def _string(fields: Item, name: str, place: str) -> str:
    value = fields.get(name)
    if isinstance(value, str):
        return value
    place = f"{place}.{name}"
    if value is None:
        text = f"Missing required parameter: {place!r}. Please add it."
        raise ApiError(400, text, param=place, code="missing_required_parameter")
    raise bad_request(f"{place} of another form", "a string", "correct it", place)


def check_calls(items: Sequence[Item], num_earlier: int) -> None:
    """Refuse outputs of calls that nobody has made, as OpenAI's API does.

    Args:
        num_earlier: items before those of the request.
    Raises:
        ApiError: there is one.
    """
    called: set[str] = set()
    for index, item in enumerate(items):
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            raise bad_request(
                f"an output of the call {item['call_id']!r}, which no item before it makes",
                "the function_call, or the previous_response_id of the response that has it",
                "add it",
                f"input.{max(0, index - num_earlier)}.call_id",
            )


def to_messages(
    instructions: str | None, items: Sequence[Item], knows_developers: bool
) -> list[Item]:
    """Messages of a chat.

    What the assistant thinks, says and calls in a row is one message, and so is all that comes
    before the first user: templates have one place for it. A message of the role `developer` is one
    of `system` to templates that do not know the role.
    """
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    messages: list[Item] = []
    for message in [*first, *_messages(items)]:
        if message["role"] == "developer" and not knows_developers:
            message["role"] = "system"
        is_second = len(messages) == 1
        if is_second and message["role"] == messages[0]["role"] == "system":
            both = (messages[0]["content"], message["content"])
            messages[0]["content"] = "\n\n".join(map(_joined, both))
        else:
            messages.append(message)
    return messages


def _joined(content: str | list[Item]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _messages(items: Sequence[Item]) -> Iterator[Item]:
    # what the assistant is saying, if it is its turn
    turn: Item = {}
    for item in items:
        kind = item["type"]
        is_answer = kind == "message" and item["role"] == "assistant"
        if not is_answer and kind not in ("reasoning", "function_call"):
            if turn:
                yield turn
                turn = {}
            yield _other(item)
            continue
        says = turn.keys() & {"content", "tool_calls"}
        if (kind == "reasoning" and says) or (is_answer and "content" in turn):
            yield turn
            turn = {}
        turn.setdefault("role", "assistant")
        if kind == "reasoning":
            before = turn.get("reasoning_content")
            text = _thoughts(item)
            turn["reasoning_content"] = text if before is None else f"{before}\n{text}"
        elif is_answer:
            turn["content"] = "".join(map(_text, item["content"]))
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
    if turn:
        yield turn


def _other(item: Item) -> Item:
    if item["type"] == "message":
        return {"role": item["role"], "content": _content(item["content"])}
    output = item["output"]
    content = output if isinstance(output, str) else _content(output)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _content(parts: Sequence[Item]) -> str | list[Item]:
    """Of several parts, a list: what templates make of it is the same as in any chat."""
    texts = [{"type": "text", "text": _text(part)} for part in parts]
    return texts[0]["text"] if len(texts) == 1 else texts


def _thoughts(item: Item) -> str:
    """The thinking itself; of what others have made, where there is no more, its summary."""
    parts = item.get("content") or item["summary"]
    return "\n".join(part["text"] for part in parts)


def to_bytes(value: Any) -> bytes:
    """JSON, as items are kept."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
