"""Ranks that meet at an address, and links over the connections that they make."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
import torch

from specc.errors import RankError
from specc.kernels import native, ranks
from specc.runtime.ranks.links import Link
from specc.runtime.ranks.sockets import Meeting, with_secret

# kernels/cpu/ranks_peer.h
HEAD_BYTES = 88


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    native.load()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def at_once(count: int, body: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(body, range(count)))


def test_all_ranks_are_connected_in_pairs_group_by_group() -> None:
    address = with_secret(free_address())
    groups = [(0, 1, 2, 3), (0, 1), (2, 3), (3, 0)]

    def body(rank: int) -> list[list[int]]:
        with closing(Meeting(address, rank, 4, 20)) as meeting:
            own = [(number, g) for number, g in enumerate(groups, start=1) if rank in g]
            return [meeting.connect(members, number) for number, members in own]

    connected = at_once(4, body)
    for rank in range(4):
        own = [g for g in groups if rank in g]
        for members, numbers in zip(own, connected[rank], strict=True):
            assert [number == -1 for number in numbers] == [one == rank for one in members]
    # what one end is given comes out of the other one
    ends = {
        (g, rank, other): socket.socket(fileno=number)
        for rank in range(4)
        for g, numbers in zip([g for g in groups if rank in g], connected[rank], strict=True)
        for other, number in zip(g, numbers, strict=True)
        if number >= 0
    }
    for (group, rank, other), end in ends.items():
        said = f"{group} {rank}".encode()
        end.sendall(said)
        assert ends[group, other, rank].recv(100) == said
    for end in ends.values():
        end.close()


def test_strangers_are_not_taken_for_ranks() -> None:
    address = with_secret(free_address())
    port = int(address.partition("#")[0].rpartition(":")[2])
    greeting = struct.Struct("<4sIIIH16s")
    secret = bytes.fromhex(address.partition("#")[2])
    strangers = (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(40),
        greeting.pack(b"spcG", 0, 1, 2, 7, bytes(16)),
        greeting.pack(b"spcG", 0, 1, 3, 7, secret),
        greeting.pack(b"spcG", 0, 2, 2, 7, secret),
        b"spcG",
    )
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(Meeting, address, 0, 2, 20)
        end = time.monotonic() + 10
        for data in strangers:
            while True:
                try:
                    one = socket.create_connection(("127.0.0.1", port), 5)
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < end
            # whoever is turned away may be so before it has said all
            with one, suppress(OSError):
                one.settimeout(10)
                one.sendall(data)
                one.shutdown(socket.SHUT_WR)
                assert one.recv(1) == b""
        assert not leader.done()
        with closing(Meeting(address, 1, 2, 10)), closing(leader.result(10)):
            pass


def test_who_does_not_come_is_named() -> None:
    address = with_secret(free_address())
    with pytest.raises(RankError) as caught:
        Meeting(address, 0, 3, 0.4)
    assert caught.value.found.endswith("rank 1, rank 2 absent after 0.4 s")
    # nobody listens
    with pytest.raises(RankError, match=r"rank 1 of 3 did not meet the others at tcp://127.0.0.1"):
        Meeting(address, 1, 3, 0.4)
    # a secret belongs into no message
    assert address.partition("#")[2] not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["env://", "tcp://host", "tcp://:1", "tcp://h:70000", "tcp://h:1#x"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(RankError, match="the address"):
        Meeting(address, 0, 2, 1)


@contextmanager
def link(time_limit: float = 10.0) -> Iterator[tuple[Link, socket.socket]]:
    """The receiving side of a link, and the socket of its sender."""
    sender, receiver = socket.socketpair()
    made = Link.over([receiver.detach(), -1], 1, time_limit)
    with sender:
        yield made, sender
        made.close()


def linked(time_limit: float = 10.0) -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        second = listener.accept()[0]
    giver = Link.over([-1, first.detach()], 0, time_limit)
    return giver, Link.over([second.detach(), -1], 1, time_limit)


def test_values_cross_a_link() -> None:
    """Of any size: more than a connection holds, too."""
    giver, taker = linked()
    with ThreadPoolExecutor(1) as pool:
        for shape in ((1,), (0, 3), (3, 5), (2000, 1500)):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                values = torch.randn(shape).mul(100).to(dtype)
                sent = pool.submit(giver.send, values)
                assert torch.equal(taker.receive(shape, dtype), values)
                sent.result(10)
    giver.close()
    taker.close()


def test_a_link_whose_sides_disagree() -> None:
    giver, taker = linked()
    with ThreadPoolExecutor(1) as pool:
        sent: Future[None] = pool.submit(giver.send, torch.ones(2, 3))
        with pytest.raises(RankError, match=r"rank 0 calls .*\[2, 3\].*, rank 1 calls .*\[3, 2\]"):
            taker.receive((3, 2), torch.float32)
        with pytest.raises(RankError, match=" calls "):
            sent.result(10)
    giver.close()
    taker.close()


def test_a_link_that_ends_or_is_given_up() -> None:
    giver, taker = linked()
    giver.close()
    with pytest.raises(RankError, match=r"rank 0 \(pid \d+\) has closed the group"):
        taker.receive((1,), torch.float32)
    taker.close()
    giver, taker = linked()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(taker.receive, (1,), torch.float32)
        time.sleep(0.1)
        giver.abort("rank 9 is gone")
        with pytest.raises(RankError, match="rank 9 is gone"):
            waiting.result(5)
    giver.close()
    taker.close()


def test_another_thread_ends_a_wait() -> None:
    giver, taker = linked()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(taker.receive, (1,), torch.float32)
        time.sleep(0.1)
        taker.abort("rank 9 is gone")
        with pytest.raises(RankError, match="rank 9 is gone"):
            waiting.result(5)
    # the first reason stays, and the other side is told
    taker.abort("another one")
    with pytest.raises(RankError, match="rank 9 is gone"):
        giver.send(torch.ones(1))
    giver.close()
    taker.close()


def test_a_side_that_is_late_within_its_data() -> None:
    """The head is there, and not all of the data: who keeps it back is named at the limit."""
    with link(0.6) as (taker, sender):
        head = head_of_send((4, 1 << 20))
        sender.sendall(head + bytes(1000))
        begin = time.monotonic()
        with pytest.raises(RankError, match=r"rank 0 \(pid \d+\), last collective 1: not at from"):
            taker.receive((4, 1 << 20), torch.float32)
        assert 0.5 < time.monotonic() - begin < 5


def test_a_side_that_ends_within_its_data() -> None:
    with link() as (taker, sender):
        sender.sendall(head_of_send((4, 8)) + bytes(100))
        sender.close()
        with pytest.raises(RankError, match=r"after 0\.\d s \(its connection has ended\)"):
            taker.receive((4, 8), torch.float32)


@pytest.mark.parametrize("place", [0, 4, 8, 16, 60])
def test_what_no_rank_says(place: int) -> None:
    """Another word, size, kind or version: an error, and nothing is taken."""
    head = bytearray(head_of_send((4, 8)))
    head[place] ^= 0x40
    with link() as (taker, sender):
        sender.sendall(bytes(head) + bytes(128))
        if place == 4:  # the process's number is for messages alone
            assert taker.receive((4, 8), torch.float32).eq(0).all()
        else:
            with pytest.raises(RankError, match=r"calls|another version"):
                taker.receive((4, 8), torch.float32)


def head_of_send(shape: tuple[int, int]) -> bytes:
    """What the library writes before values."""
    first, second = socket.socketpair()
    giver = Link.over([-1, first.detach()], 0, 5.0)

    def send() -> None:
        with pytest.raises(RankError):
            giver.send(torch.ones(shape))

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        with second:
            found = second.recv(4096)
        sent.result(10)
    giver.close()
    return found[:HEAD_BYTES]


def test_sockets_that_are_none() -> None:
    """Refused, and those that are given are closed."""
    first, second = socket.socketpair()
    with pytest.raises(RankError, match="no connection to rank 1"):
        ranks.open_sockets([-1, os.open(os.devnull, os.O_RDONLY), first.detach()], 0, 1.0)
    assert second.recv(1) == b""
    second.close()
    first, second = socket.socketpair()
    with pytest.raises(RankError, match="a time limit of nan"):
        ranks.open_sockets([-1, first.detach()], 0, float("nan"))
    assert second.recv(1) == b""
    second.close()
