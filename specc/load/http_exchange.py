"""HTTP/1.1 as a load needs it: one request a connection, and a body that is read as it comes.

The standard library's client blocks, and a load generator should cost next to nothing; so this is
the little of the protocol that a server of completions speaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from specc.errors import ConfigError, FaultError

# bytes of a line or of all headers at most
_MOST = 1 << 20
_DO = "look at the server's log; is this address the one of an HTTP server?"


@dataclass(frozen=True)
class BaseUrl:
    """Where a server is.

    Args:
        host: name or address.
        port: TCP.
        is_secure: https.
        path: before every path, without a slash at its end.
    """

    host: str
    port: int
    is_secure: bool
    path: str

    @classmethod
    def parse(cls, text: str) -> BaseUrl:
        """Read `http://localhost:8000`, with or without `/v1`.

        Raises:
            ConfigError: no such address.
        """
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--base-url {text}", "an address of a server", "--base-url http://localhost:8000"
            )
        is_secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_secure else 80), is_secure, path)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Response:
    """An answer whose body is still to come.

    Args:
        status: such as 200.
        headers: by lower-case name.
        reader: of the body.
    """

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader):
        self.status = status
        self.headers = headers
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            FaultError: it ends too early, or breaks the protocol.
        """
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await _line(self._reader)).split(b";")[0], 16):
                    yield await self._reader.readexactly(size)
                    await _line(self._reader)
                return
            left = int(self.headers.get("content-length", -1))
            while left and (piece := await self._reader.read(left if left > 0 else _MOST)):
                left -= len(piece) if left > 0 else 0
                yield piece
            if left > 0:
                raise FaultError("an answer that ends too early", "all of its body", _DO)
        except asyncio.IncompleteReadError as error:
            raise FaultError("an answer that ends too early", "all of its body", _DO) from error
        except ValueError as error:
            raise FaultError("an answer that is no HTTP", "HTTP/1.1", _DO) from error

    async def read(self) -> bytes:
        """All of the body."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[str]:
        """Data of server-sent events, as they come."""
        data: list[str] = []
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                text = line.rstrip(b"\r").decode("utf-8", "replace")
                if text.startswith("data:"):
                    data.append(text[5:].removeprefix(" "))
                elif not text and data:
                    yield "\n".join(data)
                    data = []


@contextlib.asynccontextmanager
async def open_request(
    base: BaseUrl,
    method: str,
    path: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Response]:
    """Send a request over a connection of its own, which closes after the block.

    Raises:
        OSError: nobody listens, or the connection broke.
        FaultError: the answer is no HTTP.
    """
    secure = ssl.create_default_context() if base.is_secure else None
    reader, writer = await asyncio.open_connection(base.host, base.port, ssl=secure, limit=_MOST)
    try:
        lines = {"Host": base.authority, "Connection": "close", "Content-Length": str(len(body))}
        lines |= headers or {}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"{method} {base.path}{path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        await writer.drain()
        yield await _response(reader)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _response(reader: asyncio.StreamReader) -> Response:
    try:
        status = int((await _line(reader)).split()[1])
        headers = {}
        while line := (await _line(reader)).decode("latin-1"):
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
    except (ValueError, IndexError, asyncio.IncompleteReadError) as error:
        raise FaultError("an answer that is no HTTP", "HTTP/1.1", _DO) from error
    return Response(status, headers, reader)


async def _line(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\n")).rstrip(b"\r\n")
