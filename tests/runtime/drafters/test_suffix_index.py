"""Proposals of the host's index, against loops over all suffixes and places."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.errors import ConfigError
from specc.kernels.reference.trees import lookup_reference
from specc.runtime.drafters.suffix_automaton import SuffixAutomaton
from specc.runtime.drafters.suffix_index import OutputIndex, SuffixIndex


def lookup_by_loops(
    text: list[int], num_tokens: int, max_ngram: int | None
) -> tuple[list[int], int]:
    """The definition: longest suffix, then latest place; proposals continue with themselves."""
    longest = len(text) - 1 if max_ngram is None else min(max_ngram, len(text) - 1)
    for length in range(longest, 0, -1):
        suffix = text[len(text) - length :]
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == suffix:
                context = list(text)
                for i in range(num_tokens):
                    context.append(context[place + i])
                return context[len(text) :], length
    return [], 0


def outputs_by_loops(
    texts: list[list[int]], tokens: list[int], num_tokens: int, longest: int
) -> tuple[list[int], int]:
    """Longest suffix, then latest text, then latest place with a token after it."""
    for length in range(min(longest, len(tokens)), 0, -1):
        suffix = tokens[len(tokens) - length :]
        for text in reversed(texts):
            for place in range(len(text) - 1, length - 1, -1):
                if text[place - length : place] == suffix:
                    return text[place : place + num_tokens], length
    return [], 0


@st.composite
def pieces(draw, most: int = 40):
    """A text in pieces; many of them repeat what came before."""
    vocabulary = draw(st.integers(1, 4))
    text: list[int] = []
    made = []
    for _ in range(draw(st.integers(1, most))):
        if text and draw(st.booleans()):
            start = draw(st.integers(0, len(text) - 1))
            piece = text[start : start + draw(st.integers(1, 7))]
        else:
            piece = draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=3))
        text += piece
        made.append(piece)
    return made


@given(pieces(), st.integers(1, 9))
@settings(deadline=None, max_examples=100)
def test_equals_loops(made, num_tokens):
    index, text = SuffixIndex(), []
    for piece in made:
        index.extend(piece)
        text += piece
        assert len(index) == len(text)
        for max_ngram in (None, 1, 2, 3, 6):
            want = lookup_by_loops(text, num_tokens, max_ngram)
            assert index.propose(num_tokens, max_ngram) == want


def fibonacci(length: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < length:
        a, b = b, b + a
    return b[:length]


REPETITIVE = {
    "one token": [3] * 150,
    "period 7": [i % 7 for i in range(150)],
    "fibonacci": fibonacci(150),
    "runs of 25": [int(i % 25 == 0) for i in range(150)],
    "runs that grow": [int(c) for n in range(1, 16) for c in "0" * n + "1"],
    "halves": [0] * 70 + [1] + [0] * 70 + [2],
    "binary": [random.Random(3).randrange(2) for _ in range(150)],
}


@pytest.mark.parametrize("name", REPETITIVE)
def test_repetitive_texts(name):
    index, text = SuffixIndex(), []
    for token in REPETITIVE[name]:
        index.extend([token])
        text.append(token)
        for max_ngram in (None, 4):
            assert index.propose(5, max_ngram) == lookup_by_loops(text, 5, max_ngram)


@pytest.mark.parametrize("ngram", [1, 3, 5])
def test_equals_the_operator(ngram):
    """The oracle of `specc::lookup`, which reads tokens out of blocks."""
    chooser = random.Random(ngram)
    for _ in range(40):
        text = [chooser.randrange(3) for _ in range(chooser.randint(1, 30))]
        index = SuffixIndex()
        index.extend(text)
        found, length = index.propose(4, ngram)
        history = torch.zeros(1, 32, dtype=torch.int32)
        history[0, : len(text) - 1] = torch.tensor(text[:-1], dtype=torch.int32)
        tokens, parents = lookup_reference(
            history,
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([len(text) - 1], dtype=torch.int32),
            torch.tensor([[0, text[-1]]]),
            ngram,
            4,
        )
        assert tokens[0, 1:].tolist() == (found or [0] * 4)
        assert (parents[0, 1] >= 0) == (length > 0)


def proposals(text: list[int], num_tokens: int, max_ngram: int | None = None):
    index = SuffixIndex()
    index.extend(text)
    return index.propose(num_tokens, max_ngram)


def test_rules_by_hand():
    assert proposals([], 3) == ([], 0)
    assert proposals([5], 3) == ([], 0)
    assert proposals([5, 6], 3) == ([], 0)
    # the longer suffix beats the later place
    assert proposals([1, 2, 9, 2, 8, 1, 2], 1) == ([9], 2)
    assert proposals([1, 2, 9, 2, 8, 1, 2], 1, 1) == ([8], 1)
    # of equally long ones, the later place
    assert proposals([1, 2, 9, 1, 2, 8, 1, 2], 2) == ([8, 1], 2)
    # after the end, the proposals themselves
    assert proposals([4, 1, 2, 3, 1, 2, 3], 5) == ([1, 2, 3, 1, 2], 3)
    assert proposals([7, 7], 4) == ([7, 7, 7, 7], 1)
    assert proposals([7] * 9, 3) == ([7, 7, 7], 8)
    assert proposals([7] * 9, 3, 2) == ([7, 7, 7], 2)
    assert proposals([7] * 9, 0) == ([], 0)
    assert proposals([7] * 9, 3, 0) == ([], 0)


def test_pieces_do_not_matter():
    text = [random.Random(1).randrange(3) for _ in range(60)]
    whole, single = SuffixIndex(), SuffixIndex()
    whole.extend(text)
    for token in text:
        single.extend([token])
    single.extend([])
    assert whole.propose(6) == single.propose(6)


class Counting(array):
    """Counts reads."""

    reads = 0

    def __getitem__(self, index):
        Counting.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("period", [2, 50, 1500])
def test_work_does_not_grow_with_runs(period):
    """Runs of one token, again and again, are the worst case of finding last places."""
    automaton = SuffixAutomaton()
    automaton._taker = Counting("i", automaton._taker)
    Counting.reads = 0
    count = 12000
    for i in range(count):
        automaton.append(int(i % period == 0))
        automaton.take()
    assert Counting.reads < 6 * count


@given(st.lists(pieces(8), min_size=1, max_size=6), pieces(6), st.integers(1, 5))
@settings(deadline=None, max_examples=200)
def test_outputs_equal_loops(texts, made, num_tokens):
    index, added = OutputIndex(), []
    tokens = [token for piece in made for token in piece]
    assert index.propose(tokens, num_tokens) == ([], 0)
    for parts in texts:
        text = [token for piece in parts for token in piece]
        index.add(text)
        added.append(text)
        for end in {1, len(tokens) // 2, len(tokens)}:
            want = outputs_by_loops(added, tokens[:end], num_tokens, 128)
            assert index.propose(tokens[:end], num_tokens) == want


@pytest.mark.parametrize("longest", [1, 5, 40])
def test_outputs_with_long_matches(longest):
    """The window of tokens that is looked at grows, up to the longest suffix that counts."""
    chooser = random.Random(5)
    text = [chooser.randrange(50) for _ in range(200)]
    index = OutputIndex(longest=longest)
    index.add([49, *text])
    index.add([*text[:60], 8])
    for length in (1, 7, 8, 9, 31, 32, 33, 60, 150):
        context = [3, *text[:length]]
        want = outputs_by_loops([[49, *text], [*text[:60], 8]], context, 3, longest)
        assert index.propose(context, 3) == want
        assert want[1] == min(longest, length)


def test_outputs_by_hand():
    index = OutputIndex()
    index.add([1, 2, 3, 4])
    assert index.propose([9, 2, 3], 3) == ([4], 2)
    # the last token of a text is no place: nothing follows it there
    assert index.propose([9, 4], 3) == ([], 0)
    assert index.propose([3, 4], 3) == ([], 0)
    index.add([7, 3, 5])
    assert index.propose([9, 3], 3) == ([5], 1)
    assert index.propose([2, 3], 3) == ([4], 2)
    # [4, 7] never stood in one text
    assert index.propose([3, 4, 7], 2) == ([3, 5], 1)
    assert index.propose([2, 3], 0) == ([], 0)
    index.add([])
    index.add([3])
    assert index.propose([9, 3], 3) == ([5], 1)


def test_old_outputs_are_dropped():
    index = OutputIndex(max_tokens=40)
    for number in range(50):
        index.add([1000 + number, 2000 + number, 3000 + number])
        assert len(index) <= 40
        assert index.propose([1000 + number], 2) == ([2000 + number, 3000 + number], 1)
        # half of the tokens at least: four texts of four tokens, the separator included
        if number >= 4:
            assert index.propose([996 + number], 1) == ([1996 + number], 1)
    assert index.propose([1000 + 30], 1) == ([], 0)


def test_the_young_generation_wins_a_tie_and_the_longer_match_wins():
    index = OutputIndex(max_tokens=20)
    index.add([1, 2, 3, 4, 5])
    index.add([6, 2, 7, 8])
    assert index.propose([9, 2], 1) == ([7], 1)
    assert index.propose([1, 2], 1) == ([3], 2)


def test_of_a_long_output_the_end_is_kept():
    index = OutputIndex(max_tokens=40)
    index.add(list(range(100)))
    assert len(index) == 20
    assert index.propose([97], 3) == ([98, 99], 1)
    assert index.propose([80], 3) == ([], 0)
    assert index.propose([81], 2) == ([82, 83], 1)


@pytest.mark.parametrize("options", [{"max_tokens": 3}, {"longest": 0}], ids=str)
def test_bad_options(options):
    with pytest.raises(ConfigError):
        OutputIndex(**options)
