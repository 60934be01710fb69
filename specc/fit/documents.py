"""Documents to learn from: text of files, lines of JSON, chats; and which are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specc.errors import InputFileError
from specc.passes.frontend.hf_tokenizer import HfTokenizer
from specc.system.json_file import JsonError, parse_json

HELD_OUT_ONE_IN = 16
# of so few documents, those that are text are cut into parts
_FEW, _PART_CHARACTERS = 32, 4096
_MOST_CHARACTERS = 8 << 20
# of a text: by which the rest is estimated, and what is tokenized at a time
_SAMPLE, _PIECE = 2000, 16_384
_LINES = ".jsonl"
_FORM = 'a line such as {"text": "…"}, {"prompt": "…"} or {"messages": [{"role": …}, …]}'
_DO = "correct the line"


@dataclass(frozen=True)
class Document:
    """Something to learn from.

    Args:
        name: file, and line or part, for people.
        text: of it; of a chat, what is said.
        messages: of a chat, else none.
        is_prompt: its text is there to be continued, and nobody learns to write it.
    """

    name: str
    text: str
    messages: tuple[dict[str, Any], ...] = ()
    is_prompt: bool = False

    @property
    def digest(self) -> bytes:
        """Of the content: equal documents have equal ones, on every machine."""
        return hashlib.sha256(self.text.encode()).digest()

    @property
    def has_answer(self) -> bool:
        """Whether it is a chat that ends with what the model says."""
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"


@dataclass(frozen=True)
class Row:
    """Tokens of a document, or of a part of it.

    Args:
        tokens: one or more.
        begin: place of the first token that somebody learns to predict.
    """

    tokens: list[int]
    begin: int = 1


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """All documents of files and directories, each once.

    Args:
        paths: of a directory, all files that are UTF-8 text, whatever they are called.
    Raises:
        InputFileError: a file that cannot be read, or a line that is none; or no text at all.
    """
    found: dict[bytes, Document] = {}
    for path in paths:
        for document in _documents_of(path):
            if document.text.strip():
                found.setdefault(document.digest, document)
    documents = list(found.values())
    if not documents:
        names = ", ".join(map(str, paths))
        raise InputFileError(f"{names}: no text", "UTF-8 text, or JSON lines", "pass --texts FILE")
    if len(documents) < _FEW:
        documents = [part for document in documents for part in _parts(document)]
    return documents


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Those to learn from, and those that are held out: one of sixteen, by their content.

    Raises:
        InputFileError: fewer than two.
    """
    if len(documents) < 2:
        raise InputFileError(
            f"{documents[0].name}: one short document",
            "two or more, one of which is held out",
            "pass more text: --texts may be repeated, and name a directory",
        )
    numbers = {id(x): int.from_bytes(x.digest[:4], "big") for x in documents}
    held = [x for x in documents if numbers[id(x)] % HELD_OUT_ONE_IN == 0]
    if len(held) in (0, len(documents)):
        held = [min(documents, key=lambda x: numbers[id(x)])]
    out = {id(x) for x in held}
    return [x for x in documents if id(x) not in out], held


def without(documents: Sequence[Document], texts: Sequence[str]) -> list[Document]:
    """The documents that hold none of these texts."""
    return [x for x in documents if not any(text in x.text for text in texts)]


