"""Messages over a socket: written and awaited as wholes, or taken as they come."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading

import torch

from specc.errors import FaultError
from specc.runtime.ranks.orders import (
    HEADER_BYTES,
    Message,
    decode,
    decode_header,
    encode,
    refused,
)

_AT_ONCE = 1 << 16


class Channel:
    """One end of a connection.

    Args:
        connection: a stream; it belongs to the channel.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._lock = threading.Lock()
        self._received = bytearray()
        # the other end says no more
        self.is_ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Write a message, from any thread; waits while the other end does not read.

        Raises:
            OSError: the other end is gone, or `shut` was called.
        """
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """The same, of what `encode` has made."""
        with self._lock:
            self._socket.sendall(data)

    def offer(self, message: Message) -> None:
        """Write a message, or leave it if the other end does not read or is gone."""
        data = encode(message)
        # a part of a message would be garbage to the other end; small ones fit as wholes or not
        with contextlib.suppress(OSError), self._lock:
            sent = self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            if sent < len(data):
                self._socket.shutdown(socket.SHUT_WR)

    def receive(self) -> Message | None:
        """Wait for a message; None where the other end has ended.

        Raises:
            FaultError: what comes is no message, or is cut.
        """
        kept = self._received
        while len(kept) < HEADER_BYTES:
            try:
                data = self._socket.recv(_AT_ONCE)
            except ConnectionError:
                data = b""
            if not data:
                self.is_ended = True
                if not kept:
                    return None
                raise _cut(len(kept), HEADER_BYTES)
            kept += data
        header = decode_header(kept[:HEADER_BYTES])
        payload = torch.empty(header.num_bytes, dtype=torch.uint8)
        end = min(len(kept), HEADER_BYTES + header.num_bytes)
        done = end - HEADER_BYTES
        if done:
            ctypes.memmove(payload.data_ptr(), bytes(kept[HEADER_BYTES:end]), done)
        del kept[:end]
        self._read_rest(payload, done)
        return decode(header, payload)

    def received(self) -> list[Message]:
        """Messages that are there, without waiting; sets `is_ended`.

        Raises:
            FaultError: what came is no message.
        """
        while True:
            try:
                data = self._socket.recv(_AT_ONCE, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.is_ended = True
                break
            self._received += data
        messages = []
        while len(self._received) >= HEADER_BYTES:
            header = decode_header(self._received[:HEADER_BYTES])
            end = HEADER_BYTES + header.num_bytes
            if len(self._received) < end:
                break
            payload = torch.empty(header.num_bytes, dtype=torch.uint8)
            ctypes.memmove(
                payload.data_ptr(), bytes(self._received[HEADER_BYTES:end]), len(payload)
            )
            del self._received[:end]
            messages.append(decode(header, payload))
        return messages

    def shut(self) -> None:
        """End the connection, from any thread; whoever waits on it is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._socket.close()

    def _read_rest(self, payload: torch.Tensor, done: int) -> None:
        """Wait for the bytes of a payload from `done` on."""
        if done == len(payload):
            return
        memory = (ctypes.c_char * len(payload)).from_address(payload.data_ptr())
        view = memoryview(memory).cast("B")
        while done < len(view):
            try:
                count = self._socket.recv_into(view[done:])
            except ConnectionError:
                count = 0
            if count == 0:
                self.is_ended = True
                raise _cut(done, len(view))
            done += count


def _cut(done: int, wanted: int) -> FaultError:
    return refused(f"a message that ends after {done} of {wanted} bytes")
