"""`text_offset` of completions: where each token is in the text, whatever the text leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from specc.server.logprobs import TextOffsets, TokenTexts
from tests.runtime.conftest import build_engine
from tests.specc.server.scripted import byte_tokenizer, serve_scripted
from tests.specc.server.serving import GREEDY, Server, greedy_text, serve
from tests.specc.server.test_api import events

PROMPT = "hello world"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Its tokenizer puts a token in front of prompts that texts have not got."""
    engine = build_engine()
    engine.tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 60)]
    )
    with serve(engine) as running:
        yield running


def logprobs_of(
    server: Server, stream: bool, **body: Any
) -> list[tuple[str, list[str], list[int]]]:
    """(text, tokens, offsets) of each choice."""
    answer = server.post("/v1/completions", body | {"logprobs": 0, "stream": stream})
    assert answer.status_code == 200, answer.text
    parts = events(answer.text)[:-1] if stream else [answer.json()]
    found: dict[int, tuple[str, list[str], list[int]]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        text, tokens, offsets = found.get(choice["index"], ("", [], []))
        more = choice["logprobs"]
        found[choice["index"]] = (
            text + choice["text"], tokens + more["tokens"], offsets + more["text_offset"]
        )  # fmt: skip
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_the_prompt_has_not_got(server, stream: bool) -> None:
    for prompt, num_ids in ((PROMPT, 12), ([60, *range(5)], 6), ([3, 4], 2)):
        found = logprobs_of(server, stream, prompt=prompt, echo=True, **GREEDY)
        ((text, tokens, offsets),) = found
        is_text = isinstance(prompt, str)
        if is_text:
            assert (tokens[0], offsets[:2]) == ("<eos>", [0, 0])
            assert text == PROMPT + greedy_text(server.engine, PROMPT, 12)
        assert len(tokens) == num_ids + 12
        places = [
            (token, text[at : at + len(token)]) for token, at in zip(tokens, offsets, strict=True)
        ]
        assert all(token == there for token, there in places[is_text:]), places
    # without echo, from the output's beginning
    ((text, tokens, offsets),) = logprobs_of(server, stream, prompt=PROMPT, **GREEDY)
    assert offsets == list(range(12))
    # each output from its own
    body = {"prompt": [PROMPT, "ab"], "n": 2, "echo": True, "max_tokens": 4, "temperature": 1.5}
    for text, tokens, offsets in logprobs_of(server, stream, **body, seed=3, ignore_eos=True):
        assert offsets[:2] == [0, 0]
        assert [text[at] for at in offsets[1:]] == tokens[1:]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_several_tokens_and_special_ones(stream: bool, skips: bool) -> None:
    said = "é<think>🙂 x</think>ü<eos>"
    with serve_scripted() as (server, script):
        script.set(said, "añ ")
        body = {"prompt": "añ ", "max_tokens": 30, "temperature": 0, "skip_special_tokens": skips}
        ((text, tokens, offsets),) = logprobs_of(server, stream, echo=True, **body)
    shown = "é🙂 xü" if skips else "é<think>🙂 x</think>ü"
    assert text.startswith("añ " + shown)
    # two bytes, four, and so on, each at its character
    letters = ["a", "ñ", "ñ", " ", "é", "é", "<think>", *"🙂🙂🙂🙂", " ", "x", "</think>", "ü", "ü"]
    at, want = 0, []
    for i, letter in enumerate(letters):
        want.append(at)
        is_last = i + 1 == len(letters) or letters[i + 1] != letter
        at += len(letter) if is_last and not (skips and letter.startswith("<")) else 0
    assert offsets[: len(want)] == want
    assert len(tokens) == len(offsets)


def metaspace_tokenizer() -> Tokenizer:
    words = ["<s>", "▁The", "▁cat", "▁", "s", "É", "▁é", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "s"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


@pytest.mark.parametrize(
    ("ids", "text", "want"),
    [
        # a space that the text of a first word has not got
        ([0, 1, 2, 4], "The cats", [0, 0, 3, 7]),
        ([1, 2], " The cat", [0, 4]),
        # written by the client, and added by the tokenizer
        ([0, 1], "<s> The", [0, 3]),
        ([0, 1, 0], "The <s>", [0, 0, 3]),
        # bytes of a character; and of none
        ([1, 7, 8, 2], "Theé cat", [0, 3, 3, 4]),
        ([7, 2], "\ufffd cat", [0, 1]),
        # what a normalizer has changed: those after it are where they are
        ([5, 2, 4], "E\u0301 cats", [0, 2, 6]),
        ([], "The", []),
        ([0], "", [0]),
    ],
)
def test_places_in_a_prompt(ids: list[int], text: str, want: list[int]) -> None:
    offsets = TextOffsets(TokenTexts(metaspace_tokenizer()), skips_special=True)
    assert offsets.of_prompt(ids, text) == want
    # and the output begins where the prompt ends
    assert offsets.of_output([2, 0, 4], " cats") == [len(text), len(text) + 4, len(text) + 4]


def test_an_output_after_nothing_but_special_tokens() -> None:
    offsets = TextOffsets(TokenTexts(metaspace_tokenizer()), skips_special=True)
    assert offsets.of_output([0, 1], "The") == [0, 0]
    assert offsets.of_output([2, 7, 8, 4], " caté") == [3, 7, 7, 8]


def test_a_normalizer_that_shortens_costs_no_more_than_its_place() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    text = "cafe\u0301 au lait"
    ids = tokenizer.encode(text).ids
    found = TextOffsets(TokenTexts(tokenizer), skips_special=True).of_prompt(ids, text)
    assert found == sorted(found)
    assert [text[at] for at in found[-8:]] == list(" au lait")
