"""Connections of the HTTP server: how many, and for how long without a word.

A connection holds a file descriptor and some memory, whoever is at its other end. Those that send
no request are the first to go where connections run out: the longest-waiting one makes room for
the newest, so that no number of idle ones keeps others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from specc.server.config import ConnectionLimits
from specc.server.error_forms import error_response
from specc.server.errors import ApiError, to_bytes
from specc.server.origin_options import Origins
from specc.server.origins import with_origins
from specc.server.strict_http import StrictConnection
from specc.server.turns import LongTurns, Turns

# over the limit, connections that are answered here only: whoever watches the server needs them
EXTRA_CONNECTIONS = 64
# until TLS has come to its end: `look` is earlier, and cuts nobody who still reads
_LOOKED_AT_S = 86400.0
_STATUS_PATHS = frozenset(("/health", "/ping", "/metrics"))
_log = logging.getLogger("specc.serve")


class Connections:
    """All connections of one server.

    Args:
        origins: whose pages may read what is answered here.
        tls: encrypts connections; None leaves them plain.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        origins: Origins | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits
        self.refuse = with_origins(_refuse, origins or Origins())
        self.long_turns = LongTurns()
        self._tls = tls
        # whose request has not come as a whole; the longest-waiting one is the first
        self._waiting: dict[Handshake | StrictProtocol, None] = {}
        self._open: set[Handshake | StrictProtocol] = set()

    def make(self, **options: Any) -> Handshake | StrictProtocol:
        """One more, for uvicorn."""
        if self._tls is None:
            return StrictProtocol(self, **options)
        return Handshake(self, self._tls, functools.partial(StrictProtocol, self, **options))

    def end_handshakes(self) -> None:
        """Cut those that have not begun to speak HTTP."""
        for protocol in [one for one in self._open if isinstance(one, Handshake)]:
            protocol.transport.abort()

    def admit(self, protocol: Handshake | StrictProtocol) -> bool:
        """Whether it may stay; another one may have to go instead."""
        self._open.add(protocol)
        if len(self._open) > self.limits.max_connections:
            _log.warning("more than %d connections", self.limits.max_connections)
            if self._waiting:
                oldest = next(iter(self._waiting))
                self.remove(oldest)
                oldest.transport.abort()
            # there were more before, for the status: one that left makes no room for another
            if len(self._open) > self.limits.max_connections:
                protocol.answers_status_only()
        if len(self._open) > self.limits.max_connections + EXTRA_CONNECTIONS:
            self.remove(protocol)
            return False
        self.wait(protocol)
        return True

    def wait(self, protocol: Handshake | StrictProtocol) -> None:
        """A connection's turn to send; the last one to have it."""
        self._waiting.pop(protocol, None)
        self._waiting[protocol] = None

    def serve(self, protocol: StrictProtocol) -> None:
        """The server's turn: the request has come."""
        self._waiting.pop(protocol, None)

    def remove(self, protocol: Handshake | StrictProtocol) -> None:
        self._waiting.pop(protocol, None)
        self._open.discard(protocol)

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.asynccontextmanager
    async def watched(self, state: ServerState) -> AsyncIterator[None]:
        """End those that are late, as long as this lasts."""

        async def look() -> None:
            now_s = asyncio.get_running_loop().time
            while True:
                await asyncio.sleep(self.limits.look_every_s)
                for connection in list(state.connections):
                    cast(StrictProtocol, connection).look(now_s())

        task = asyncio.ensure_future(look())
        try:
            yield
        finally:
            task.cancel()


class Handshake(asyncio.Protocol):
    """A connection until its client has shown that it speaks TLS.

    It has a place among all connections from the beginning: asyncio's own way to serve TLS tells
    nobody of those whose handshake does not come, and lets each of them stay for a minute.

    Args:
        context: of the server's certificate.
        make: what speaks HTTP with the client then.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        connections: Connections,
        context: ssl.SSLContext,
        make: Callable[[], StrictProtocol],
    ) -> None:
        self._connections = connections
        self._context = context
        self._make = make
        self._task: asyncio.Task[None] | None = None
        # what came together with the last part of the handshake
        self._early = bytearray()

    def answers_status_only(self) -> None:
        """What speaks HTTP then has a place of its own, or has not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._connections.admit(self):
            self._task = asyncio.ensure_future(self._begin())
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)

    async def _begin(self) -> None:
        limits = self._connections.limits
        try:
            if self.transport.is_closing():
                return
            over_tls = await asyncio.get_running_loop().start_tls(
                self.transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=limits.head_timeout_s,
                ssl_shutdown_timeout=_LOOKED_AT_S,
            )
        except OSError as error:
            # whoever speaks something else, knows another authority, or comes too late
            _log.debug("a handshake failed: %s", str(error) or type(error).__name__)
            return
        finally:
            self._connections.remove(self)
        # asyncio has none for a client that is gone already
        if over_tls is None or over_tls.is_closing():
            return
        protocol = self._make()
        # as much as waits for a client without TLS
        over_tls.set_write_buffer_limits(HIGH_WATER_LIMIT)
        over_tls.set_protocol(protocol)
        protocol.below = self.transport
        protocol.connection_made(over_tls)
        if self._early and not over_tls.is_closing():
            protocol.data_received(bytes(self._early))


