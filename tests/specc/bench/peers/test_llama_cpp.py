"""The loop over llama.cpp's passes, with a context that only counts: the same with any draft."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specc.bench.peers.llama_cpp import _Context, _Loop, _ModelDrafter
from specc.bench.peers.names import ASSISTED
from specc.bench.peers.peer import Job, NotAvailableError

BATCH = [[1, 2, 3], [4], [5, 6]]


class CountedContext:
    """A model whose next token is a function of all tokens before; its rows have to be right.

    Args:
        error: how often it chooses another token, of 10 times; 0 is the target.
    """

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.rows: dict[int, list[int]] = {}
        self.passes = 0

    def next(self, tokens: Sequence[int]) -> int:
        dice = random.Random(f"{tokens}")
        right = dice.randrange(9)
        return (
            right + 1
            if random.Random(f"{tokens} {self.error}").randrange(10) < self.error
            else right
        )

    def decode(self, passed: Sequence[tuple[int, int, Sequence[int], int]]) -> list[list[int]]:
        self.passes += 1
        result = []
        for row, first, tokens, num_wanted in passed:
            kept = self.rows.setdefault(row, [])
            assert first == len(kept), "positions follow the rows that are there"
            assert tokens
            kept += tokens
            ends = range(len(kept) - num_wanted + 1, len(kept) + 1)
            result.append([self.next(kept[:end]) for end in ends])
        return result

    def cut(self, row: int, length: int) -> None:
        assert length < len(self.rows[row])
        del self.rows[row][length:]

    def clear(self) -> None:
        self.rows.clear()


def make_loop(target: CountedContext, draft: CountedContext | None, num: int) -> _Loop:
    loop = object.__new__(_Loop)
    loop._job = Job(
        "plain" if draft is None else ASSISTED, "", None, "float32", 1, [BATCH], 12, num
    )
    loop._target, loop._draft = target, draft
    loop.settings = {"only": {"num_tokens": num} if draft else {}}
    return loop


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    target = CountedContext()
    found = make_loop(target, None, 0).run("only")
    for ids, output in zip(BATCH, found.outputs, strict=True):
        text = list(ids)
        for token in output:
            assert token == target.next(text)
            text.append(token)
    assert (found.num_steps, found.num_request_steps) == (11, 33)
    assert (target.passes, found.mean_acceptance_length) == (12, None)
    return found.outputs


@pytest.mark.parametrize("num", [1, 2, 5, 20])
@pytest.mark.parametrize("error", [0, 3, 10])
def test_drafts_change_nothing_but_the_number_of_passes(plain, num, error):
    target, draft = CountedContext(), CountedContext(error)
    found = make_loop(target, draft, num).run("only")
    assert found.outputs == plain
    assert target.passes == found.num_steps + 1
    if error == 0:
        # 11 tokens after the first one, `num` and one at a time
        assert found.num_steps == -(-11 // (num + 1))
    if error == 10:
        assert found.num_steps == 11
    assert found.mean_acceptance_length == 33 / found.num_request_steps
    # nothing is drafted that could not be emitted
    longest = max(map(len, target.rows.values()))
    assert longest <= 3 + 12


def test_lookups_propose_what_the_text_has(plain):
    """Of the package's own, which a stand-in has the form of here."""
    target = CountedContext()
    loop = make_loop(target, None, 0)
    oracle = {tuple(ids): ids + output for ids, output in zip(BATCH, plain, strict=True)}

    def propose(texts, room):
        whole = [next(t for ids, t in oracle.items() if t[: len(x)] == x) for x in texts]
        return [w[len(x) : len(x) + most] for w, x, most in zip(whole, texts, room, strict=True)]

    outputs, times = loop._generate(BATCH, propose, 3)
    assert outputs == plain
    assert (times.steps, times.request_steps) == (3, 9)


def test_a_drafter_follows_what_was_accepted():
    """Its rows after texts that took another way than it drafted."""
    context = CountedContext()
    drafter = _ModelDrafter(context)
    text = [1, 2, 3]
    (first,) = drafter([text], [3])
    assert first == [context.next(text), *first[1:]]
    other = [*text, first[0], first[1] + 1, 4]
    (second,) = drafter([other], [2])
    assert second[0] == context.next(other)
    assert second[1] == context.next([*other, second[0]])
    assert context.rows[0] == [*other, second[0]]
    assert drafter([other], [0]) == [[]]


@pytest.mark.parametrize("can", [True, False])
def test_rows_that_stay_are_no_measurement(can):
    """Of hybrids, where the library refuses to remove what the states have seen."""

    class Library:
        @staticmethod
        def llama_memory_seq_rm(memory: object, row: int, first: int, last: int) -> bool:
            assert (memory, row, first, last) == ("memory", 2, 7, -1)
            return can

    context = object.__new__(_Context)
    context._library, context._memory = Library, "memory"
    if can:
        context.cut(2, 7)
        return
    with pytest.raises(NotAvailableError, match="no earlier states"):
        context.cut(2, 7)
