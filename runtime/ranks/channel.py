"""Messages over a socket: written and awaited as wholes, or taken as they come."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading

import torch

from specc.runtime.ranks.orders import (
    HEADER_BYTES,
    Header,
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
        head = bytearray(HEADER_BYTES)
        if not self._read_into(memoryview(head), may_end=True):
            return None
        header = decode_header(head)
        return self._read_payload(header)

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

    def _read_payload(self, header: Header) -> Message:
        payload = torch.empty(header.num_bytes, dtype=torch.uint8)
        if header.num_bytes:
            memory = (ctypes.c_char * header.num_bytes).from_address(payload.data_ptr())
            self._read_into(memoryview(memory).cast("B"))
        return decode(header, payload)

    def _read_into(self, view: memoryview, may_end: bool = False) -> bool:
        """False where the stream ends before the first byte, and may."""
        done = 0
        while done < len(view):
            try:
                count = self._socket.recv_into(view[done:])
            except ConnectionError:
                count = 0
            if count == 0:
                self.is_ended = True
                if may_end and done == 0:
                    return False
                raise refused(f"a message that ends after {done} of {len(view)} bytes")
            done += count
        return True
