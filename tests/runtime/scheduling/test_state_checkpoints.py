"""Which checkpoints of states stay, and prefixes of hybrids that requests share."""

from __future__ import annotations

import pytest

from specc.runtime.scheduling.state_checkpoints import StateCheckpoints
from specc.runtime.scheduling.state_slabs import StateShape, StateSizes, StateSlabs, num_bytes

A, B, C = b"a", b"b", b"c"


def test_the_one_that_nobody_used_for_longest_gives_way() -> None:
    kept = StateCheckpoints(2)
    places = {}
    for key in (A, B):
        place = kept.reserve()
        assert place is not None
        kept.publish(place, key)
        places[key] = place
    assert kept.find(A) == places[A]
    kept.use(places[A])
    assert kept.reserve() == places[B]
    assert kept.find(B) is None
    kept.publish(places[B], C)
    assert (kept.find(A), kept.find(C)) == (places[A], places[B])


def test_reserved_places_are_nobody_elses() -> None:
    kept = StateCheckpoints(2)
    first, second = kept.reserve(), kept.reserve()
    assert {first, second} == {0, 1}
    assert kept.reserve() is None
    assert first is not None
    kept.give_back(first)
    assert kept.reserve() == first


def test_two_of_one_prefix_are_one() -> None:
    kept = StateCheckpoints(3)
    places = [kept.reserve() for _ in range(2)]
    for place in places:
        assert place is not None
        kept.publish(place, A)
    assert kept.find(A) == places[0]
    # the other one is free again
    assert {kept.reserve(), kept.reserve()} == {places[1], 0} - {None}
    assert kept.find(A) == places[0]


def test_nothing_is_kept_without_places() -> None:
    assert StateCheckpoints(0).reserve() is None


def test_slabs_have_the_bytes_that_are_planned() -> None:
    import torch

    shapes = [
        StateShape(2, (3, 5), 5, torch.bfloat16),
        StateShape(1, (2, 4, 4), 30, torch.float32),
    ]
    sizes = StateSizes(3, 7, 4, 16)
    slabs = StateSlabs(shapes, sizes)
    held = [*slabs.states, *slabs.replay, *slabs._kept]
    assert sum(slab.nbytes for slab in held) == num_bytes(shapes, sizes)


def test_a_place_that_is_free_cannot_be_given_back() -> None:
    slabs = StateSlabs([], StateSizes(2, 1))
    place = slabs.take()
    slabs.give_back(place)
    with pytest.raises(RuntimeError, match="not in use"):
        slabs.give_back(place)


def test_a_later_one_takes_the_place_of_what_nobody_used() -> None:
    kept = StateCheckpoints(3)
    for key in (A, B):
        place = kept.reserve()
        assert place is not None
        kept.publish(place, key)
    place = kept.find(B)
    assert place is not None
    kept.use(place)
    kept.supersede(A)
    kept.supersede(B)
    kept.supersede(C)  # which gave way before
    assert (kept.find(A), kept.find(B)) == (None, place)