class StrictProtocol(H11Protocol):
    """uvicorn's, with strict parsing, a place among all connections, and further timeouts.

    uvicorn's own timeout is for a connection that is kept alive and has sent nothing since.
    """

    conn: StrictConnection
    _turns: Turns

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = StrictConnection()
        self._connections = connections
        self._num_answered = 0
        # what it does, and since when
        self._stage: tuple[str, int] = ("", 0)
        self._stage_s = 0.0
        # what carries the encrypted bytes
        self.below: asyncio.Transport | None = None
        # bytes that the client has not read, and since when they do not become fewer
        self._num_unread, self._unread_s = 0, 0.0

    def answers_status_only(self) -> None:
        """The limit is reached: all but questions for the server's health get an error."""
        self.app = cast(Any, _StatusOnly(cast(ASGIApp, self.app), self._connections.refuse))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._turns = Turns(transport, self._take, self._connections.long_turns)
        if not self._connections.admit(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._turns.close()
        self._connections.remove(self)
        super().connection_lost(exc)
        # uvicorn's timer would keep a connection that was cut off
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        self._turns.feed(data)

    def _take(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._connections.serve(self)

    def on_response_complete(self) -> None:
        self._num_answered += 1
        self._turns.begin_request()
        # before the next request, which may have come already
        if not self.transport.is_closing():
            self._connections.wait(self)
        super().on_response_complete()
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._connections.serve(self)

    def resume_writing(self) -> None:
        self._num_unread = 0
        super().resume_writing()

    def look(self, now_s: float) -> None:
        """Cut the connection where it is late; called now and then."""
        limits = self._connections.limits
        stage = (self._name_stage(), self._num_answered)
        if stage != self._stage:
            self._stage, self._stage_s = stage, now_s
        num_unread = self.transport.get_write_buffer_size()
        if self.below is not None:
            num_unread += self.below.get_write_buffer_size()
        if not num_unread or num_unread < self._num_unread or not self._num_unread:
            self._unread_s = now_s
        self._num_unread = num_unread
        seconds = now_s - self._stage_s
        is_late = stage[0] == "head" and seconds > limits.head_timeout_s
        is_late |= stage[0] == "rest" and seconds > limits.rest_timeout_s
        # all is said; TLS would wait for the client to say so, too, which few do
        is_late |= stage[0] == "closing" and not num_unread and seconds > limits.look_every_s
        if is_late or now_s - self._unread_s > limits.unread_timeout_s:
            self.transport.abort()

    def _name_stage(self) -> str:
        """`head`: of a request; `rest`: of a body that was answered; `idle`: kept alive; `closing`;
        or `busy`.
        """
        if self.transport.is_closing():
            return "closing"
        if self.conn.their_state is h11.IDLE:
            return "idle" if self.timeout_keep_alive_task is not None else "head"
        has_answered = self.cycle is not None and self.cycle.response_complete
        return "rest" if has_answered and self.conn.their_state is h11.SEND_BODY else "busy"

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            # whatever is at work for it finds its client gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        error = self.conn.error
        status = error.error_status_hint if error is not None else 400
        text = f"This is not HTTP/1.1: {str(error)[:200]}. Please correct the request."
        body = to_bytes(ApiError(status, text, code="malformed_http").to_json())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        reason = STATUS_PHRASES.get(status, b"")
        response = h11.Response(status_code=status, headers=headers, reason=reason)
        is_head = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
        data = h11.Data(data=b"" if is_head else body)
        for event in (response, data, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _StatusOnly:
    """Refuses all requests but those of whoever watches the server."""

    def __init__(self, app: ASGIApp, refuse: ASGIApp) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if scope["path"] in _STATUS_PATHS else self._refuse
        await app(scope, receive, send)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(
        503,
        "There are more connections than this server takes. Please try again later, and keep"
        " connections for several requests.",
        kind="overloaded_error",
        code="too_many_connections",
        headers={"Retry-After": "1", "Connection": "close"},
    )
    await error_response(error)(scope, receive, send)
