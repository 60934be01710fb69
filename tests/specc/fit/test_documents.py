"""Documents to learn from: what files hold, what is held out, and how they become rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.errors import InputFileError
from specc.fit.documents import (
    Document,
    Encoder,
    cut_lines,
    read_documents,
    split,
    without,
)

CHAT = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "that and this"}]


class Letters:
    """A tokenizer with a token for each character; a turn of a chat begins with its role."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def chat(self, messages: list[dict[str, Any]], is_open: bool) -> list[int]:
        if any(message["role"] == "tool" for message in messages):
            raise ValueError("no tools")
        text = "".join(f"<{x['role'][0]}>{x['content']}" for x in messages)
        return self.encode(text + "<a>" * is_open, add_special_tokens=False)


def encoder() -> Encoder:
    return Encoder(Letters(), 1)  # type: ignore[arg-type]


def lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def test_directories_hold_what_is_text_and_each_text_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for number in range(40):
        (tmp_path / "sub" / f"{number}.rst").write_text(f"text {number}\n", encoding="utf-8")
    (tmp_path / "copy.md").write_text("text 3\n", encoding="utf-8")
    (tmp_path / "image").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / ".hidden").write_text("hidden", encoding="utf-8")
    found = read_documents([tmp_path])
    assert sorted(x.text for x in found) == sorted(f"text {n}\n" for n in range(40))
    learned, held = split(found)
    assert {x.text for x in learned} | {x.text for x in held} == {x.text for x in found}
    assert len(learned) + len(held) == len(found)
    assert 0 < len(held) < 10
    # by content alone
    assert split(found[::-1])[1] == held[::-1]
    assert without(found, ["text 3\n", "nowhere"]) == [x for x in found if x.text != "text 3\n"]


def test_lines_are_chats_prompts_or_texts(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", {"messages": CHAT}, {"prompt": "ask"}, {"text": "long"})
    chat, prompt, text = read_documents([path])
    assert (chat.has_answer, prompt.is_prompt, text.is_prompt) == (True, True, False)
    assert chat.text == "what\nthat and this"
    (row,) = encoder().rows(chat, 100)
    assert bytes(row.tokens) == b"<u>what<a>that and this"
    assert bytes(row.tokens[row.begin :]) == b"that and this"
    assert list(encoder().rows(prompt, 100)) == []
    rows = list(encoder().rows(Document("x", "abcdefg"), 4))
    assert [row.tokens for row in rows] == [[1, *b"abc"], [1, *b"def"], [1, *b"g"]]
    generator = torch.Generator().manual_seed(0)
    assert bytes(encoder().prompt(chat, 50, generator)) == b"<u>what<a>"
    assert encoder().prompt(prompt, 50, generator) == [1, *b"ask"]


def test_of_long_chats_the_answer_counts() -> None:
    document = Document("x", "", (CHAT[0] | {"content": "q" * 300}, CHAT[1]))
    (row,) = encoder().rows(document, 40)
    assert len(row.tokens) == 40
    assert bytes(row.tokens[row.begin :]) == b"that and this"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "line 1: no JSON"),
        ('{"prompt": 3}\n', "neither messages nor prompt nor text"),
        ('{"text": "a"}\n[1]\n', "line 2: no object"),
        ('{"messages": [{"role": "user"}]}\n', "a message without a content"),
        ("\n", "no text"),
    ],
)
def test_lines_that_are_none_are_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "x.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(InputFileError, match=words):
        read_documents([tmp_path / "x.jsonl"])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="nowhere"):
        read_documents([tmp_path / "nowhere"])
    (tmp_path / "x.txt").write_bytes(b"\xff")
    with pytest.raises(InputFileError, match="not UTF-8"):
        read_documents([tmp_path / "x.txt"])


def test_a_chat_that_no_template_takes_is_named() -> None:
    document = Document("x.jsonl, line 7", "", ({"role": "tool", "content": ""}, CHAT[1]))
    with pytest.raises(InputFileError, match="line 7: no tools"):
        list(encoder().rows(document, 100))


def test_one_file_is_cut_into_parts_of_which_some_are_held_out(tmp_path: Path) -> None:
    text = "".join(f"line {number} of a text\n" for number in range(2000))
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    found = read_documents([tmp_path / "x.txt"])
    assert "".join(x.text for x in found) == text
    assert all(x.text.endswith("\n") for x in found)
    learned, held = split(found)
    assert min(len(learned), len(held)) >= 1
    (tmp_path / "y.txt").write_text("short\n", encoding="utf-8")
    with pytest.raises(InputFileError, match="one short document"):
        split(read_documents([tmp_path / "y.txt"]))


def test_prompts_are_whole_lines() -> None:
    text = "".join(f"line {number}\n" for number in range(500))
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        cut = cut_lines(text, 60, generator)
        assert cut in text
        assert cut.startswith("line ")
        assert cut.endswith("\n")
        assert 60 <= len(cut) <= 80
    # of a line that is longer than all, a part
    assert 60 <= len(cut_lines("x" * 5000, 60, generator)) <= 120