class Encoder:
    """Makes rows of documents.

    Args:
        tokenizer: of the target.
        first: token that texts begin with, or None.
    """

    def __init__(self, tokenizer: HfTokenizer, first: int | None) -> None:
        self._tokenizer = tokenizer
        self._begin = [] if first is None else [first]

    def rows(self, document: Document, length: int) -> Iterator[Row]:
        """Rows of a document as it is, of so many tokens at most.

        Raises:
            InputFileError: a chat that the target's template does not take.
        """
        if document.is_prompt or (document.messages and not document.has_answer):
            return
        if document.messages:
            whole = self._chat(document, document.messages, is_open=False)
            asked = self._chat(document, document.messages[:-1], is_open=True)
            begin = len(asked) if whole[: len(asked)] == asked else 1
            # the answer is what counts: of what comes before it, the end
            first = max(0, min(begin - length // 2, len(whole) - length))
            yield Row(whole[first : first + length], max(1, begin - first))
            return
        step = length - len(self._begin)
        for piece in _pieces(document.text, _PIECE):
            ids = self._tokenizer.encode(piece, add_special_tokens=False)
            for place in range(0, len(ids), step):
                yield Row(self._begin + ids[place : place + step])

    def prompt(self, document: Document, length: int, generator: torch.Generator) -> list[int]:
        """Tokens for the target to go on with: lines from somewhere in a text, or a chat's."""
        if document.messages:
            asked = document.messages[:-1] if document.has_answer else document.messages
            return self._chat(document, asked, is_open=True)[-4 * length :]
        return self.encode(self.cut(document, length, generator))[-4 * length :]

    def cut(self, document: Document, length: int, generator: torch.Generator) -> str:
        """Lines from somewhere in a text, of about so many tokens; of a prompt, all of it."""
        if document.is_prompt:
            return document.text
        sample = document.text[:_SAMPLE]
        a_token = len(sample) / max(1, len(self.encode(sample)))
        return cut_lines(document.text, round(length * a_token), generator)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return self._begin + self._tokenizer.encode(text, add_special_tokens=False)

    def _chat(
        self, document: Document, messages: Sequence[dict[str, Any]], is_open: bool
    ) -> list[int]:
        try:
            return self._tokenizer.chat(list(messages), is_open)
        except ValueError as error:
            raise InputFileError(
                f"{document.name}: {error}",
                "messages that the target's chat template takes",
                "correct them, or pass texts in place of chats",
            ) from error


def cut_lines(text: str, characters: int, generator: torch.Generator) -> str:
    """Whole lines of a text, about so many characters, that begin somewhere in it."""
    if len(text) <= characters:
        return text
    start = int(torch.randint(len(text) - characters, (1,), generator=generator))
    start = text.rfind("\n", 0, start) + 1
    end = text.find("\n", start + characters)
    return text[start : end + 1 if end >= 0 else start + characters][-2 * characters :]


def _documents_of(path: Path) -> Iterator[Document]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not is_hidden:
                yield from _documents_of_file(file, is_asked_for=False)
    else:
        yield from _documents_of_file(path, is_asked_for=True)


def _documents_of_file(path: Path, is_asked_for: bool) -> Iterator[Document]:
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if not is_asked_for:
            return
        what = getattr(error, "strerror", None) or "not UTF-8"
        raise InputFileError(f"{path}: {what}", "UTF-8 text, or JSON lines", "check it") from error
    if "\0" in text:
        return
    if path.suffix != _LINES:
        yield Document(str(path), text[:_MOST_CHARACTERS])
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _of_line(f"{path}, line {number}", line)


def _of_line(name: str, line: str) -> Document:
    try:
        value = parse_json(line)
    except JsonError as error:
        raise InputFileError(f"{name}: no JSON ({error})", _FORM, _DO) from error
    if not isinstance(value, dict):
        raise InputFileError(f"{name}: no object", _FORM, _DO)
    if isinstance(messages := value.get("messages"), list) and messages:
        if not all(isinstance(x, dict) and isinstance(x.get("content"), str) for x in messages):
            raise InputFileError(f"{name}: a message without a content that is text", _FORM, _DO)
        return Document(name, "\n".join(x["content"] for x in messages), tuple(messages))
    for key in ("text", "prompt"):
        if isinstance(text := value.get(key), str):
            return Document(name, text, is_prompt=key == "prompt")
    raise InputFileError(f"{name}: neither messages nor prompt nor text", _FORM, _DO)


def _parts(document: Document) -> Iterator[Document]:
    """Of a long text, parts that end with a line."""
    if document.messages or document.is_prompt:
        yield document
        return
    for number, piece in enumerate(_pieces(document.text, _PART_CHARACTERS), start=1):
        yield Document(f"{document.name}, part {number}", piece)


def _pieces(text: str, characters: int) -> Iterator[str]:
    """A text in pieces of about so many characters, which end with a line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + characters - 1) + 1
        yield text[start : end or len(text)]
        start = end or len(text)
