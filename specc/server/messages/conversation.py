"""Anthropic's conversations as the messages of a chat.

There, a turn is a list of blocks; calls are blocks of the assistant's turns, and what tools have
answered is blocks of the user's. Here, each answer of a tool is a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specc.server.errors import bad_request, shorten
from specc.server.fields import UnknownFields
from specc.server.messages.shapes import check, missing, object_at
from specc.server.messages.signature import thinking_in

_KINDS = {
    "text": "TextBlockParam",
    "thinking": "ThinkingBlockParam",
    "tool_use": "ToolUseBlockParam",
    "tool_result": "ToolResultBlockParam",
    "tool_reference": "ToolReferenceBlockParam",
}
# blocks that a turn of each role may have
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
# Claude Code begins its instructions with a line for whoever accounts for the request; it is
# different each time, and would keep all that follows it from being found in the cache
_ACCOUNTING = "x-anthropic-billing-header:"


@dataclass
class Conversation:
    """Of one request, as it is read.

    Attributes:
        messages: of a chat.
        is_continued: the answer goes on with the last message.
    """

    unknown: UnknownFields
    messages: list[dict[str, Any]] = field(default_factory=list)
    is_continued: bool = False
    # of all calls
    _call_ids: set[str] = field(default_factory=set)

    def add_system(self, system: Any) -> None:
        """Instructions that stand before the turns.

        Raises:
            ApiError: they are malformed.
        """
        texts = [block["text"] for block in self._blocks(system, "system", _BLOCKS["system"])]
        texts = [text for text in texts if not text.startswith(_ACCOUNTING)]
        if content := _content(texts):
            self.messages.append({"role": "system", "content": content})

    def add_turns(self, turns: Any) -> None:
        """All turns, in order.

        Raises:
            ApiError: they are malformed, or hold what this server has not got.
        """
        if not isinstance(turns, list) or not turns:
            raise bad_request(
                "messages that are no list, or an empty one", "a list of turns", "correct it",
                "messages",
            )  # fmt: skip
        for index, turn in enumerate(turns):
            place = f"messages.{index}"
            fields = object_at(turn, place)
            role = fields.get("role")
            if not isinstance(role, str) or role not in _BLOCKS:
                raise bad_request(
                    f"{place}.role={_quoted(role)}", "user, assistant or system", "correct it",
                    f"{place}.role",
                )  # fmt: skip
            if "content" not in fields:
                raise missing(f"{place}.content")
            blocks = self._blocks(fields["content"], f"{place}.content", _BLOCKS[role])
            if role == "assistant":
                self._add_answer(blocks)
            else:
                self._add_question(role, blocks, place)
        last = self.messages[-1]
        self.is_continued = last["role"] == "assistant"
        if self.is_continued and "tool_calls" in last:
            raise bad_request(
                f"messages.{len(turns) - 1} with calls of tools and no answers to them",
                "a turn with a tool_result for each after it", "add it", "messages",
            )  # fmt: skip

    def _add_question(self, role: str, blocks: list[dict[str, Any]], place: str) -> None:
        texts: list[str] = []
        begin = len(self.messages)
        for index, block in enumerate(blocks):
            if block["type"] == "text":
                texts.append(block["text"])
                continue
            if texts:
                self._add_texts(role, texts)
                texts = []
            self._add_result(block, f"{place}.content.{index}")
        if texts or len(self.messages) == begin:
            self._add_texts(role, texts)

    def _add_texts(self, role: str, texts: list[str]) -> None:
        """Further texts of a user belong to the last message: templates want roles in turns."""
        last = self.messages[-1] if self.messages else {}
        if role == "user" and last.get("role") == role:
            last["content"] = _content([*_texts(last["content"]), *texts])
        else:
            self.messages.append({"role": role, "content": _content(texts)})

    def _add_result(self, block: dict[str, Any], place: str) -> None:
        """What a tool has answered."""
        call_id = block["tool_use_id"]
        if call_id not in self._call_ids:
            raise bad_request(
                f"{place}.tool_use_id={_quoted(call_id)}", "the id of a tool_use block before it",
                "correct it, or send that turn, too", f"{place}.tool_use_id",
            )  # fmt: skip
        # a search for tools answers with their names; the request has them beside the turns
        kinds = ("text", "tool_reference")
        blocks = self._blocks(block.get("content", ""), f"{place}.content", kinds)
        content = _content([inner.get("text") or inner["tool_name"] for inner in blocks])
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        # templates that know the word say it
        self.messages.append(message | ({"is_error": True} if block.get("is_error") else {}))

    def _add_answer(self, blocks: list[dict[str, Any]]) -> None:
        """One message of each run of the assistant's turns; a chat has calls behind all text."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        for block in blocks:
            if block["type"] == "text":
                last["content"] += block["text"]
            elif block["type"] == "thinking":
                text = last.get("reasoning_content", "") + thinking_in(block)
                last |= {"reasoning_content": text} if text else {}
            else:
                self._call_ids.add(block["id"])
                arguments = json.dumps(block["input"], ensure_ascii=False)
                function = {"name": block["name"], "arguments": arguments}
                call = {"id": block["id"], "type": "function", "function": function}
                last.setdefault("tool_calls", []).append(call)

    def _blocks(self, content: Any, place: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
        """Blocks of these kinds; a text is one."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if content else []
        if not isinstance(content, list):
            raise bad_request(
                f"{place} is neither", "a string or a list of blocks", "correct it", place
            )
        blocks = [
            self._block(block, f"{place}.{index}", kinds) for index, block in enumerate(content)
        ]
        return [block for block in blocks if block["type"] != "text" or block["text"]]

    def _block(self, block: Any, place: str, kinds: Sequence[str]) -> dict[str, Any]:
        fields = object_at(block, place)
        if "type" not in fields:
            raise missing(f"{place}.type")
        kind = fields["type"]
        if not isinstance(kind, str) or kind not in kinds:
            raise bad_request(
                f"{place} of type {_quoted(kind)}", f"a block of type {' or '.join(kinds)}",
                "leave the others out: this server reads text, thinking and calls of tools alone",
                f"{place}.type",
            )  # fmt: skip
        if kind == "thinking":
            # other servers' thinking may have none
            fields.setdefault("signature", "")
        if fields.get("citations"):
            raise bad_request(
                f"{place} with citations", "text alone", "leave citations out",
                f"{place}.citations",
            )  # fmt: skip
        check(_KINDS[kind], fields, place, self.unknown)
        return fields


def with_early_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same, with instructions among the turns as a user's words.

    Claude Code has some behind the first question, and there are templates that refuse them there.
    """
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role = "user" if index and message["role"] == "system" else message["role"]
        if found and role == found[-1]["role"] == "user":
            texts = [*_texts(found[-1]["content"]), *_texts(message["content"])]
            found[-1] = {"role": role, "content": _content(texts)}
        else:
            found.append({**message, "role": role})
    return found


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """As the content of a chat's message: one text alone, several as parts."""
    if len(texts) < 2:
        return texts[0] if texts else ""
    return [{"type": "text", "text": text} for text in texts]


def _texts(content: str | Sequence[Mapping[str, str]]) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    return [part["text"] for part in content]


def _quoted(value: Any) -> str:
    return repr(shorten(value)) if isinstance(value, str) else f"of type {type(value).__name__}"
