"""Messages over real sockets: in pieces, cut, and to nobody."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from specc.errors import FaultError
from specc.runtime.ranks.channel import Channel
from specc.runtime.ranks.orders import Kind, Message, beat, encode

BIG = Message(Kind.PASS, (torch.arange(200_000),), 0, 4)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Channel]]:
    own, other = socket.socketpair()
    channel = Channel(other)
    yield own, channel
    own.close()
    channel.close()


def test_messages_come_whole_and_in_order(pair) -> None:
    own, channel = pair
    sender = threading.Thread(target=lambda: own.sendall(encode(BIG) + encode(beat(3, 7))))
    sender.start()
    first, second = channel.receive(), channel.receive()
    sender.join()
    assert first is not None
    assert second is not None
    assert torch.equal(first.tensors[0], BIG.tensors[0])
    assert first.sequence == 4
    assert second.kind is Kind.BEAT
    assert second.tensors[0].tolist() == [3, 7]


def test_what_comes_in_pieces_is_put_together(pair) -> None:
    own, channel = pair
    data = encode(beat(1, 0)) + encode(beat(2, 0))
    found = []
    for byte in data:
        own.sendall(bytes([byte]))
        found += [message.tensors[0].tolist() for message in channel.received()]
    assert found == [[1, 0], [2, 0]]
    assert not channel.is_ended
    assert channel.received() == []


def test_the_end_of_a_stream_is_no_message(pair) -> None:
    own, channel = pair
    own.sendall(encode(beat(5, 0)))
    own.close()
    assert channel.receive() is not None
    assert channel.receive() is None
    assert channel.is_ended


def test_the_end_is_seen_without_waiting(pair) -> None:
    own, channel = pair
    own.sendall(encode(beat(5, 0)))
    own.close()
    assert len(channel.received()) == 1
    assert channel.is_ended


@pytest.mark.parametrize("count", [1, 31, 40, 5000])
def test_a_cut_message_is_refused(pair, count: int) -> None:
    own, channel = pair
    own.sendall(encode(BIG)[:count])
    own.close()
    with pytest.raises(FaultError, match="ends after"):
        channel.receive()


def test_who_does_not_read_keeps_nobody_who_only_offers(pair) -> None:
    own, channel = pair
    for _ in range(20_000):
        channel.offer(beat(1, 1))
    # what did arrive is whole
    own.setblocking(False)
    data = b"".join(iter(lambda: _read(own), b""))
    size = len(encode(beat(1, 1)))
    assert len(data) > 100 * size
    assert data[: 100 * size] == encode(beat(1, 1)) * 100


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except BlockingIOError:
        return b""


def test_a_writer_that_waits_is_woken(pair) -> None:
    """Of a rank that is stopped, and reads nothing."""
    _, channel = pair
    failed: list[OSError] = []

    def write() -> None:
        try:
            for _ in range(100):
                channel.send(BIG)
        except OSError as error:
            failed.append(error)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(0.3)
    assert writer.is_alive()
    channel.shut()
    writer.join(10)
    assert not writer.is_alive()
    assert failed
