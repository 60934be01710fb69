"""What attacks a server: grammars, prompts, templates, connections, bodies.

Every attack goes on until it is told to end; what the server answers is counted by status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# seconds that an attacker waits for its answer, and between two attacks of one kind
PATIENCE_S, PAUSE_S = 20.0, 0.2
# a template that serves ordinary messages, and messages that make it work without end
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.loops -%}"
    "{%- for i in range(message.loops) -%}{%- for j in range(message.loops) -%}"
    "{%- endfor -%}{%- endfor -%}"
    "{%- elif message.copies -%}{{ 'x' * message.copies }}"
    "{%- else -%}{{ message.role }}: {{ message.content }}\n{%- endif -%}"
    "{%- endfor -%}assistant:"
)


def request(path: str, body: Any = None, method: str = "POST", key: str | None = None) -> bytes:
    """The bytes of a request, whose answer ends where the connection does."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += "" if key is None else f"Authorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def ask(port: int, data: bytes, timeout_s: float) -> tuple[int, bytes]:
    """Send a request; returns status and body, as they came.

    Raises:
        OSError: there is no connection, or it breaks.
        TimeoutError: the answer is late.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        try:
            with contextlib.suppress(ConnectionError):  # answered before it was read
                writer.write(data)
                await writer.drain()
            answer = await reader.read(-1)
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        raise ConnectionResetError("no answer")
    return int(head[9:12]), body


class Attack:
    """One kind of attack.

    Args:
        port: of the server.
        counts: answers by kind of attack and status.
    """

    name = ""
    # at a time
    num_workers = 1

    def __init__(self, port: int, counts: Counter[str]) -> None:
        self.port, self.counts = port, counts
        self.payloads = self.prepare()

    def prepare(self) -> list[bytes]:
        """Requests, made once."""
        return []

    async def run(self) -> None:
        """Attack until cancelled."""
        await asyncio.gather(*(self._work(index) for index in range(self.num_workers)))

    async def _work(self, index: int) -> None:
        while True:
            for offset in range(len(self.payloads)):
                data = self.payloads[(index + offset) % len(self.payloads)]
                await self.count(lambda data=data: ask(self.port, data, PATIENCE_S))  # type: ignore[misc]
                await asyncio.sleep(PAUSE_S)

    async def count(self, call: Callable[[], Awaitable[tuple[int, bytes]]]) -> None:
        try:
            kind = str((await call())[0])
        except TimeoutError:
            kind = "late"
        except OSError:
            kind = "cut"
        self.counts[f"{self.name} {kind}"] += 1


class References(Attack):
    """Schemas and grammars that refer on and on: compilers that recurse run out of stack."""

    name, num_workers = "references", 2

    def prepare(self) -> list[bytes]:
        return [
            request(COMPLETIONS, {"prompt": "a", "max_tokens": 4, **form})
            for form in (
                {"guided_json": chained_schema(5000)},
                {"guided_grammar": chained_rules(4000)},
                {"guided_grammar": chained_rules(20_000)},
            )
        ]


class Prompts(Attack):
    """Prompts of megabytes: tokenizing them takes long, and may hold everything else up."""

    name, num_workers = "prompts", 3

    def prepare(self) -> list[bytes]:
        words = "def function(argument): return argument + 1\n"
        text = words * (7_500_000 // len(words))
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
        numbers = {"prompt": [1] * 2_500_000, "max_tokens": 4}
        return [
            request(COMPLETIONS, {"prompt": text, "max_tokens": 4}),
            request(CHATS, chat),
            request(COMPLETIONS, numbers),
            request(COMPLETIONS, {"prompt": "é" * 1_200_000, "max_tokens": 4}),
        ]


class Choices(Attack):
    """Choices without end: compiling them takes long."""

    name, num_workers = "choices", 6

    def prepare(self) -> list[bytes]:
        return [
            request(
                COMPLETIONS,
                {"prompt": "a", "max_tokens": 4, "guided_choice": [f"item {i}" for i in range(n)]},
            )
            # beyond what a server takes, just below it, and ordinary
            for n in (100_000, 18_000, 5000)
        ]


class Templates(Attack):
    """Messages that let a chat template loop, or write a text of a gigabyte."""

    name, num_workers = "templates", 2

    def prepare(self) -> list[bytes]:
        messages = (
            {"role": "user", "content": "a", "loops": 90_000},
            {"role": "user", "content": "a", "copies": 500_000_000},
        )
        return [request(CHATS, {"messages": [m], "max_tokens": 4}) for m in messages]


class Connections(Attack):
    """More connections than a process may have files: idle, slow, and those that never read."""

    name, num_workers = "connections", 1100
    num_new_per_s = 400

    async def run(self) -> None:
        self._begin_s, self._num_made = time.monotonic(), 0
        await super().run()

    async def _work(self, index: int) -> None:
        deed = (self._idle, self._slow_head, self._slow_body, self._slow_read)[index % 4]
        while True:
            # one after the other, at a rate that one machine can have
            self._num_made += 1
            begin_s = self._begin_s + self._num_made / self.num_new_per_s
            await asyncio.sleep(max(0.0, begin_s - time.monotonic()))
            await self.count(lambda: self._connect(deed))
            await asyncio.sleep(1.0)

    async def _connect(self, deed: Callable[[Any, Any], Awaitable[None]]) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            await deed(reader, writer)
        finally:
            writer.transport.abort()
        return 0, b""

    async def _idle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async def _slow_head(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._send_slowly(writer, request("/health", method="GET"))

    async def _slow_body(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = request(COMPLETIONS, {"prompt": "a" * 500})
        writer.write(data[:200])
        await self._send_slowly(writer, data[200:])

    async def _slow_read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # a large answer that costs the engine nothing
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(120):
            writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await asyncio.sleep(1.0)
            if writer.transport.is_closing():
                return

    async def _send_slowly(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        for i in range(len(data)):
            writer.write(data[i : i + 1])
            await writer.drain()
            await asyncio.sleep(2.0)


class Streams(Attack):
    """What goes on over one connection: bodies that come in another way than clients send them, and
    answers that nobody reads.
    """

    patience_s = 60.0
    path = COMPLETIONS

    @property
    def head(self) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        return f"{head}Content-Type: application/json\r\n".encode()

    async def _work(self, index: int) -> None:
        while True:
            await self.count(lambda: self._send(index))
            await asyncio.sleep(PAUSE_S)

    async def _send(self, index: int) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        work = asyncio.ensure_future(self._write(reader, writer, index))
        try:
            async with asyncio.timeout(self.patience_s):
                answer = await self._read(reader, work)
        finally:
            work.cancel()
            writer.transport.abort()
        if not answer.startswith(b"HTTP/1.1 "):
            raise ConnectionResetError("no answer")
        return int(answer[9:12]), b""

    async def _read(self, reader: asyncio.StreamReader, work: asyncio.Future[None]) -> bytes:
        return await reader.read(1 << 16)

    async def _write(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, index: int
    ) -> None:
        raise NotImplementedError


class Chunks(Streams):
    """Bodies of one byte in each chunk, at half a megabyte a second of each connection."""

    name, num_workers = "chunks", 8

    async def _write(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, index: int
    ) -> None:
        writer.write(self.head + b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                # some at the length that is just taken, the others at the shortest
                size = 64 if index % 4 == 3 else 1
                chunk = b"%x\r\n%s\r\n" % (size, b" " * size)
                writer.write(chunk * (50_000 // len(chunk)))
                await writer.drain()
                await asyncio.sleep(0.1)


class Bodies(Streams):
    """Bodies that are begun fast and then hardly go on: they hold memory, and a connection."""

    name, num_workers = "bodies", 200

    async def _write(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, index: int
    ) -> None:
        size = 8_000_000 if index < 20 else 40_000
        writer.write(self.head + b"Content-Length: %d\r\n\r\n" % (size + 2000))
        with contextlib.suppress(ConnectionError):
            for _ in range(0, size, 20_000):
                writer.write(b" " * 20_000)
                await writer.drain()
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(1.0)


class SlowRead(Streams):
    """Streams with many log probabilities that nobody reads."""

    name, num_workers = "slow-read", 4
    body: ClassVar[dict[str, Any]] = {"prompt": "a", "n": 2, "logprobs": 20, "max_tokens": 60}

    async def _read(self, reader: asyncio.StreamReader, work: asyncio.Future[None]) -> bytes:
        await work
        return b"HTTP/1.1 000"

    async def _write(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, index: int
    ) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        data = json.dumps(
            self.body | {"stream": True, "ignore_eos": True, "temperature": 0}
        ).encode()
        writer.write(self.head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        for _ in range(30):
            await asyncio.sleep(0.2)
            if writer.transport.is_closing():
                return


def chained_schema(count: int) -> dict[str, Any]:
    """Definitions of which each is the next one."""
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{count}": {"type": "string"}}}


def chained_rules(count: int) -> str:
    """Rules of which each is the next one."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    return f'start: r0\n{rules}\nr{count}: "a"\n'
