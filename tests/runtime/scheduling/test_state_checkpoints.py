"""Which checkpoints of states stay, and prefixes of hybrids that requests share."""

from __future__ import annotations

import pytest

from specc.runtime.scheduling.state_checkpoints import StateCheckpoints
from specc.runtime.scheduling.state_slabs import StateShape, StateSizes, StateSlabs, num_bytes

A, B, C = b"a", b"b", b"c"


def fill(kept: StateCheckpoints, *keys: bytes) -> dict[bytes, int]:
    places = {}
    for key in keys:
        place = kept.reserve()
        assert place is not None
        kept.publish(place, key)
        places[key] = place
    return places


def test_the_one_that_nobody_used_for_longest_gives_way() -> None:
    kept = StateCheckpoints(2)
    places = fill(kept, A, B)
    assert kept.find(A) == places[A]
    kept.use(places[A])
    fill(kept, C)
    assert [kept.find(key) is not None for key in (A, B, C)] == [True, False, True]


def test_places_that_are_on_their_way_are_nobody_elses() -> None:
    """Of two passes at a time nothing gives way before it is known that they fill them."""
    kept = StateCheckpoints(2)
    places = fill(kept, A, B)
    first, second = kept.reserve(), kept.reserve()
    assert len({first, second, *places.values()}) == 4
    assert None not in (first, second)
    assert kept.find(A) == places[A]
    third = kept.reserve()
    assert (third, kept.find(A)) == (places[A], None)
    assert kept.reserve() == places[B]
    assert kept.reserve() is None
    assert first is not None
    kept.give_back(first)
    assert kept.reserve() == first


def test_two_of_one_prefix_are_one() -> None:
    kept = StateCheckpoints(1)
    first, second = kept.reserve(), kept.reserve()
    assert first is not None
    assert second is not None
    kept.publish(first, A)
    kept.publish(second, A)
    assert kept.find(A) == first
    # the other one is free again
    assert {kept.reserve(), kept.reserve()} == {second, 3 - first - second}
    assert kept.find(A) == first


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


def leave(kept: StateCheckpoints, key: bytes, before: bytes) -> None:
    place = kept.reserve()
    assert place is not None
    kept.publish(place, key, before)


def order_of_leaving(kept: StateCheckpoints, *keys: bytes) -> list[bytes]:
    gone: list[bytes] = []
    for number in range(len(keys)):
        fill(kept, b"new %d" % number)
        gone += [key for key in keys if kept.find(key) is None and key not in gone]
    return gone


def test_what_a_request_has_left_behind_gives_way_first() -> None:
    """The last of it first: others have the begin of a prompt in common."""
    kept = StateCheckpoints(4)
    fill(kept, b"old", A)
    leave(kept, B, A)
    leave(kept, C, B)
    assert order_of_leaving(kept, b"old", A, B, C) == [B, A, b"old", C]


def test_what_others_have_used_is_not_left_behind() -> None:
    kept = StateCheckpoints(4)
    kept.use(fill(kept, b"old", A)[A])
    leave(kept, B, A)
    leave(kept, C, B)
    assert order_of_leaving(kept, b"old", A, B, C) == [B, b"old", A, C]
