"""Responses that are kept: whose they are, and how many."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from specc.server.responses.answer import new_id
from specc.server.responses.items import item_id, place_of
from specc.server.responses.store import Kept, ResponseStore


def kept(size: int = 0, previous: str | None = None) -> Kept:
    return Kept(b"x" * size, b"[]", previous)


SMALL = kept().num_bytes


def test_another_caller_finds_nothing() -> None:
    store = ResponseStore(8, 1 << 20)
    assert store.put(b"one", "resp_a", kept())
    assert store.get(b"two", "resp_a") is None
    assert store.chain(b"two", "resp_a") is None
    assert not store.delete(b"two", "resp_a")
    assert store.get(b"one", "resp_a") is not None
    # a chain does not leave its caller's responses either
    store.put(b"two", "resp_b", kept(previous="resp_a"))
    assert store.chain(b"two", "resp_b") is None


def test_a_chain_ends_where_a_response_was_forgotten() -> None:
    store = ResponseStore(8, 1 << 20)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put(b"me", name, kept(ord(name), previous))
    chain = store.chain(b"me", "c")
    assert chain is not None
    assert [len(one.response) for one in chain] == [ord("a"), ord("b"), ord("c")]
    assert store.delete(b"me", "a")
    assert store.chain(b"me", "c") is None
    assert not store.delete(b"me", "a")


def test_the_longest_unused_one_of_who_has_most_goes() -> None:
    store = ResponseStore(4, 1 << 20)
    store.put(b"small", "s", kept())
    for name in "abc":
        store.put(b"large", name, kept(100))
    store.get(b"large", "a")
    store.put(b"large", "d", kept(100))
    assert [name for name in "abcd" if store.get(b"large", name)] == ["a", "c", "d"]
    # a caller who comes in masses pushes out nobody else's
    for index in range(20):
        store.put(b"large", f"n{index}", kept(100))
    assert store.get(b"small", "s") is not None
    assert store.num_responses == 4


def test_what_does_not_fit_is_not_kept() -> None:
    store = ResponseStore(4, 4 * SMALL)
    assert not store.put(b"me", "a", kept(5 * SMALL))
    assert store.put(b"me", "b", kept(3 * SMALL))
    assert store.put(b"me", "c", kept(2 * SMALL))
    assert store.get(b"me", "b") is None
    none = ResponseStore(0, 1 << 20)
    assert not none.put(b"me", "a", kept())
    assert none.num_responses == none.num_bytes == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("pgd"), st.integers(0, 2), st.integers(0, 5), st.integers(0, 3)),
        max_size=60,
    )
)
def test_it_never_holds_more_than_its_limits(steps: list[Any]) -> None:
    """And counts as a plain list of what is there does."""
    store, most = ResponseStore(5, 6 * SMALL), 6 * SMALL
    for what, who, which, size in steps:
        caller, name = bytes([who]), str(which)
        if what == "p":
            is_kept = store.put(caller, name, kept(size * SMALL))
            assert is_kept == (store.get(caller, name) is not None)
        elif what == "g":
            store.get(caller, name)
        else:
            store.delete(caller, name)
            assert store.get(caller, name) is None
        there = [store.get(bytes([c]), str(n)) for c in range(3) for n in range(6)]
        found = [one for one in there if one is not None]
        assert store.num_responses == len(found) <= 5
        assert store.num_bytes == sum(one.num_bytes for one in found) <= most


def test_ids_say_where_an_item_is_and_are_long() -> None:
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100
    for found in ids:
        assert len(found) >= len("resp_") + 32
        name = item_id("reasoning", found, "o", 12)
        assert place_of(name) == (found, "o", 12)
    for wrong in ("", "msg_", "msg_o", "msg_abo", "msg_abo-1", "msg_abo²", "abo1", "msg_o1"):
        assert place_of(wrong) is None or place_of(wrong) == ("resp_ab", "o", 1)
