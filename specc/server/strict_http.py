"""What of HTTP/1.1 is taken: stricter than h11, where a proxy could read a request differently.

Two readers that disagree on where a request ends are what request smuggling lives on. So whatever
has two readings is refused, and the connection closed: a length beside chunks, lengths that
repeat, lines that end without a carriage return, lines that are folded, odd sizes of chunks. So is
a body of very small chunks: parsing them costs thousands of times as much as sending them.
"""

from __future__ import annotations

import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

# bytes of a request line with its headers, and lines of it
MAX_HEAD_BYTES, MAX_HEAD_LINES = 32 << 10, 128
_MAX_CHUNK_LINE = 256
# chunks of a body, and more for each of so many of its bytes: each costs more than what it holds
FREE_CHUNKS, BYTES_PER_CHUNK = 128, 64
_TOO_LARGE, _TOO_LARGE_BODY = 431, 413
_ODD_LINE_END = re.compile(rb"(?<!\r)\n|\r[^\n]")
_CHUNK_LINE = re.compile(rb"[0-9A-Fa-f]{1,16}(;[\t\x20-\x7e]*)?\r\n")
_VERSION = re.compile(rb" HTTP/([0-9]\.[0-9])\Z")
_LENGTH = re.compile(rb"content-length:[ \t]*([0-9]{1,19})[ \t]*\Z", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """The server's end of a connection; `error` is why the last request was refused."""

    _receive_buffer: StrictBuffer

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        # h11 has no option for this: its parser asks the buffer for lines
        self._receive_buffer = StrictBuffer()
        self.error: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        """Raises h11.RemoteProtocolError: what has come is refused."""
        self._receive_buffer.has_request = self.their_state is h11.IDLE
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.error = error
            raise


class StrictBuffer(ReceiveBuffer):
    """Bytes that h11 has not taken; lines leave it in one form only."""

    def __init__(self) -> None:
        super().__init__()
        # of what no line has left yet: looked at already
        self._num_checked = 0
        # the next lines are those of a request, not a trailer's
        self.has_request = False
        # of the body that is read
        self._num_chunks = self._num_bytes = 0

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Lines up to an empty one, without their ends; None until that has come.

        Raises:
            h11.LocalProtocolError: lines of another form, or too many.
        """
        data = self._data
        if data[:2] != b"\r\n":
            begin = max(0, self._num_checked - 3)
            end = data.find(b"\r\n\r\n", begin)
            stop = len(data) if end < 0 else end + 4
            if stop > MAX_HEAD_BYTES:
                raise h11.LocalProtocolError("headers that are too long", _TOO_LARGE)
            if odd := _ODD_LINE_END.search(data, begin, stop):
                raise h11.LocalProtocolError(f"a line that ends with {odd[0][:1]!r} alone")
            self._num_checked = stop
            if end < 0:
                return None
        self._num_checked = 0
        lines = super().maybe_extract_lines()
        if lines is not None:
            _check(lines, self.has_request)
            self._num_chunks = self._num_bytes = 0
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """The line that begins a chunk.

        Raises:
            h11.LocalProtocolError: it is of another form, or the body has too many chunks.
        """
        line = super().maybe_extract_next_line()
        if len(self._data if line is None else line) > _MAX_CHUNK_LINE:
            raise h11.LocalProtocolError("a chunk whose first line is too long")
        if line is not None and not _CHUNK_LINE.fullmatch(line):
            raise h11.LocalProtocolError("a chunk with an odd first line")
        if line is not None:
            self._num_chunks += 1
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // BYTES_PER_CHUNK:
                raise h11.LocalProtocolError(
                    f"a body of more than {FREE_CHUNKS} chunks that have fewer than"
                    f" {BYTES_PER_CHUNK} bytes on average",
                    _TOO_LARGE_BODY,
                )
            self._num_bytes += int(line.partition(b";")[0], 16)
        return line


def _check(lines: list[bytearray], has_request: bool) -> None:
    """Of a head or a trailer; what h11 refuses is left to it."""
    if len(lines) > MAX_HEAD_LINES:
        raise h11.LocalProtocolError("too many headers", _TOO_LARGE)
    if any(line[:1] in (b" ", b"\t") for line in lines):
        raise h11.LocalProtocolError("a header that is folded")
    names = [bytes(line[:18]).lower() for line in lines]
    lengths = [i for i, name in enumerate(names) if name.startswith(b"content-length:")]
    # h11 merges lengths that are equal
    if len(lengths) > 1 or not all(_LENGTH.match(lines[i]) for i in lengths):
        raise h11.LocalProtocolError("Content-Length that is no number, or that repeats")
    has_chunks = any(name.startswith(b"transfer-encoding:") for name in names)
    if lengths and has_chunks:
        raise h11.LocalProtocolError("Content-Length beside Transfer-Encoding")
    version = _VERSION.search(lines[0]) if lines and has_request else None
    if version and version[1] not in (b"1.0", b"1.1"):
        raise h11.LocalProtocolError("a version of HTTP that is neither 1.0 nor 1.1", 505)
    if version and version[1] == b"1.0" and has_chunks:
        raise h11.LocalProtocolError("Transfer-Encoding in a request of HTTP/1.0")
